// Rotary embedding of one element. float32, one rounding per operation and no fused multiply-add:
// the bytes of a pool are compared with the specification's.
#pragma once

#include "element_types.cuh"

namespace paged_trt {

constexpr int32_t kRopeHalfSplit = 1;
constexpr int32_t kRopeInterleaved = 2;

// Where an element's pair and angle are.
struct RopePlace {
  int32_t partner;  // the other element of the pair
  int32_t angle;  // index into the cosines and sines of a position
  bool is_first;
};

__device__ __forceinline__ RopePlace rope_place(int32_t element, int32_t rotary_dim, int32_t rope) {
  const int32_t half = rotary_dim / 2;
  if (rope == kRopeInterleaved) return {element ^ 1, element / 2, (element & 1) == 0};
  const bool is_first = element < half;
  return {is_first ? element + half : element - half, is_first ? element : element - half, is_first};
}

// One element of a rotated pair. `angles` is a row [2, rotary_dim / 2]: cosines, then sines.
__device__ __forceinline__ float rotate(float own, float partner, RopePlace place,
                                        const float* angles, int32_t rotary_dim) {
  const float turned = __fmul_rn(own, angles[place.angle]);
  const float other = __fmul_rn(partner, angles[rotary_dim / 2 + place.angle]);
  return place.is_first ? __fsub_rn(turned, other) : __fadd_rn(turned, other);
}

}  // namespace paged_trt
