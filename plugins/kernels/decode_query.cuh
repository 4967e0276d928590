// The query heads of a block: rotated, scaled into range, and shared by its warps.
#pragma once

#include "conversions.cuh"
#include "rope.cuh"
#include "softmax_math.cuh"

namespace paged_trt {

template <class Config>
struct SharedQuery {
  // 8 more elements per row put the eight rows of an operand on different banks.
  alignas(16) uint16_t elements[Config::kHeads][Config::kHeadDim + 8];
  float inverse_scale[Config::kHeads];
};

// One warp takes every kWarps-th head. Loading is apart from the rest: the loads are in flight
// while the block finds its keys.
template <class Config>
struct QueryLoader {
  using Activation = typename Config::activation_type;
  static constexpr int kPairs = Config::kHeadDim / 2;
  static constexpr int kPairsPerLane = (kPairs + 31) / 32;
  static constexpr int kHeadsPerWarp = (Config::kHeads + Config::kWarps - 1) / Config::kWarps;

  uint32_t raw[kHeadsPerWarp][kPairsPerLane];

  __device__ __forceinline__ void load(const Activation* heads, int num_heads, int warp,
                                       int lane) {
#pragma unroll
    for (int i = 0; i < kHeadsPerWarp; i++) {
      const int head = i * Config::kWarps + warp;
#pragma unroll
      for (int j = 0; j < kPairsPerLane; j++) {
        const int pair = j * 32 + lane;
        raw[i][j] = 0;
        if (head < num_heads && pair < kPairs) {
          raw[i][j] =
              reinterpret_cast<const uint32_t*>(heads + head * Config::kHeadDim)[pair];
        }
      }
    }
  }

  // `angles` is the rope table's row of the token.
  __device__ __forceinline__ void share(SharedQuery<Config>& shared, const Activation* heads,
                                        int num_heads, int warp, int lane, const float* angles,
                                        int32_t rope, int32_t rotary_dim) const {
#pragma unroll
    for (int i = 0; i < kHeadsPerWarp; i++) {
      const int head = i * Config::kWarps + warp;
      if (head >= Config::kHeads) break;
      float2 values[kPairsPerLane];
      float maximum = 0.f;
#pragma unroll
      for (int j = 0; j < kPairsPerLane; j++) {
        const int element = 2 * (j * 32 + lane);
        values[j] = unpack_pair<Activation>(raw[i][j]);
        if (rope != 0 && head < num_heads && element < rotary_dim) {
          values[j] = rotated(heads + head * Config::kHeadDim, element, values[j], angles, rope,
                              rotary_dim);
        }
        maximum = fmaxf(maximum, fmaxf(fabsf(values[j].x), fabsf(values[j].y)));
      }
      float2 scale = make_float2(1.f, 1.f);
      if constexpr (kSameType<typename Config::mma_type, Float16>) {
#pragma unroll
        for (int d = 1; d < 32; d *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, d));
        scale = range_scale(maximum);
      }
#pragma unroll
      for (int j = 0; j < kPairsPerLane; j++) {
        const int pair = j * 32 + lane;
        if (pair < kPairs) {
          reinterpret_cast<uint32_t*>(shared.elements[head])[pair] =
              pack<typename Config::mma_type>(values[j].x * scale.x, values[j].y * scale.x);
        }
      }
      if (lane == 0) shared.inverse_scale[head] = scale.y;
    }
  }

 private:
  static __device__ __forceinline__ float2 rotated(const Activation* head, int element,
                                                   float2 own, const float* angles, int32_t rope,
                                                   int32_t rotary_dim) {
    const auto* bits = reinterpret_cast<const uint16_t*>(head);
    const RopePlace first = rope_place(element, rotary_dim, rope);
    const RopePlace second = rope_place(element + 1, rotary_dim, rope);
    return make_float2(
        rotate(own.x, unpack_one<Activation>(bits[first.partner]), first, angles, rotary_dim),
        rotate(own.y, unpack_one<Activation>(bits[second.partner]), second, angles, rotary_dim));
  }
};

}  // namespace paged_trt
