// A device-side schedule: the keys of a ragged batch, cut into equal runs, one for each block.
//
// Every block derives its own run from the lengths, so there is no kernel ahead, no copy to the
// host and nothing that a captured graph would freeze. A run may cover the end of one column, a
// (sequence, block of heads), several whole ones and the start of another. Where the lengths are
// so even that whole columns do it as well, nothing is cut and nothing has to be merged: the grid
// has a block for each long column, and multiprocessors that read faster get more of them.
#pragma once

#include "partitions.cuh"
#include "softmax_math.cuh"

namespace paged_trt {

// Runs are cut between chunks of this many tokens; a step of a warp never crosses one.
constexpr int kChunkTokens = 64;
// What a piece costs besides its chunks, in chunks: its first loads and its merge.
constexpr int kPieceCost = 2;
// Whole columns of fewer chunks are dealt out in advance: with the next one's keys on their way
// under the merge of one, blocks gain more than by taking them one at a time.
constexpr int kLongColumn = 64;

// Part of the keys of one column, all of them where it has no neighbours.
struct Piece {
  int32_t sequence, column;  // column: kv head * blocks of heads + block of heads
  KeyRange keys;
  int32_t first_block, num_blocks, index;  // the blocks that share them, and which one this is
  int32_t exists;
};

// One warp makes the pieces, one ahead of what the block needs; all of it is in shared memory, so
// that it takes no registers from the keys in flight.
template <class Args>
class Schedule {
 public:
  // `columns` is the number of blocks of heads of a sequence. The first warp calls it.
  __device__ __forceinline__ void begin(const Args& args, int32_t columns) {
    const Costs costs = sum_costs(args);
    const int64_t total = static_cast<int64_t>(costs.sum) * columns;
    const int64_t num_columns = static_cast<int64_t>(costs.count) * columns;
    const int64_t sharing = args.num_blocks;  // of the grid's blocks, the first ones
    const int64_t even = max((total + sharing - 1) / sharing, static_cast<int64_t>(1));
    const int64_t taking = costs.most >= kLongColumn ? gridDim.x : sharing;
    const int64_t whole = (num_columns + taking - 1) / taking;
    // Of several rounds the last may leave more blocks without work: the others then read faster.
    const int64_t rounds = (num_columns + sharing - 1) / sharing;
    const bool cuts = rounds * costs.most > even + even / (rounds > 1 ? 16 : 32);
    const int64_t run = cuts ? even : whole, all = cuts ? total : num_columns;
    const int64_t unit = min(run * blockIdx.x, all), end = min(unit + run, all);
    if (threadIdx.x == 0) {
      columns_ = columns, per_block_ = even, unit_ = unit, end_ = end, cuts_ = cuts;
    }
    if (unit < end) {
      if (cuts) {
        seek(args, columns, unit);
      } else if (threadIdx.x == 0) {
        // Padding rows are the last ones: the others are counted through.
        sequence_ = unit / columns, column_ = unit % columns;
        cost_ = cost_of(args, sequence_), offset_ = 0;
      }
    }
    if (threadIdx.x == 0) {
      make(args, 0);
      make(args, 1);
    }
  }

  // Piece number `index` of this block, as long as number index + 3 is not made.
  __device__ __forceinline__ const Piece& piece(int32_t index) const { return pieces_[index % 3]; }

  // Makes piece number `index`, in order. One thread calls it.
  __device__ __forceinline__ void make(const Args& args, int32_t index) {
    Piece& piece = pieces_[index % 3];
    piece.exists = 0;
    if (!cuts_) {
      if (unit_ >= end_) return;
      describe(args, piece, 0, cost_ - kPieceCost);
      if (++unit_ < end_) advance(args);
      return;
    }
    while (unit_ < end_ && piece.exists == 0) {
      const int32_t count =
          static_cast<int32_t>(min(static_cast<int64_t>(cost_ - offset_), end_ - unit_));
      // The first units of a column are its cost, not its chunks.
      const int32_t from = max(offset_ - kPieceCost, 0), to = max(offset_ + count - kPieceCost, 0);
      if (from < to) describe(args, piece, from, to);
      unit_ += count;
      if (unit_ < end_) advance(args);
    }
  }

