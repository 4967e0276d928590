// Words to and from global memory, all of them in one instruction. Tests on a CPU have none.
#pragma once

#include "element_types.cuh"

namespace paged_trt {

// Predicated, not branched around: the next load does not wait behind a branch.
__device__ __forceinline__ void load_words_if(bool is_used, uint4& words, const void* place) {
#ifdef __CUDA_ARCH__
  asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(place), "r"(static_cast<int32_t>(is_used)));
#else
  if (is_used) words = *static_cast<const uint4*>(place);
#endif
}

// The compiler makes four stores of four bytes of an assignment.
__device__ __forceinline__ void store_words(void* place, uint4 words) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
#else
  *static_cast<uint4*>(place) = words;
#endif
}

__device__ __forceinline__ void store_words(void* place, uint2 words) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(place), "r"(words.x), "r"(words.y)
               : "memory");
#else
  *static_cast<uint2*>(place) = words;
#endif
}

}  // namespace paged_trt
