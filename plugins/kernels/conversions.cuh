// Conversions between element types in registers. A pair is two 16-bit elements in one word, the
// lower one first; a quad is four 8-bit elements.
#pragma once

#include "element_types.cuh"
#include "mma.cuh"

namespace paged_trt {

template <class T>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair) {
  if constexpr (kSameType<T, BFloat16>) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  } else {
    static_assert(kSameType<T, Float16>, "a pair is fp16 or bf16");
    float2 values;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(values.x), "=f"(values.y)
        : "r"(pair));
    return values;
  }
}

template <class T>
__device__ __forceinline__ float unpack_one(uint16_t element) {
  return unpack_pair<T>(element).x;
}

// `value` within [-limit, limit]; NaN stays NaN, which fminf and fmaxf would drop.
__device__ __forceinline__ float clamp_keeping_nan(float value, float limit) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(limit));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(-limit));
  return value;
}

// A pair of another 16-bit type. bf16 saturates in fp16: 65504, once rounded to bf16, would
// otherwise come back as an infinity.
template <class From, class To>
__device__ __forceinline__ uint32_t convert_pair(uint32_t pair) {
  if constexpr (kSameType<From, To>) {
    return pair;
  } else {
    float2 values = unpack_pair<From>(pair);
    if constexpr (kSameType<To, Float16>) {
      values.x = clamp_keeping_nan(values.x, 65504.f);
      values.y = clamp_keeping_nan(values.y, 65504.f);
    }
    return pack<To>(values.x, values.y);
  }
}

// Two e4m3 elements, each in the high byte of a half word, to an fp16 pair: the exponent moves by
// one bit and is 8 too small. 0x7f, NaN, comes out as 480, which no number does.
__device__ __forceinline__ uint32_t float8_to_float16_by_bits(uint32_t spread) {
  const uint32_t small = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
  uint32_t pair, magnitude, is_nan;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(small), "r"(0x5c005c00u));  // 2^8, exact
  asm("abs.f16x2 %0, %1;" : "=r"(magnitude) : "r"(pair));
  asm("set.gt.f16x2.f16x2 %0, %1, %2;" : "=r"(is_nan) : "r"(magnitude), "r"(0x5f005f00u));  // 448
  return pair | (is_nan << 1);  // 1.0 is 0x3c00: shifted, it sets the whole exponent
}

// A quad to two fp16 pairs, exact.
template <class Kv>
__device__ __forceinline__ void expand_quad(uint32_t quad, uint32_t& low, uint32_t& high) {
  if constexpr (kSameType<Kv, Float8>) {
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(low), "=r"(high)
        : "r"(quad));
#else
    low = float8_to_float16_by_bits(__byte_perm(quad, 0, 0x1404));
    high = float8_to_float16_by_bits(__byte_perm(quad, 0, 0x3424));
#endif
  } else {
    static_assert(kSameType<Kv, Int8>, "a quad is float8 or int8");
    // 0x6400 | u is 1024 + u in fp16; u is the element plus 128.
    const uint32_t biased = quad ^ 0x80808080u;
    const uint32_t low_raw = __byte_perm(biased, 0x64646464u, 0x4140);
    const uint32_t high_raw = __byte_perm(biased, 0x64646464u, 0x4342);
    asm("sub.f16x2 %0, %1, %2;" : "=r"(low) : "r"(low_raw), "r"(0x64806480u));  // 1152
    asm("sub.f16x2 %0, %1, %2;" : "=r"(high) : "r"(high_raw), "r"(0x64806480u));
  }
}

// Power of two that brings a maximum into [2^10, 2^11), and its inverse. bf16 queries pass fp16's
// range, and rotated fp16 ones can: scaled so, nothing overflows and nothing of weight is lost.
__device__ __forceinline__ float2 range_scale(float maximum) {
  const int32_t exponent = (__float_as_uint(maximum) >> 23) & 0xff;
  if (exponent == 255) return make_float2(1.f, 1.f);  // infinity or NaN
  const int32_t kept = max(exponent, 11);
  return make_float2(__uint_as_float((264 - kept) << 23), __uint_as_float((kept - 10) << 23));
}

}  // namespace paged_trt
