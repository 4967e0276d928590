// The steps over key tiles that a warpgroup's walk on Hopper is made of, and how its results are
// stored.
#pragma once

#include "attention_output.cuh"
#include "prefill_sm90_output.cuh"
#include "prefill_sm90_warpgroup.cuh"

namespace paged_trt {

template <class Layout>
struct PrefillSteps : PrefillWarpgroup<Layout> {
  using Warpgroup = PrefillWarpgroup<Layout>;
  using typename Warpgroup::Element, typename Warpgroup::Outputs, typename Warpgroup::Scores,
      typename Warpgroup::Weights;
  using Warpgroup::accumulate, Warpgroup::args, Warpgroup::base, Warpgroup::cap,
      Warpgroup::finish_outputs, Warpgroup::free_keys, Warpgroup::free_values,
      Warpgroup::full_begin, Warpgroup::hold,
      Warpgroup::kHold, Warpgroup::query, Warpgroup::softmax, Warpgroup::values,
      Warpgroup::visible, Warpgroup::wait_keys, Warpgroup::wait_values, Warpgroup::warpgroup;

  // The first tile, of which only the first `columns` keys are looked at.
  template <int columns>
  __device__ __forceinline__ void first_step(int32_t tile, Outputs& outputs, Weights& weights,
                                             uint64_t query_rows) {
    float scores[columns / 2];
    wgmma_fence();
    this->template score<columns>(scores, query_rows);
#pragma unroll
    for (int i = 0; i < Layout::kValueDim / 2; ++i) outputs[i] = 0.f;
    wgmma_wait<0>();
    pin(scores);
    free_keys();
    cap(scores);
    hide<Layout::kHasWindow>(scores, visible(tile));
    float factors[2];
    softmax.follow(scores, factors);
    softmax.weigh(scores);
    pack_first<columns>(weights, scores);
  }

  // Weights of a tile of which only the first columns were looked at.
  template <int columns>
  static __device__ __forceinline__ void pack_first(Weights& weights,
                                                    const float (&scores)[columns / 2]) {
#pragma unroll
    for (int step = 0; step < Layout::kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 8 * step + 2 * i;
        weights[step][i] = step < columns / 16 ? pack<Element>(scores[at % (columns / 2)],
                                                               scores[(at + 1) % (columns / 2)])
                                               : 0;
      }
    }
  }

  // A tile after the first: the value product of the tile before runs along.
  template <bool is_full>
  __device__ __forceinline__ void plain_step(int32_t tile, Scores& scores, Outputs& outputs,
                                             Weights& weights, uint64_t query_rows) {
    wait_keys();
    wgmma_fence();
    this->score(scores, query_rows);
    wait_values();
    accumulate(outputs, weights);
    wgmma_wait<1>();
    pin(scores);
    free_keys();
    cap(scores);
    if constexpr (!is_full) hide<Layout::kHasWindow>(scores, visible(tile));
    float factors[2];
    const bool grows = softmax.follow(scores, factors);
    softmax.weigh(scores);
    finish_outputs(outputs);
    free_values();
    pack_weights<Element, Layout::kSteps>(weights, scores);
    if (grows) multiply_rows(outputs, factors);
  }

  // A full tile. `weights` are those of the tile before, whose product is not waited for here;
  // `is_pending`: neither was that of the tile before that.
  __device__ __forceinline__ void full_step(Scores& scores, Outputs& outputs,
                                            const Weights& weights, Weights& next,
                                            uint64_t query_rows, bool is_pending) {
    wait_keys();
    wgmma_fence();
    this->score(scores, query_rows);
    wait_values();
    accumulate(outputs, weights);
    wgmma_wait<1>();
    pin(scores);
    free_keys();
    if (is_pending) free_values();
    if (hold > 0 || !softmax.template try_weigh<Element, Layout::kSteps>(next, scores)) {
      hold = hold > 0 ? hold - 1 : kHold;
      float factors[2];
      const bool grows = softmax.follow(scores, factors);
      softmax.weigh(scores);
      pack_weights<Element, Layout::kSteps>(next, scores);
      if (grows) {
        finish_outputs(outputs);
        multiply_rows(outputs, factors);
      }
    }
  }

