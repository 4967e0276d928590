#pragma once

#include "device.h"

struct __half {
  unsigned short bits;
};

inline float __half2float(__half value) {
  const unsigned sign = (value.bits & 0x8000u) << 16, exponent = value.bits >> 10 & 31u;
  const float mantissa = static_cast<float>(value.bits & 1023u);
  float magnitude = exponent == 0 ? std::ldexp(mantissa, -24)
                                  : std::ldexp(1024.f + mantissa, static_cast<int>(exponent) - 25);
  if (exponent == 31) magnitude = mantissa == 0.f ? INFINITY : NAN;
  return sign != 0 ? -magnitude : magnitude;
}
