// Exponentials of the softmax, base 2 throughout: the scale carries log2(e).
#pragma once

#include "element_types.cuh"

namespace paged_trt {

constexpr float kLog2E = 1.4426950408889634f;
// Maximum of no score. Finite, so that the difference of two of them is 0 and not NaN.
constexpr float kNoScore = -1e30f;
constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh to an absolute 2^-22: tanh.approx is good to 2^-11 only, which a softcap of 50 would turn
// into an error of 0.02 in the exponent.
__device__ __forceinline__ float tanh_accurate(float x) {
  const float power = exp2_approx(2.f * kLog2E * x);
  return 1.f - __fdividef(2.f, power + 1.f);
}

}  // namespace paged_trt
