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

// One element of a rotated pair.
__device__ __forceinline__ float turned(float own, float partner, float cosine, float sine,
                                        bool is_first) {
  const float first = __fmul_rn(own, cosine), second = __fmul_rn(partner, sine);
  return is_first ? __fsub_rn(first, second) : __fadd_rn(first, second);
}

// The same from a row of the table: `angles` is [2, rotary_dim / 2], cosines, then sines.
__device__ __forceinline__ float rotate(float own, float partner, RopePlace place,
                                        const float* angles, int32_t rotary_dim) {
  return turned(own, partner, angles[place.angle], angles[rotary_dim / 2 + place.angle],
                place.is_first);
}

}  // namespace paged_trt
