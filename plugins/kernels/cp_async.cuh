// Asynchronous 16-byte copies from device memory to shared memory, in groups (sm_80 and later).
#pragma once

namespace paged_trt {

// Address that PTX instructions on shared memory take.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes 16 zero bytes without reading `source` where `valid` is false.
// Both addresses are multiples of 16. `.cg` skips L1: a page is staged once per block.
__device__ __forceinline__ void copy_async_16(unsigned destination, const void* source,
                                              bool valid) {
  const int source_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source), "r"(source_bytes)
               : "memory");
}

// Closes the group of the copies that this thread issued since the last call; it may be empty.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` of this thread's groups are in flight. Other threads see the
// data only after a barrier.
template <int pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace paged_trt
