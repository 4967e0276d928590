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
  // `place` is the row plus 16 bytes per lane, so that offsets between rows are constants. Zeros
  // where the row does not count: masked rows may hold NaN, and 0 * NaN is NaN.
  static __device__ __forceinline__ void load(uint32_t (&words)[kWords], const char* place,
                                              int lane, bool counts = true) {
    constexpr int kTail = kWide * 16 * kLanes;
    const uint32_t on = counts;
#pragma unroll
    for (int i = 0; i < kWide; i++) load_wide(&words[4 * i], place + i * 16 * kLanes, on);
    if constexpr ((kBytes & 8) != 0) {
      asm volatile(
          "{.reg .pred on; setp.ne.u32 on, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0; "
          "@on ld.global.v2.u32 {%0, %1}, [%2];}"
          : "=&r"(words[kWide * 4]), "=&r"(words[kWide * 4 + 1])
          : "l"(place - lane * 8 + kTail), "r"(on));
    }
    if constexpr ((kBytes & 4) != 0) {
      asm volatile(
          "{.reg .pred on; setp.ne.u32 on, %2, 0; mov.u32 %0, 0; @on ld.global.u32 %0, [%1];}"
          : "=&r"(words[kWide * 4 + (kBytes & 8) / 4])
          : "l"(place - lane * 12 + kTail + (kBytes & 8) * kLanes), "r"(on));
    }
    if constexpr ((kBytes & 2) != 0) {
      uint16_t half;
      asm volatile(
          "{.reg .pred on; setp.ne.u32 on, %2, 0; mov.u16 %0, 0; @on ld.global.u16 %0, [%1];}"
          : "=&h"(half)
          : "l"(place - lane * 14 + kTail + (kBytes & 12) * kLanes), "r"(on));
      words[kWords - 1] = half;
    }
  }

 private:
  static __device__ __forceinline__ void load_wide(uint32_t* words, const char* place,
                                                   uint32_t on) {
    asm volatile(
        "{.reg .pred on; setp.ne.u32 on, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; "
        "mov.u32 %3, 0; @on ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
        : "l"(place), "r"(on));
  }
};

}  // namespace paged_trt
