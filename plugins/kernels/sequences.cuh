// From token rows to sequence rows.
#pragma once

#include "element_types.cuh"

namespace paged_trt {

// Sequence row of a token row, num_seqs for one that does not lie before offsets[num_seqs]; the whole
// warp asks for one token. Each round narrows the rows 32-fold: two rounds up to 1,024 sequences.
__device__ __forceinline__ int32_t find_sequence(const int32_t* query_start_offsets,
                                                 int32_t num_seqs, int32_t token) {
  const int32_t lane = threadIdx.x & 31;
  int32_t low = 0, high = num_seqs + 1;  // offsets[low] <= token < offsets[high]
  while (high - low > 1) {
    const int32_t stride = (high - low + 30) / 32;
    // 64-bit: near the limit of int32 sequences the last lanes' probes lie past it.
    const int64_t probe = low + 1 + static_cast<int64_t>(lane) * stride;
    const bool starts_before = probe < high && query_start_offsets[probe] <= token;
    const int32_t count = __popc(__ballot_sync(0xffffffffu, starts_before));
    high = min(static_cast<int64_t>(high), low + 1 + static_cast<int64_t>(count) * stride);
    if (count > 0) low += 1 + (count - 1) * stride;
  }
  return low;
}

}  // namespace paged_trt
