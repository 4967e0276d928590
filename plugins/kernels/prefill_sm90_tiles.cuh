// Which query tile comes next, worked out on the device from lengths alone.
//
// A tile is a run of tokens of one sequence times the query heads of one key head. Tiles are
// ordered by the keys that they see, most first, and blocks take them from a counter, or have them
// dealt out there and back, so that all end together; heads come in sections whose keys and values
// fit the L2 cache. No list is stored.
#pragma once

#include "page_table.cuh"
#include "softmax_math.cuh"

namespace paged_trt {

// Keys and values in use at a time, of 50 to 60 MB of L2 in two halves. On an H200, 17 MiB were up
// to 2.6% faster than 34 (8 x 2,048 tokens), and at most 0.4% slower (2,048 on 30,720).
constexpr int64_t kSectionBytes = 17 << 20;
// Of short sequences, queries and results are most of the traffic, and with more heads at a time
// blocks read and write more of a token's row together: 1.9% faster at 16 x 512 tokens.
constexpr int64_t kShortSectionBytes = 34 << 20;
constexpr int32_t kShortTokens = 512;

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
    const int64_t section =
        most_key_tiles * key_tokens <= kShortTokens ? kShortSectionBytes : kSectionBytes;
    section_heads = 1;
    while (section_heads * 2 <= args.num_kv_heads &&
           section_heads * 2 * token_bytes * tokens <= section) {
      section_heads *= 2;
    }
    last_rank = 0;
    last_level = most_key_tiles;
  }

  __device__ __forceinline__ int32_t num_tiles() const { return num_blocks * args.num_kv_heads; }

  // Number of the next tile of this block, after so many: the next that nobody has taken, or
  // without a counter, dealt out there and back, so that whoever got a long one gets a short one
  // next. From `num_tiles` on: none is left.
  __device__ __forceinline__ int32_t next_index(int32_t round) const {
    const int32_t blocks = gridDim.x, block = blockIdx.x;
    if (args.tile_counter == nullptr) {
      return round * blocks + (round & 1 ? blocks - 1 - block : block);
    }
    int32_t taken = 0;
    if ((threadIdx.x & 31) == 0) {
      taken = atomicAdd(args.tile_counter, 1);
      // Each tile is followed by one question, so this was the last of the launch: the next launch
      // finds the counter as this one did.
      if (taken == num_tiles() - 1) *args.tile_counter = 0;
    }
    return blocks + __shfl_sync(kAllLanes, taken, 0);
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
