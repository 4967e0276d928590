// From products of queries and keys to base-2 logits: scale, cap, mask.
#pragma once

#include "decode_config.cuh"
#include "softmax_math.cuh"

namespace paged_trt {

// The two factors of a logit.
template <bool kHasCap>
struct ScoreScale {
  float before;  // the cap, if there is one, comes between the two factors
  float after;

  __device__ __forceinline__ ScoreScale(float softmax_scale, float key_scale, float softcap)
      : before(softmax_scale * key_scale), after(kLog2E) {
    if constexpr (kHasCap) {
      before /= softcap, after *= softcap;
    } else {
      before *= kLog2E;
    }
  }

  __device__ __forceinline__ float capped(float score) const {
    return after * tanh_accurate(score);
  }
};

// Scale, cap and mask the scores of one step of a warp; only rows [begin, end) of it are visible.
// `head_scale` is of the lane's heads, `row` the lane's row of a tile.
template <class Config>
__device__ __forceinline__ void finish_scores(
    float (&scores)[Config::kTiles][Config::kHeadTiles][4],
    const ScoreScale<Config::kHasSoftcap>& scale, const float (&head_scale)[Config::kHeadTiles][2],
    int row, int32_t begin, int32_t end) {
  const bool some_masked = begin > 0 || end < Config::kTokens;
#pragma unroll
  for (int u = 0; u < Config::kTiles; u++) {
#pragma unroll
    for (int t = 0; t < Config::kHeadTiles; t++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        scores[u][t][i] *= head_scale[t][i & 1];
        if constexpr (Config::kHasSoftcap) scores[u][t][i] = scale.capped(scores[u][t][i]);
        const int token = u * 16 + (i / 2) * 8 + row;
        if (some_masked && (token < begin || token >= end)) scores[u][t][i] = minus_infinity();
      }
    }
  }
}

}  // namespace paged_trt
