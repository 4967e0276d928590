// Keys and values of a few tokens in the registers of one warp, and the tensor-core operands that
// they make. Lane = 4 * row + column. Keys: tokens on M = 16, a row shared by the four columns.
// Values: value elements on M, a row of the pool shared by the eight rows of lanes.
#pragma once

#include "conversions.cuh"
#include "row_slices.cuh"

namespace paged_trt {

template <class Kv, class Mma, int kDim, int kTiles>
struct KeyRegisters {
  using Slice = RowSlice<kDim * static_cast<int>(sizeof(Kv)), 4>;
  static constexpr int kSteps = kDim / 16;  // of 16 elements
  static constexpr int kTokens = kTiles * 16;
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(Kv));

  uint32_t words[kTiles][2][Slice::kWords];

  // Where a lane's first load is, from the row of the first token.
  static __device__ __forceinline__ int lane_offset(int row, int column) {
    return row * kRowBytes + column * 16;
  }

  // `place` is the row of the first token plus lane_offset(); only rows [begin, end) count.
  __device__ __forceinline__ void load(const char* place, int row, int column, int begin,
                                       int end) {
    asm volatile("" : "+l"(place));  // one register pair: rows are constant offsets of it
    if (begin <= 0 && end == kTokens) {  // the same for the whole warp
#pragma unroll
      for (int i = 0; i < 2 * kTiles; i++) {
        Slice::load(words[i / 2][i % 2], place + i * 8 * kRowBytes, column);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; i++) {
        const int token = i * 8 + row;
        Slice::load(words[i / 2][i % 2], place + i * 8 * kRowBytes, column,
                    begin <= token && token < end);
      }
    }
  }

  // First of the four elements of a key, and of a query, that a lane's column holds in a step.
  static __device__ __forceinline__ constexpr int element_of(int step, int column) {
    constexpr int kWordsPerStep = sizeof(Kv);
    return Slice::byte_of(step * kWordsPerStep, column) / static_cast<int>(sizeof(Kv));
  }

  __device__ __forceinline__ void operand(uint32_t (&a)[4], int tile, int step) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if constexpr (sizeof(Kv) == 2) {
        a[i] = convert_pair<Kv, Mma>(words[tile][i][2 * step]);
        a[2 + i] = convert_pair<Kv, Mma>(words[tile][i][2 * step + 1]);
      } else {
        expand_quad<Kv>(words[tile][i][step], a[i], a[2 + i]);
      }
    }
  }
};

template <class Kv, class Mma, int kDim, int kTiles>
struct ValueRegisters {
  using Slice = RowSlice<kDim * static_cast<int>(sizeof(Kv)), 8>;
  static constexpr int kProducts = kDim / 16;  // of 16 value elements
  static constexpr int kTokens = kTiles * 16;
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(Kv));

  uint32_t words[kTiles][4][Slice::kWords];

  static __device__ __forceinline__ int lane_offset(int row, int column) {
    return 2 * column * kRowBytes + row * 16;
  }

  __device__ __forceinline__ void load(const char* place, int row, int column, int begin,
                                       int end) {
    asm volatile("" : "+l"(place));
    if (begin <= 0 && end == kTokens) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; i++) {
        Slice::load(words[i / 4][i % 4], place + token_of(i) * kRowBytes, row);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; i++) {
        const int token = token_of(i) + 2 * column;
        Slice::load(words[i / 4][i % 4], place + token_of(i) * kRowBytes, row,
                    begin <= token && token < end);
      }
    }
  }

  // A product's rows `row` and `row + 8` are value elements element_of() and the next one.
  static __device__ __forceinline__ constexpr int element_of(int product, int row) {
    if (sizeof(Kv) == 2) return Slice::byte_of(product, row) / 2;
    return Slice::byte_of(product / 2, row) + (product & 1) * 2;
  }

  // V^T: one byte permutation per register pairs the same element of two tokens.
  __device__ __forceinline__ void operand(uint32_t (&a)[4], int tile, int product) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const auto& first = words[tile][2 * i];
      const auto& second = words[tile][2 * i + 1];
      if constexpr (sizeof(Kv) == 2) {
        a[2 * i] = convert_pair<Kv, Mma>(__byte_perm(first[product], second[product], 0x5410));
        a[2 * i + 1] = convert_pair<Kv, Mma>(__byte_perm(first[product], second[product], 0x7632));
      } else {
        const int selector = (product & 1) != 0 ? 0x7362 : 0x5140;
        const uint32_t quad = __byte_perm(first[product / 2], second[product / 2], selector);
        expand_quad<Kv>(quad, a[2 * i], a[2 * i + 1]);
      }
    }
  }

 private:
  // Token of a loaded row, without the lane's 2 * column.
  static __device__ __forceinline__ constexpr int token_of(int row) {
    return row / 4 * 16 + (row >> 1 & 1) * 8 + (row & 1);
  }
};

}  // namespace paged_trt
