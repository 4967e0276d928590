// Which query rows a block works on, and how they get to shared memory.
//
// A query row is one (token, query head) of a key head's group, token by token: a tile of keys
// is read once for the whole group, and a short query fills a tile with its heads.
#pragma once

#include "conversions.cuh"
#include "rope.cuh"
#include "shared_tile.cuh"
#include "softmax_math.cuh"

namespace paged_trt {

// A run of query rows of one sequence.
struct QueryTile {
  int32_t sequence;  // num_seqs: the token rows after the last sequence; -1: no tile
  int32_t first_token;  // token row at which the sequence starts
  int32_t first_row;  // of the tile, within the sequence
  int32_t num_rows;  // of the tile
};

// Tile number `target` of a packed step, tiles of a sequence in order, padding last. Every warp
// looks for itself: the offsets are in L1 after the first, and no barrier is needed.
template <int group_size, int tile_rows>
__device__ __forceinline__ QueryTile find_query_tile(const int32_t* query_start_offsets,
                                                     int32_t num_seqs, int32_t num_tokens,
                                                     int32_t target) {
  const int32_t lane = threadIdx.x & 31;
  int32_t tiles_before = 0;
  for (int32_t first = 0; first <= num_seqs; first += 32) {
    const int32_t sequence = first + lane;
    const int32_t begin = sequence <= num_seqs ? query_start_offsets[sequence] : num_tokens;
    const int32_t end = sequence < num_seqs ? query_start_offsets[sequence + 1] : num_tokens;
    const int32_t num_rows = (end - begin) * group_size;
    const int32_t num_tiles = (num_rows + tile_rows - 1) / tile_rows;
    int32_t tiles_through = num_tiles;
#pragma unroll
    for (int32_t distance = 1; distance < 32; distance *= 2) {
      const int32_t other = __shfl_up_sync(kAllLanes, tiles_through, distance);
      if (lane >= distance) tiles_through += other;
    }
    tiles_through += tiles_before;
    const uint32_t reached = __ballot_sync(kAllLanes, target < tiles_through);
    if (reached != 0) {
      const int32_t owner = __ffs(reached) - 1;
      const int32_t before = __shfl_sync(kAllLanes, tiles_through - num_tiles, owner);
      const int32_t rows = __shfl_sync(kAllLanes, num_rows, owner);
      const int32_t first_row = (target - before) * tile_rows;
      return {first + owner, __shfl_sync(kAllLanes, begin, owner), first_row,
              min(rows - first_row, tile_rows)};
    }
    tiles_before = __shfl_sync(kAllLanes, tiles_through, 31);
  }
  return {-1, 0, 0, 0};
}

// Eight neighbouring elements as float32.
template <class Activation>
__device__ __forceinline__ void load_eight(float (&values)[8], const Activation* source) {
  const uint4 words = *reinterpret_cast<const uint4*>(source);
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const float2 unpacked = unpack_pair<Activation>(pairs[pair]);
    values[pair * 2] = unpacked.x;
    values[pair * 2 + 1] = unpacked.y;
  }
}

// Rotates elements `first` to `first + 7` of `head` in place. `angles`: row of the position.
template <class Activation>
__device__ __forceinline__ void rotate_eight(float (&values)[8], const Activation* head,
                                             int32_t first, const float* angles,
                                             int32_t rotary_dim, int32_t rope) {
  if (first >= rotary_dim) return;
  float partners[8];
  const int32_t half = rotary_dim / 2;
  if (rope == kRopeInterleaved) {
#pragma unroll
    for (int i = 0; i < 8; ++i) partners[i] = values[i ^ 1];
  } else if (half % 8 == 0) {
    load_eight(partners, head + rope_place(first, rotary_dim, rope).partner);
  } else {
    const uint16_t* elements = reinterpret_cast<const uint16_t*>(head);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first + i >= rotary_dim) continue;
      const int32_t partner = rope_place(first + i, rotary_dim, rope).partner;
      partners[i] = unpack_one<Activation>(elements[partner]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (first + i >= rotary_dim) continue;
    const RopePlace place = rope_place(first + i, rotary_dim, rope);
    values[i] = rotate(values[i], partners[i], place, angles, rotary_dim);
  }
}

