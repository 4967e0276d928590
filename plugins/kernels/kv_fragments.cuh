// Keys and values of a shared-memory tile as B operands of m16n8k16, for every type of pool.
//
// An 8-bit pool stays 8-bit in shared memory and is converted here, in registers; its scales are
// applied to scores and outputs. ldmatrix moves pairs of bytes as one element, so a lane gets four
// neighbouring elements of a key where the operand wants 2 + 2 that lie 8 apart: the product
// sums over them, so the query takes the same order (query_tile.cuh). Of a value row it gets an
// even and an odd column, which go to two operands: the accumulators' columns are permuted, and
// the epilogue knows.
#pragma once

#include "conversions.cuh"
#include "shared_tile.cuh"

namespace paged_trt {

template <class Kv, class Product, int row_bytes>
struct KeyFragments {
  using Lane = typename SharedTile<row_bytes>::Lane;
  Lane lane;

  __device__ __forceinline__ explicit KeyFragments(uint32_t lane_index)
      : lane(kIsQuantised<Kv> ? lane_index : (lane_index & 7) | (lane_index >> 4) << 3,
             kIsQuantised<Kv> ? 0 : lane_index >> 3 & 1) {}

  // Operands of 16 elements (the k index) of 32 tokens, as four groups of eight.
  __device__ __forceinline__ void load(uint32_t (&b)[4][2], uint32_t tile, int32_t token,
                                       int32_t step) const {
    uint32_t words[4];
    if constexpr (kIsQuantised<Kv>) {
      load_matrices(words, lane.address(tile, token, step));
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        expand_quad<Kv>(words[group], b[group][0], b[group][1]);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_matrices(words, lane.address(tile, token + half * 16, step * 2));
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          b[half * 2 + part / 2][part % 2] = convert_pair<Kv, Product>(words[part]);
        }
      }
    }
  }
};

template <class Kv, class Product, int row_bytes>
struct ValueFragments {
  using Lane = typename SharedTile<row_bytes>::Lane;
  Lane lane;

  __device__ __forceinline__ explicit ValueFragments(uint32_t lane_index)
      : lane(kIsQuantised<Kv> ? lane_index : lane_index & 15,
             kIsQuantised<Kv> ? 0 : lane_index >> 4) {}

  // Operands of 32 tokens (two k steps) x 16 columns (two groups of eight): b[step][group].
  __device__ __forceinline__ void load(uint32_t (&b)[2][2][2], uint32_t tile, int32_t token,
                                       int32_t columns) const {
    uint32_t words[4];
    if constexpr (kIsQuantised<Kv>) {
      load_matrices_transposed(words, lane.address(tile, token, columns));
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        // Elements of a word: token, token + 1 of the even and of the odd column.
        const uint32_t by_column = __byte_perm(words[part], 0, 0x3120);
        expand_quad<Kv>(by_column, b[part / 2][0][part % 2], b[part / 2][1][part % 2]);
      }
    } else {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        load_matrices_transposed(words, lane.address(tile, token + step * 16, columns * 2));
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          b[step][part / 2][part % 2] = convert_pair<Kv, Product>(words[part]);
        }
      }
    }
  }
};

}  // namespace paged_trt