 private:
  static __device__ __forceinline__ KeyRange keys_of(const Args& args, int32_t sequence) {
    return visible_keys(args.past_lens[sequence], args.window, args.table_width);
  }

  __device__ __forceinline__ void describe(const Args& args, Piece& piece, int32_t from,
                                           int32_t to) const {
    const KeyRange all = keys_of(args, sequence_);
    const int32_t start = all.first & -kChunkTokens;
    piece = {sequence_, column_,
             {max(all.first, start + from * kChunkTokens), min(all.end, start + to * kChunkTokens)},
             0, 1, 0, 1};
    if (to - from == cost_ - kPieceCost) return;
    const int64_t column_start = unit_ - offset_;
    piece.first_block = static_cast<int32_t>((column_start + kPieceCost) / per_block_);
    piece.num_blocks =
        static_cast<int32_t>((column_start + cost_ - 1) / per_block_) - piece.first_block + 1;
    piece.index = static_cast<int32_t>(blockIdx.x) - piece.first_block;
  }

  // At least one chunk, so that a sequence that sees no key has somebody to say so; 0 for padding.
  static __device__ __forceinline__ int32_t cost_of(const Args& args, int32_t sequence) {
    if (sequence >= args.num_seqs || args.query_start_offsets[sequence + 1] <= sequence) return 0;
    const KeyRange keys = keys_of(args, sequence);
    const int32_t start = keys.first & -kChunkTokens;
    return max((keys.end - start + kChunkTokens - 1) / kChunkTokens, 1) + kPieceCost;
  }

  struct Costs {
    int32_t sum, most, count;  // over sequences
  };

  static __device__ __forceinline__ Costs sum_costs(const Args& args) {
    uint32_t sum = 0, most = 0, count = 0;
    for (int32_t n = threadIdx.x & 31; n < args.num_seqs; n += 32) {
      const uint32_t cost = cost_of(args, n);
      sum += cost, most = max(most, cost), count += cost > 0;
    }
    return {static_cast<int32_t>(__reduce_add_sync(kAllLanes, sum)),
            static_cast<int32_t>(__reduce_max_sync(kAllLanes, most)),
            static_cast<int32_t>(__reduce_add_sync(kAllLanes, count))};
  }

  // The sequence, column and offset of a unit.
  __device__ __forceinline__ void seek(const Args& args, int32_t columns, int64_t unit) {
    int64_t before = 0;  // units of the sequences before
    for (int32_t n = 0;; n += 32) {
      const int lane = threadIdx.x & 31;
      const int32_t own = cost_of(args, n + lane);
      int32_t through = own;  // costs of this and the lanes before
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, through, d);
        if (lane >= d) through += other;
      }
      const bool reaches = before + static_cast<int64_t>(through) * columns > unit;
      const uint32_t found = __ballot_sync(kAllLanes, reaches);
      if (found != 0) {
        const int first = __ffs(found) - 1;
        const int32_t cost = __shfl_sync(kAllLanes, own, first);
        const int32_t costs_before = __shfl_sync(kAllLanes, through, first) - cost;
        const auto rest =
            static_cast<uint32_t>(unit - (before + static_cast<int64_t>(costs_before) * columns));
        if (lane == 0) sequence_ = n + first, cost_ = cost, column_ = rest / cost, offset_ = rest % cost;
        return;
      }
      before += static_cast<int64_t>(__shfl_sync(kAllLanes, through, 31)) * columns;
    }
  }

  // To the next block of heads; there is one, because units are left.
  __device__ __forceinline__ void advance(const Args& args) {
    offset_ = 0;
    if (++column_ < columns_) return;
    column_ = 0;
    do {
      cost_ = cost_of(args, ++sequence_);
    } while (cost_ == 0);
  }

  Piece pieces_[3];
  int32_t columns_;
  bool cuts_;
  int64_t per_block_, unit_, end_;  // units: of cost over all columns in order, or whole columns
  int32_t sequence_, column_, offset_, cost_;
};

}  // namespace paged_trt
