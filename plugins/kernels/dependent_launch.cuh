// Programmatic dependent launch: a kernel may start before the one ahead of it has ended. Without
// the launch attribute, and before sm_90, both calls do nothing.
#pragma once

namespace paged_trt {

// Nothing that an earlier kernel of the chain wrote may be touched before this.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Ahead of the wait: the address is known when it is over, and not computed then.
template <class T>
__device__ __forceinline__ void know_before_waiting(T*& place) {
#if __CUDA_ARCH__ >= 900
  asm volatile("" : "+l"(place));
#endif
}

__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace paged_trt
