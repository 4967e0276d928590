// A device-side schedule: the keys of a ragged batch, cut into equal runs, one for each block.
//
// Every block derives its own run from the lengths, so there is no kernel ahead, no copy to the
// host and nothing that a captured graph would freeze. A run may cover the end of one (sequence,
// block of heads), several whole ones and the start of another.
#pragma once

#include "partitions.cuh"
#include "softmax_math.cuh"

namespace paged_trt {

// Runs are cut between chunks of this many tokens; a step of a warp never crosses one.
constexpr int kChunkTokens = 64;

// Part of the keys of one (sequence, block of heads), all of them where it has no neighbours.
struct Piece {
  int32_t sequence, column;  // column: kv head * blocks of heads + block of heads
  KeyRange keys;
  int32_t first_block, num_blocks, index;  // the blocks that share them, and which one this is
};

template <class Args>
class Schedule {
 public:
  // `columns` is the number of blocks of heads of a sequence.
  __device__ __forceinline__ Schedule(const Args& args, int32_t columns)
      : args_(args), columns_(columns) {
    const int64_t total = static_cast<int64_t>(sum_of_chunks()) * columns;
    per_block_ = max((total + gridDim.x - 1) / gridDim.x, static_cast<int64_t>(1));
    unit_ = min(per_block_ * blockIdx.x, total), end_ = min(unit_ + per_block_, total);
    if (unit_ < end_) seek();
  }

  __device__ __forceinline__ bool next(Piece& piece) {
    if (unit_ >= end_) return false;
    const int32_t count = static_cast<int32_t>(min(static_cast<int64_t>(chunks_ - chunk_), end_ - unit_));
    const KeyRange all = keys_of(sequence_);
    const int32_t start = (all.first & -kChunkTokens) + chunk_ * kChunkTokens;
    piece = {sequence_, column_,
             {max(all.first, start), min(all.end, start + count * kChunkTokens)}, 0, 1, 0};
    if (count < chunks_) {
      const int64_t first_unit = unit_ - chunk_;
      piece.first_block = static_cast<int32_t>(first_unit / per_block_);
      const int64_t last_unit = first_unit + chunks_ - 1;
      piece.num_blocks = static_cast<int32_t>(last_unit / per_block_) - piece.first_block + 1;
      piece.index = static_cast<int32_t>(blockIdx.x) - piece.first_block;
    }
    unit_ += count;
    if (unit_ < end_) advance();
    return true;
  }

 private:
  __device__ __forceinline__ KeyRange keys_of(int32_t sequence) const {
    return visible_keys(args_.past_lens[sequence], args_.window, args_.table_width);
  }

  // At least one chunk, so that a sequence that sees no key has somebody to say so; 0 for padding.
  __device__ __forceinline__ int32_t chunks_of(int32_t sequence) const {
    if (sequence >= args_.num_seqs || args_.query_start_offsets[sequence + 1] <= sequence) return 0;
    const KeyRange keys = keys_of(sequence);
    const int32_t start = keys.first & -kChunkTokens;
    return max((keys.end - start + kChunkTokens - 1) / kChunkTokens, 1);
  }

  __device__ __forceinline__ int32_t sum_of_chunks() const {
    uint32_t sum = 0;
    for (int32_t n = threadIdx.x & 31; n < args_.num_seqs; n += 32) sum += chunks_of(n);
    return static_cast<int32_t>(__reduce_add_sync(kAllLanes, sum));
  }

  // The sequence, column and chunk of the block's first unit; the same for the whole warp.
  __device__ __forceinline__ void seek() {
    int64_t before = 0;  // units of the sequences before
    for (int32_t n = 0;; n += 32) {
      const int lane = threadIdx.x & 31;
      const int32_t own = chunks_of(n + lane);
      int32_t through = own;  // chunks of this and the lanes before
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, through, d);
        if (lane >= d) through += other;
      }
      const bool reaches = before + static_cast<int64_t>(through) * columns_ > unit_;
      const uint32_t found = __ballot_sync(kAllLanes, reaches);
      if (found != 0) {
        const int first = __ffs(found) - 1;
        chunks_ = __shfl_sync(kAllLanes, own, first);
        const int32_t chunks_before = __shfl_sync(kAllLanes, through, first) - chunks_;
        const auto rest = static_cast<uint32_t>(
            unit_ - (before + static_cast<int64_t>(chunks_before) * columns_));
        sequence_ = n + first;
        column_ = rest / chunks_, chunk_ = rest % chunks_;
        return;
      }
      before += static_cast<int64_t>(__shfl_sync(kAllLanes, through, 31)) * columns_;
    }
  }

  // To the next block of heads; there is one, because units are left.
  __device__ __forceinline__ void advance() {
    chunk_ = 0;
    if (++column_ < columns_) return;
    column_ = 0;
    do {
      chunks_ = chunks_of(++sequence_);
    } while (chunks_ == 0);
  }

  const Args& args_;
  int32_t columns_;
  int64_t per_block_, unit_, end_;  // units: chunks of blocks of heads, in order
  int32_t sequence_, column_, chunk_, chunks_;
};

}  // namespace paged_trt