// Stores eight elements of a query row where the order of the keys' fragments wants them.
template <class Product, class Kv, class Tile>
__device__ __forceinline__ void store_eight(unsigned char* tile, int32_t row, int32_t chunk,
                                            float (&values)[8], float scale) {
  uint32_t pairs[4];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float low = values[pair * 2] * scale, high = values[pair * 2 + 1] * scale;
    if constexpr (kSameType<Product, Float16>) {
      low = clamp_keeping_nan(low, 65504.f);
      high = clamp_keeping_nan(high, 65504.f);
    }
    pairs[pair] = pack<Product>(low, high);
  }
  if constexpr (kIsQuantised<Kv>) {
    const int32_t even = chunk & ~1, place = (chunk & 1) * 8;
    *reinterpret_cast<uint2*>(tile + Tile::offset(row, even) + place) =
        make_uint2(pairs[0], pairs[2]);
    *reinterpret_cast<uint2*>(tile + Tile::offset(row, even + 1) + place) =
        make_uint2(pairs[1], pairs[3]);
  } else {
    *reinterpret_cast<uint4*>(tile + Tile::offset(row, chunk)) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// Whether query rows are scaled into the range of the products: bf16 queries pass fp16's.
template <class Activation, class Kv>
constexpr bool kScalesRows =
    kSameType<Activation, BFloat16> && kSameType<MmaType<Activation, Kv>, Float16>;

// Where a query row is. `row` is within the tile.
template <class Activation, int head_dim, int group_size>
__device__ __forceinline__ const Activation* query_row(const PrefillArgs& args,
                                                       const QueryTile& tile, int32_t kv_head,
                                                       int32_t row) {
  const int64_t token = tile.first_token + (tile.first_row + row) / group_size;
  const int32_t head = kv_head * group_size + (tile.first_row + row) % group_size;
  return static_cast<const Activation*>(args.query) + token * args.query_token_stride +
         head * head_dim;
}

// What the scores of each row have to be multiplied by: see range_scale. One thread per row; a
// rotation makes an element at most sqrt(2) larger, for which there is room.
template <int head_dim, int group_size, int tile_rows, int num_threads>
__device__ __forceinline__ void find_row_factors(float* factors, const PrefillArgs& args,
                                                 const QueryTile& tile, int32_t kv_head) {
  for (int32_t row = threadIdx.x; row < tile_rows; row += num_threads) {
    float largest = 0.f;
    if (row < tile.num_rows) {
      const BFloat16* source = query_row<BFloat16, head_dim, group_size>(args, tile, kv_head, row);
#pragma unroll 4
      for (int32_t first = 0; first < head_dim; first += 8) {
        float values[8];
        load_eight(values, source + first);
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(values[i]));
      }
    }
    factors[row] = range_scale(largest).y;
  }
}

// Inverse of a power of two.
__device__ __forceinline__ float inverse_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// Rotates, converts and stores the query rows of a tile; rows past its end become zero. `sign`
// is that of the softmax scale, which is thus positive for the rest of the kernel. `factors` is
// read where kScalesRows says so.
template <class Activation, class Kv, int head_dim, int group_size, int tile_rows, int num_threads>
__device__ __forceinline__ void stage_query(unsigned char* shared, const float* factors,
                                            const PrefillArgs& args, const QueryTile& tile,
                                            int32_t kv_head, int32_t past, float sign) {
  using Product = MmaType<Activation, Kv>;
  constexpr int kChunks = head_dim / 8;
#pragma unroll 4
  for (uint32_t index = threadIdx.x; index < tile_rows * kChunks; index += num_threads) {
    const int32_t row = index / kChunks, chunk = index % kChunks;
    float values[8] = {};
    if (row < tile.num_rows) {
      const Activation* source =
          query_row<Activation, head_dim, group_size>(args, tile, kv_head, row);
      load_eight(values, source + chunk * 8);
      if (args.rope != 0) {
        const int64_t position = past + (tile.first_row + row) / group_size;
        rotate_eight(values, source, chunk * 8, args.rope_cos_sin + position * args.rotary_dim,
                     args.rotary_dim, args.rope);
      }
    }
    const float scale = kScalesRows<Activation, Kv> ? sign * inverse_power(factors[row]) : sign;
    store_eight<Product, Kv, SharedTile<head_dim * 2>>(shared, row, chunk, values, scale);
  }
}

}  // namespace paged_trt
