// Keys that order logits, weights that are whole numbers, and random bits.
//
// The NumPy twin in runtime/sampler.py does the same operations in the same order: each float
// operation here is one rounding, written as an intrinsic that no compiler fuses with another.
#pragma once

#include "element_types.cuh"

namespace paged_trt {

constexpr int kWeightBits = 40;  // behind the point: the largest logit has weight 1

template <class Logit>
__device__ __forceinline__ float logit_value(Logit logit) {
  // Plus zero: minus zero becomes zero, which it equals.
  if constexpr (kSameType<Logit, float>) {
    return __fadd_rn(logit, 0.f);
  } else if constexpr (kSameType<Logit, Float16>) {
    return __fadd_rn(__half2float(logit), 0.f);
  } else {
    static_assert(kSameType<Logit, BFloat16>, "logits are fp32, fp16 or bf16");
    return __fadd_rn(__bfloat162float(logit), 0.f);
  }
}

// Bits of a float32 that a value of this type never sets.
template <class Logit>
constexpr int kUnusedBits = kSameType<Logit, float> ? 0 : kSameType<Logit, Float16> ? 13 : 16;
template <class Logit>
constexpr int kKeyDigits = (32 - kUnusedBits<Logit> + 7) / 8;  // of eight bits

// Orders as the numbers do. NaN is above or below all of them; the caller looks for it.
template <class Logit>
__device__ __forceinline__ uint32_t order_key(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return ordered >> kUnusedBits<Logit>;
}

// 2^((value - largest) * scale) in units of 2^-kWeightBits, rounded down.
__device__ __forceinline__ uint64_t token_weight(float value, float largest, float scale) {
  constexpr uint64_t kOne = 1ull << kWeightBits;
  if (__float_as_uint(largest) == 0x7f800000u) return value == largest ? kOne : 0;
  const float exponent = __fmul_rn(__fsub_rn(value, largest), scale);
  const float bounded = exponent > -64.f ? exponent : -64.f;
  const float whole = rintf(bounded);
  const float rest = __fsub_rn(bounded, whole);
  float power = 1.53707064e-4f;
  power = __fadd_rn(__fmul_rn(power, rest), 1.33998494e-3f);
  power = __fadd_rn(__fmul_rn(power, rest), 9.61837359e-3f);
  power = __fadd_rn(__fmul_rn(power, rest), 5.55032901e-2f);
  power = __fadd_rn(__fmul_rn(power, rest), 2.40226477e-1f);
  power = __fadd_rn(__fmul_rn(power, rest), 6.93147182e-1f);
  power = __fadd_rn(__fmul_rn(power, rest), 1.f);
  if (whole < -kWeightBits - 1.f) return 0;
  const uint64_t fixed = static_cast<uint64_t>(__fmul_rn(power, static_cast<float>(kOne)));
  return fixed >> static_cast<int>(-whole);
}

// First two words of Philox4x32-10 with the step as counter and the seed as key.
__device__ __forceinline__ uint64_t random_bits(uint64_t seed, uint32_t step) {
  uint32_t x0 = step, x1 = 0, x2 = 0, x3 = 0;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t first = static_cast<uint64_t>(0xd2511f53u) * x0;
    const uint64_t second = static_cast<uint64_t>(0xcd9e8d57u) * x2;
    x0 = static_cast<uint32_t>(second >> 32) ^ x1 ^ key0;
    x1 = static_cast<uint32_t>(second);
    x2 = static_cast<uint32_t>(first >> 32) ^ x3 ^ key1;
    x3 = static_cast<uint32_t>(first);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return static_cast<uint64_t>(x1) << 32 | x0;
}

}  // namespace paged_trt
