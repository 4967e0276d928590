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

// Shares of `blocks` blocks that are as even as steps of `kStep` tokens allow, whatever the
// length: all blocks work where a partition of fixed size would leave some idle.
template <int kStep>
struct EvenShares {
  KeyRange keys;
  int32_t start, tokens;  // of the first share, of one share

  __device__ __forceinline__ EvenShares(KeyRange keys, int32_t blocks)
      : keys(keys), start(keys.first & -kStep) {
    const int32_t exact = (keys.end - start + blocks - 1) / blocks;
    tokens = max(exact + kStep - 1, kStep) & -kStep;
  }

  // Shares that hold keys: at least one.
  __device__ __forceinline__ int32_t count() const {
    return max((keys.end - start + tokens - 1) / tokens, 1);
  }

  // Keys of a share; none behind the last. Its start is a whole step even there, where it lies
  // behind the last key: what a warp loads begins at a whole step.
  __device__ __forceinline__ KeyRange share(int32_t index) const {
    const int32_t first = start + index * tokens;
    return {max(keys.first, first), min(keys.end, first + tokens)};
  }
};

}  // namespace paged_trt
