// Results of a query tile on Hopper: where they go, and how a warpgroup brings them there.
#pragma once

#include "attention_output.cuh"
#include "prefill_sm90_layout.cuh"

namespace paged_trt {

// Row of the output that a row of a query tile goes to.
template <class Layout>
__device__ __forceinline__ typename Layout::Type* output_row(const PrefillSm90Args& args,
                                                             int32_t first_token, int32_t kv_head,
                                                             int row) {
  const int64_t token = first_token + row / Layout::kGroup;
  const int head = kv_head * Layout::kGroup + row % Layout::kGroup;
  return static_cast<typename Layout::Type*>(args.output) + token * args.output_token_stride +
         head * Layout::kValueDim;
}

__device__ __forceinline__ void store_word(unsigned address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ uint4 load_words(unsigned address) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}

}  // namespace paged_trt
