// How the lanes of a warp share a row of a pool: 16-byte loads, then an 8-, 4- and 2-byte tail.
//
// The k index of a matrix product, and the row index of its result, may be permuted freely. So the
// 16 bytes that a lane loads from a row ARE its operand registers, and K and V go from the pool to
// the tensor cores without shared memory: no ring, no swizzle, no descriptor.
#pragma once

#include "element_types.cuh"

namespace paged_trt {

template <int kRowBytes, int kLanes>
struct RowSlice {
  static constexpr int kBytes = kRowBytes / kLanes;
  static constexpr int kWords = (kBytes + 3) / 4;
  static constexpr int kWide = kBytes / 16;
  static_assert(kRowBytes % kLanes == 0 && kBytes % 2 == 0, "a lane loads whole half words");

  // Byte of the row at which a word of lane `lane` starts.
  static __device__ __forceinline__ constexpr int byte_of(int word, int lane) {
    if (word < kWide * 4) return (word / 4) * 16 * kLanes + lane * 16 + (word % 4) * 4;
    int local = word - kWide * 4, base = kWide * 16 * kLanes;
    if (kBytes & 8) {
      if (local < 2) return base + lane * 8 + local * 4;
      base += 8 * kLanes, local -= 2;
    }
    if (kBytes & 4) {
      if (local < 1) return base + lane * 4;
      base += 4 * kLanes;
    }
    return base + lane * 2;
  }

  // Plain loads that stay in L1: one instruction reads 64 bytes of 8 rows and the next one the
  // other half of the lines. Not .nc: a dependent launch may start before the pool is written.
  static __device__ __forceinline__ void load(uint32_t (&words)[kWords], const char* row,
                                              int lane) {
#pragma unroll
    for (int i = 0; i < kWide; i++) {
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[4 * i]), "=r"(words[4 * i + 1]), "=r"(words[4 * i + 2]),
                     "=r"(words[4 * i + 3])
                   : "l"(row + byte_of(4 * i, lane)));
    }
    if constexpr ((kBytes & 8) != 0) {
      asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                   : "=r"(words[kWide * 4]), "=r"(words[kWide * 4 + 1])
                   : "l"(row + byte_of(kWide * 4, lane)));
    }
    if constexpr ((kBytes & 4) != 0) {
      constexpr int kWord = kWide * 4 + (kBytes & 8) / 4;
      asm volatile("ld.global.u32 %0, [%1];" : "=r"(words[kWord]) : "l"(row + byte_of(kWord, lane)));
    }
    if constexpr ((kBytes & 2) != 0) {
      uint16_t half;
      asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"(row + byte_of(kWords - 1, lane)));
      words[kWords - 1] = half;
    }
  }

  // Zeros where the row does not count: masked rows may hold NaN, and 0 * NaN is NaN.
  static __device__ __forceinline__ void load_if(uint32_t (&words)[kWords], const char* row,
                                                 int lane, bool counts) {
#pragma unroll
    for (int i = 0; i < kWords; i++) words[i] = 0;
    if (counts) load(words, row, lane);
  }
};

}  // namespace paged_trt
