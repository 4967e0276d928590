// From float32 to what a pool stores: one rounding, to nearest even.
#pragma once

#include "conversions.cuh"

namespace paged_trt {

// e4m3 with integer arithmetic, for devices without the conversion: saturates, keeps NaN.
__device__ __forceinline__ uint32_t float8_by_bits(float value) {
  const uint32_t bits = __float_as_uint(value), sign = (bits >> 24) & 0x80u;
  const float magnitude = fabsf(value);
  if (magnitude != magnitude) return sign | 0x7fu;
  if (magnitude >= 448.f) return sign | 0x7eu;
  // Below 2^-6 a code counts steps of 2^-9; code 8 is the smallest normal number.
  if (magnitude < 0.015625f) return sign | static_cast<uint32_t>(__float2int_rn(magnitude * 512.f));
  const uint32_t own = bits & 0x7fffffffu;
  const uint32_t rounded = own + 0x7ffffu + ((own >> 20) & 1u);  // 20 of 23 bits go
  return sign | ((rounded >> 20) - (120u << 3));  // bias 127 to 7
}

// Scales whose quotients, as far as they matter to 8 bits, come out of no number that is subnormal.
__device__ __forceinline__ bool is_plain_scale(float scale) {
  return scale >= 0x1p-60f && scale <= 0x1p60f;
}

// value / scale, rounded as a division rounds it, from inverse = 1 / scale rounded to nearest and a
// plain scale: one correction of the product is exact (Markstein). A value below 2^-100 comes out
// as tiny as it should and with its sign; one that is not finite, or whose product is not, as NaN.
// The remainder is negated, so that it is +0 where it vanishes, and a -0 stays one.
__device__ __forceinline__ float quotient(float value, float scale, float inverse) {
  const float guess = __fmul_rn(value, inverse);
  const float excess = __fmaf_rn(guess, scale, -value);
  return __fmaf_rn(-excess, inverse, guess);
}

// Two elements to two bytes, the first one lower.
template <class Kv>
__device__ __forceinline__ uint32_t quantise_two(float first, float second) {
  if constexpr (kSameType<Kv, Float8>) {
#if __CUDA_ARCH__ >= 890
    uint16_t both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    return both;
#else
    return float8_by_bits(first) | (float8_by_bits(second) << 8);
#endif
  } else {
    static_assert(kSameType<Kv, Int8>, "8-bit pools hold float8 or int8");
    // NaN converts to 0; -128 is left out so that the range is symmetric.
    const int32_t low = min(max(__float2int_rn(first), -127), 127);
    const int32_t high = min(max(__float2int_rn(second), -127), 127);
    return (low & 0xff) | ((high & 0xff) << 8);
  }
}

}  // namespace paged_trt