  __device__ __forceinline__ void skip_tile() {
    wait_keys();
    free_keys();
    wait_values();
    values.advance();
    free_values();
  }

  // A full tile on its own: the weights of the tile before are replaced by its own.
  __device__ __forceinline__ void lone_step(Scores& scores, Outputs& outputs, Weights& weights,
                                            uint64_t query_rows) {
    wait_keys();
    wgmma_fence();
    this->score(scores, query_rows);
    wait_values();
    accumulate(outputs, weights);
    wgmma_wait<1>();
    pin(scores);
    free_keys();
    finish_outputs(outputs);
    free_values();
    if (hold > 0 || !softmax.template try_weigh<Element, Layout::kSteps>(weights, scores)) {
      float factors[2];
      softmax.follow(scores, factors);
      softmax.weigh(scores);
      pack_weights<Element, Layout::kSteps>(weights, scores);
      multiply_rows(outputs, factors);
    }
  }

  // Full tiles, two at a time.
  __device__ __forceinline__ void full_steps(int32_t& tile, Scores& scores, Outputs& outputs,
                                             Weights& weights, uint64_t query_rows) {
    Weights others;
    bool is_pending = false;
    for (const int32_t begin = full_begin(); tile > begin; tile -= 2) {
      full_step(scores, outputs, weights, others, query_rows, is_pending);
      full_step(scores, outputs, others, weights, query_rows, true);
      is_pending = true;
    }
    finish_outputs(outputs);
    if (is_pending) free_values();
    if (tile >= full_begin()) {  // the last of an odd number
      lone_step(scores, outputs, weights, query_rows);
      --tile;
    }
  }

  // What turns outputs into results, while the last product runs.
  __device__ __forceinline__ void find_factors(float (&factors)[2]) const {
    const int thread = thread_here();
    const int kv_head = this->template field<kKvHead>(), first_head = kv_head * Layout::kGroup;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warpgroup * 64 + (thread / 32 & 3) * 16 + (thread & 31) / 4 + half * 8;
      const float own_sink = args.sinks[first_head + row % Layout::kGroup];
      const float sum = sum_of_quad(softmax.sum[half]);
      const SinkFactors sink = add_sink(softmax.exponent(half), sum, own_sink);
      factors[half] = sink.factor * normaliser(sink.sum, Layout::value_scale(args, kv_head));
    }
  }

  // Normalised outputs, through this warpgroup's rows of the query's buffer to device memory.
  __device__ __forceinline__ void store(const Outputs& outputs, const float (&factors)[2]) {
    const QueryWork work = Layout::read_work(base, query.stage);
    const int thread = thread_here(), lane = thread & 31, warp_row = (thread / 32 & 3) * 16;
    sync_threads(kWarpgroupBarrier + warpgroup, 128);  // no warp reads the query any more
    const unsigned rows = this->query_rows();
    const int row = warp_row + lane / 4;
#pragma unroll
    for (int column = 0; column < Layout::kValueDim / 8; ++column) {
      const unsigned low = rows + swizzled<kQueryRows>(row, column) + (lane & 3) * 4;
      const unsigned high = rows + swizzled<kQueryRows>(row + 8, column) + (lane & 3) * 4;
      const float* four = outputs + 4 * column;
      store_word(low, pack<Element>(four[0] * factors[0], four[1] * factors[0]));
      store_word(high, pack<Element>(four[2] * factors[1], four[3] * factors[1]));
    }
    __syncwarp();
    constexpr int kChunks = Layout::kValueDim / 8;
#pragma unroll
    for (int i = 0; i < 16 * kChunks / 32; ++i) {
      const int index = i * 32 + lane;
      const int at = warp_row + index / kChunks, chunk = index % kChunks;
      const uint4 words = load_words(rows + swizzled<kQueryRows>(at, chunk));
      const int tile_row = warpgroup * 64 + at;
      Element* target =
          output_row<Layout>(args, work.first_token, work.kv_head, tile_row) + chunk * 8;
      if (tile_row < work.num_rows) *reinterpret_cast<uint4*>(target) = words;
    }
  }
};

}  // namespace paged_trt
