// Which query tile comes next, worked out on the device from lengths alone.
//
// A tile is a run of tokens of one sequence times the query heads of one key head. Tiles are
// ordered by the keys that they see, most first, and dealt out to the blocks there and back, so
// that all blocks end together; heads come in sections whose keys and values fit the L2 cache. No
// list is stored and no counter is shared: nothing has to be reset, and no launch can leave
// anything behind.
#pragma once

#include "page_table.cuh"
#include "softmax_math.cuh"

namespace paged_trt {

// Keys and values in use at a time; L2 has 50 to 60 MB.
constexpr int64_t kSectionBytes = 34 << 20;

struct QueryBlock {
  int32_t sequence;
  int32_t block;  // of tile_tokens tokens
};

__device__ __forceinline__ int32_t sum_of_warp(int32_t value) {
  return static_cast<int32_t>(__reduce_add_sync(kAllLanes, static_cast<unsigned>(value)));
}

// One warp's view of the step. All functions are called by the whole warp.
template <int tile_tokens, int key_tokens>
struct TileOrder {
  const PrefillSm90Args& args;
  int32_t num_blocks;  // of all sequences
  int32_t most_key_tiles;  // of a block
  int32_t section_heads;
  int32_t last_rank, last_level;  // of the last search

  __device__ __forceinline__ int32_t tokens_of(int32_t sequence) const {
    return args.query_start_offsets[sequence + 1] - args.query_start_offsets[sequence];
  }

  __device__ __forceinline__ int32_t blocks_of(int32_t sequence) const {
    if (sequence >= args.num_seqs) return 0;
    return (tokens_of(sequence) + tile_tokens - 1) / tile_tokens;
  }

  // Blocks of a sequence that see at least `level` key tiles; they are its last ones.
  __device__ __forceinline__ int32_t blocks_at_least(int32_t sequence, int32_t level) const {
    const int32_t blocks = blocks_of(sequence);
    if (blocks == 0) return 0;
    const int32_t past = args.past_lens[sequence];
    const int32_t length = tokens_of(sequence);
    const int32_t position = (level - 1) * key_tokens;  // the last token has to be here or later
    if (past + length <= position) return 0;
    const int32_t tokens = position - past + 1;  // up to that token
    const int32_t first = tokens <= 0 ? 0 : (tokens - 1) / tile_tokens;
    return blocks - min(first, blocks - 1);
  }

  __device__ __forceinline__ int32_t count_at_least(int32_t level) const {
    int32_t count = 0;
    for (int32_t sequence = threadIdx.x & 31; sequence < args.num_seqs; sequence += 32) {
      count += blocks_at_least(sequence, level);
    }
    return sum_of_warp(count);
  }

  __device__ __forceinline__ void begin(int64_t token_bytes) {
    int32_t blocks = 0, tiles = 0, tokens = 0;
    for (int32_t sequence = threadIdx.x & 31; sequence < args.num_seqs; sequence += 32) {
      const int32_t past = args.past_lens[sequence];  // asked for together with the offsets
      const int32_t count = blocks_of(sequence);
      if (count == 0) continue;
      const int32_t length = past + tokens_of(sequence);
      blocks += count;
      tokens += length;
      tiles = max(tiles, (length + key_tokens - 1) / key_tokens);
    }
    num_blocks = sum_of_warp(blocks);
    tokens = sum_of_warp(tokens);
    most_key_tiles = __reduce_max_sync(kAllLanes, static_cast<unsigned>(tiles));
    section_heads = 1;
    while (section_heads * 2 <= args.num_kv_heads &&
           section_heads * 2 * token_bytes * tokens <= kSectionBytes) {
      section_heads *= 2;
    }
    last_rank = 0;
    last_level = most_key_tiles;
  }

  // Block number `rank`, most keys first.
  __device__ __forceinline__ QueryBlock find(int32_t rank) {
    if (args.num_seqs == 1) return {0, num_blocks - 1 - rank};
    // The largest level that more than `rank` blocks reach. Ranks mostly grow from call to call.
    int32_t low = 1, high = rank >= last_rank ? last_level : most_key_tiles;
    int32_t middle = high;
    while (low < high) {
      if (count_at_least(middle) > rank) {
        low = middle;
      } else {
        high = middle - 1;
      }
      middle = (low + high + 1) / 2;
    }
    last_rank = rank;
    last_level = low;
    return find_within(low, rank - count_at_least(low + 1));
  }

  // Block number `index` of those that see exactly `level` key tiles.
  __device__ __forceinline__ QueryBlock find_within(int32_t level, int32_t index) const {
    const int32_t lane = threadIdx.x & 31;
    for (int32_t first = 0; first < args.num_seqs; first += 32) {
      const int32_t sequence = first + lane;
      const int32_t above = blocks_at_least(sequence, level + 1);
      const int32_t count = blocks_at_least(sequence, level) - above;
      int32_t through = count;
#pragma unroll
      for (int32_t distance = 1; distance < 32; distance *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, through, distance);
        if (lane >= distance) through += other;
      }
      const uint32_t reached = __ballot_sync(kAllLanes, index < through);
      if (reached != 0) {
        const int32_t owner = __ffs(reached) - 1;
        const int32_t block = blocks_of(sequence) - 1 - above - (index - (through - count));
        return {first + owner, __shfl_sync(kAllLanes, block, owner)};
      }
      index -= __shfl_sync(kAllLanes, through, 31);
    }
    return {0, 0};  // not reached: `index` is below the number of these blocks
  }
};

}  // namespace paged_trt
