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

  // `tokens` is the row of the first token; only rows [begin, end) count.
  __device__ __forceinline__ void load(const char* tokens, int row, int column, int begin,
                                       int end) {
    const bool all_count = begin <= 0 && end == kTokens;  // the same for the whole warp
#pragma unroll
    for (int i = 0; i < 2 * kTiles; i++) {
      const int token = i * 8 + row;
      const char* source = tokens + token * kRowBytes;
      if (all_count) {
        Slice::load(words[i / 2][i % 2], source, column);
      } else {
        Slice::load_if(words[i / 2][i % 2], source, column, begin <= token && token < end);
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

  __device__ __forceinline__ void load(const char* tokens, int row, int column, int begin,
                                       int end) {
    const bool all_count = begin <= 0 && end == kTokens;
#pragma unroll
    for (int i = 0; i < 4 * kTiles; i++) {
      const int token = (i / 4) * 16 + ((i >> 1) & 1) * 8 + 2 * column + (i & 1);
      const char* source = tokens + token * kRowBytes;
      if (all_count) {
        Slice::load(words[i / 4][i % 4], source, row);
      } else {
        Slice::load_if(words[i / 4][i % 4], source, row, begin <= token && token < end);
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
};

}  // namespace paged_trt
