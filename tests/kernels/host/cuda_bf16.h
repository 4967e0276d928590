#pragma once

#include "device.h"

struct __nv_bfloat16 {
  unsigned short bits;
};

inline float __bfloat162float(__nv_bfloat16 value) {
  const unsigned bits = static_cast<unsigned>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
