// Which keys a decode token sees, and how a split decode shares them. Split and merge both derive
// it from lengths on the device, so the host never reads one.
#pragma once

#include "page_table.cuh"

namespace paged_trt {

struct KeyRange {
  int32_t first, end;
};

// Keys that the token at position `past_len` sees. Positions beyond the table have no page.
__device__ __forceinline__ KeyRange visible_keys(int32_t past_len, int32_t window,
                                                 int32_t table_width) {
  const int32_t end = min(past_len, table_width * kTokensPerPage - 1) + 1;
  return {min(first_visible(past_len, window), end), end};
}

// Partitions that hold keys: at least one, so that somebody writes a partial.
__device__ __forceinline__ int32_t count_partitions(KeyRange keys, int32_t partition_tokens,
                                                    int32_t threshold_tokens,
                                                    int32_t num_partitions) {
  if (keys.end - keys.first <= threshold_tokens) return 1;
  const int32_t base = keys.first & -kTokensPerPage;
  return min((keys.end - 1 - base) / partition_tokens + 1, num_partitions);
}

// Keys of one of `count` partitions. They start at the page of the first visible key; the last
// takes what is left, so that no key is lost where the grid is too small for the lengths.
__device__ __forceinline__ KeyRange partition_keys(KeyRange keys, int32_t partition_tokens,
                                                   int32_t count, int32_t partition) {
  const int32_t start = (keys.first & -kTokensPerPage) + partition * partition_tokens;
  return {max(keys.first, start), partition == count - 1 ? keys.end : start + partition_tokens};
}

}  // namespace paged_trt
