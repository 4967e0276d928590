// Steps of narrow heads on Hopper with two sets of scores (prefill_sm90_options.cuh).
//
// Narrow heads leave half of the products' time beside the same exponentials, and registers for a
// second set of scores: those of the next tile run while this one's are made weights, in place.
#pragma once

#include "prefill_sm90_steps.cuh"

namespace paged_trt {

template <class Layout>
struct AheadSteps : PrefillSteps<Layout> {
  using Steps = PrefillSteps<Layout>;
  using typename Steps::Element, typename Steps::Outputs, typename Steps::Scores,
      typename Steps::Weights;
  using Steps::accumulate, Steps::cap, Steps::free_keys, Steps::free_values, Steps::full_begin,
      Steps::softmax, Steps::wait_keys, Steps::wait_values;

  // Full tiles with two sets of scores: those of the next tile run beside the weights of this one.
  __device__ __forceinline__ void ahead_steps(int32_t& tile, Scores& scores, Outputs& outputs,
                                              Weights& weights, uint64_t rows) {
    const int32_t begin = full_begin();
    if (tile < begin) return;
    wait_keys();
    wgmma_fence();
    this->score(scores, rows);
    wgmma_wait<0>();
    pin(scores);
    free_keys();
    Scores others;
    for (; tile > begin + 1; tile -= 2) {
      ahead_step<true>(scores, others, outputs, weights, rows);
      ahead_step<true>(others, scores, outputs, weights, rows);
    }
    if (tile > begin) {
      ahead_step<true>(scores, others, outputs, weights, rows);
#pragma unroll
      for (int i = 0; i < Layout::kKeys / 2; ++i) scores[i] = others[i];
    }
    ahead_step<false>(scores, others, outputs, weights, rows);
    tile = begin - 1;
  }

  // Weights of the tile whose scores are there; `weights` are those of the tile before.
  template <bool has_next>
  __device__ __forceinline__ void ahead_step(Scores& scores, Scores& next, Outputs& outputs,
                                             Weights& weights, uint64_t rows) {
    wait_values();
    accumulate(outputs, weights);
    if constexpr (has_next) {
      wait_keys();
      this->score(next, rows);
    }
    cap(scores);
    float factors[2];
    const bool grows = softmax.follow(scores, factors);
    softmax.weigh(scores);
    wgmma_wait<has_next ? 1 : 0>();
    pin(outputs);
    free_values();
    pack_weights<Element, Layout::kSteps>(weights, scores);
    if (grows) multiply_rows(outputs, factors);
    if constexpr (has_next) {
      wgmma_wait<0>();
      pin(next);
      free_keys();
    }
  }
};

}  // namespace paged_trt
