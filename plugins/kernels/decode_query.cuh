// The query heads of a block as tensor-core operands: straight from memory where they are held in
// registers and not rotated, else through shared memory, rotated once for all warps.
#pragma once

#include "conversions.cuh"
#include "decode_config.cuh"
#include "rope.cuh"
#include "softmax_math.cuh"

namespace paged_trt {

// Whether queries are scaled into the range of fp16 before they are rounded to it.
template <class Config>
constexpr bool kScalesQuery =
    kSameType<typename Config::mma_type, Float16> &&
    (Config::kHasRope || !kSameType<typename Config::activation_type, Float16>);

template <class Config, bool kIsShared = Config::kShareQuery>
struct SharedQuery {
  static constexpr int kHeads = Config::kHeads;
  // 8 more elements per row put the eight rows of an operand on different banks.
  alignas(16) uint16_t elements[kHeads][Config::kHeadDim + 8];
  float inverse_scale[kHeads];
};

template <class Config>
struct SharedQuery<Config, false> {};

// Operands of the heads that a lane's row stands for, at the places where its keys' words are.
template <class Config>
struct HeldQuery {
  using Activation = typename Config::activation_type;
  using Keys = typename Config::Keys;

  uint2 operand[Config::kHeadTiles][Keys::kSteps];
  float inverse_scale[Config::kHeadTiles][2];  // of heads 2 * column + {0, 1}

  __device__ __forceinline__ void load(const Activation* heads, int num_heads, int row,
                                       int column) {
#pragma unroll
    for (int t = 0; t < Config::kHeadTiles; t++) {
      const int head = t * 8 + row;
      const Activation* elements = heads + head * Config::kHeadDim;
#pragma unroll
      for (int s = 0; s < Keys::kSteps; s++) {
        if (follows(s)) continue;
        const bool is_pair = s + 1 < Keys::kSteps && follows(s + 1);
        uint4 words = make_uint4(0, 0, 0, 0);
        if (head < num_heads) words = read(elements + Keys::element_of(s, column), is_pair);
        operand[t][s] = make_uint2(words.x, words.y);
        if (is_pair) operand[t][s + 1] = make_uint2(words.z, words.w);
      }
    }
  }

  // To the type of the products. Every lane of a warp calls it.
  __device__ __forceinline__ void convert(int column) {
#pragma unroll
    for (int t = 0; t < Config::kHeadTiles; t++) {
      inverse_scale[t][0] = inverse_scale[t][1] = 1.f;
      if constexpr (kScalesQuery<Config>) scale(t, column);
    }
  }

 private:
  // Whether a step's elements lie right behind those of the step before, which is even.
  static __device__ __forceinline__ constexpr bool follows(int step) {
    return step % 2 == 1 && Keys::element_of(step, 1) == Keys::element_of(step - 1, 1) + 4;
  }

  static __device__ __forceinline__ uint4 read(const Activation* place, bool is_pair) {
    if (is_pair) return *reinterpret_cast<const uint4*>(place);
    const uint2 words = *reinterpret_cast<const uint2*>(place);
    return make_uint4(words.x, words.y, 0, 0);
  }

  __device__ __forceinline__ void scale(int t, int column) {
    float maximum = 0.f;
#pragma unroll
    for (int s = 0; s < Keys::kSteps; s++) {
      const float2 low = unpack_pair<Activation>(operand[t][s].x);
      const float2 high = unpack_pair<Activation>(operand[t][s].y);
      maximum = fmaxf(fmaxf(maximum, fmaxf(fabsf(low.x), fabsf(low.y))),
                      fmaxf(fabsf(high.x), fabsf(high.y)));
    }
    maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, 2));
    const float2 factor = range_scale(maximum);
#pragma unroll
    for (int s = 0; s < Keys::kSteps; s++) {
      operand[t][s] = make_uint2(scaled(operand[t][s].x, factor.x), scaled(operand[t][s].y, factor.x));
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      inverse_scale[t][i] = __shfl_sync(kAllLanes, factor.y, (2 * column + i) * 4);
    }
  }

  static __device__ __forceinline__ uint32_t scaled(uint32_t pair, float factor) {
    const float2 values = unpack_pair<Activation>(pair);
    return pack<typename Config::mma_type>(values.x * factor, values.y * factor);
  }
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
        if constexpr (Config::kHasRope) {
          if (head < num_heads && element < rotary_dim) {
            values[j] = rotated(heads + head * Config::kHeadDim, element, values[j], angles, rope,
                                rotary_dim);
          }
        }
        maximum = fmaxf(maximum, fmaxf(fabsf(values[j].x), fabsf(values[j].y)));
      }
      float2 scale = make_float2(1.f, 1.f);
      if constexpr (kScalesQuery<Config>) {
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
