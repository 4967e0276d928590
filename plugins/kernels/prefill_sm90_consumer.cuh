// What the two warpgroups of 64 rows of a Hopper prefill block do: query tile after query tile, the
// steps over the key tiles that each sees, last to first.
#pragma once

#include "prefill_sm90_merge.cuh"
#include "prefill_sm90_steps.cuh"

namespace paged_trt {

template <class Layout>
struct PrefillConsumer : PrefillSteps<Layout> {
  using Steps = PrefillSteps<Layout>;
  using typename Steps::Element, typename Steps::Outputs, typename Steps::Scores,
      typename Steps::Weights;
  using Steps::accumulate, Steps::args, Steps::base, Steps::clear_before_window,
      Steps::clear_values, Steps::find_factors, Steps::finish_outputs, Steps::free_values,
      Steps::full_begin, Steps::full_end, Steps::hold, Steps::is_lane_0, Steps::last_position,
      Steps::query, Steps::query_rows, Steps::skip_tile, Steps::softmax, Steps::store, Steps::top,
      Steps::wait_keys, Steps::wait_values, Steps::warpgroup;

  // The first tile of the walk, and zeros for values behind the sequence.
  __device__ __forceinline__ void begin(int32_t tile, bool has_dead_rows, int32_t end_position,
                                        Outputs& outputs, Weights& weights, uint64_t query_rows) {
    wait_keys();
    const int32_t seen = last_position() - tile * Layout::kKeys + 1;
    if constexpr (Layout::kKeys == 128) {
      if (seen <= Layout::kKeys / 2) {
        this->template first_step<Layout::kKeys / 2>(tile, outputs, weights, query_rows);
      } else {
        this->template first_step<Layout::kKeys>(tile, outputs, weights, query_rows);
      }
    } else {
      this->template first_step<Layout::kKeys>(tile, outputs, weights, query_rows);
    }
    if (has_dead_rows) {
      wait_values();
      clear_values(end_position - tile * Layout::kKeys, Layout::kKeys);
    }
  }

  // Outputs of the tile; `factors` normalise them, unless other blocks have a share of the keys.
  // False: there is no key tile or no row to work on.
  __device__ __forceinline__ bool attend(Outputs& outputs, float (&factors)[2]) {
    const QueryWork work = Layout::read_work(base, query.stage);
    int32_t tile = work.last;
    softmax.begin();
    if constexpr (Layout::kIsScaled && !Layout::kHasSoftcap) {
      softmax.scale = args.softmax_scale * Layout::key_scale(args, work.kv_head) * kLog2E;
    }
    hold = 0;
    if (work.num_rows <= warpgroup * 64) {
      for (; tile >= work.first; --tile) skip_tile();
      return false;
    }
    if (Layout::kIsSplit && tile < work.first) return false;
    for (const int32_t end = max(top(), work.first); tile > end; --tile) skip_tile();
    const uint64_t rows = by_rows(query_rows());
    Weights weights;
    begin(tile, (work.flags & kHasDeadRows) != 0 && tile == work.last,
          work.position + (work.num_rows - 1) / Layout::kGroup + 1, outputs, weights, rows);
    Scores scores;
    --tile;
    for (const int32_t end = full_end(); tile >= end; --tile) {
      this->template plain_step<false>(tile, scores, outputs, weights, rows);
    }
    if constexpr (!Layout::kTries) {
      for (const int32_t end = full_begin(); tile >= end; --tile) {
        this->template plain_step<true>(tile, scores, outputs, weights, rows);
      }
    } else {
      this->full_steps(tile, scores, outputs, weights, rows);
    }
    if constexpr (Layout::kHasWindow) {
      for (const int32_t end = this->template field<kFirst>(); tile >= end; --tile) {
        this->template plain_step<false>(tile, scores, outputs, weights, rows);
      }
    }
    wait_values();
    if (Layout::kHasWindow) clear_before_window();
    accumulate(outputs, weights);
    finish(outputs, factors);
    return true;
  }

  // While the last product runs, and its end.
  __device__ __forceinline__ void finish(Outputs& outputs, float (&factors)[2]) {
    if constexpr (!Layout::kIsSplit) find_factors(factors);
    finish_outputs(outputs);
    free_values();
  }

  __device__ __forceinline__ void run() {
    while (true) {
      wait_barrier(Layout::query_ready(base, query.stage), query.parity);
      if (this->template field<kKvHead>() < 0) return;
      Outputs outputs;
      float factors[2];
      const bool has_outputs = attend(outputs, factors);
      if constexpr (Layout::kIsSplit) {
        merger().store(outputs, softmax, has_outputs);
        merger().merge();
      } else {
        if (has_outputs) store(outputs, factors);
      }
      // One lane's arrival after __syncwarp would order the same, but compute-sanitizer 2025.3 does
      // not follow it (tests/gpu/racecheck/orders.py) and would report what is written here next.
      arrive(Layout::query_free(base, query.stage));
      query.advance();
    }
  }

  __device__ __forceinline__ TileMerger<Layout> merger() const {
    return {args, base, warpgroup, query.stage};
  }
};

}  // namespace paged_trt
