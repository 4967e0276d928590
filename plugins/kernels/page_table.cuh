// From positions to places in a pool.
#pragma once

#include "element_types.cuh"

namespace paged_trt {

// A page id outside [0, num_pages) is never dereferenced: its positions are masked.
__device__ __forceinline__ bool is_page(int32_t page, int32_t num_pages) {
  return static_cast<uint32_t>(page) < static_cast<uint32_t>(num_pages);
}

// First element of the [128, dim] tile of a (page, kv head). 64-bit: pools pass 2^31 elements.
__device__ __forceinline__ int64_t tile_offset(int32_t page, int32_t num_kv_heads, int32_t kv_head,
                                               int32_t dim) {
  return (static_cast<int64_t>(page) * num_kv_heads + kv_head) * (kTokensPerPage * dim);
}

// Entry of a page-table row, -1 where the row is not that wide.
__device__ __forceinline__ int32_t table_entry(const int32_t* row, int32_t width, int32_t index) {
  return index < width ? row[index] : -1;
}

// First position that a query at `position` sees; window -1: all.
__device__ __forceinline__ int32_t first_visible(int32_t position, int32_t window) {
  return window < 0 ? 0 : max(position - window + 1, 0);
}

}  // namespace paged_trt
