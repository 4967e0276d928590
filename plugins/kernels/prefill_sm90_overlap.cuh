// Another form of the walk over query tiles on Hopper (prefill_sm90_options.cuh), for blocks that
// keep two query tiles: the end of one tile and the start of the next overlap.
//
// A query tile is open when the products of its first scores have been started. They may run while
// the results of the tile before are stored: its last product comes before them in the queue.
#pragma once

#include "prefill_sm90_ahead.cuh"

namespace paged_trt {

template <class Layout>
struct OverlappingConsumer : AheadSteps<Layout> {
  using Steps = AheadSteps<Layout>;
  using typename Steps::Element, typename Steps::Outputs, typename Steps::Scores,
      typename Steps::Weights;
  using Steps::accumulate, Steps::args, Steps::base, Steps::cap, Steps::clear_before_window,
      Steps::clear_values, Steps::find_factors, Steps::finish_outputs, Steps::free_keys,
      Steps::free_values, Steps::full_begin, Steps::full_end, Steps::hold, Steps::is_lane_0,
      Steps::last_position, Steps::query, Steps::query_rows, Steps::skip_tile, Steps::softmax,
      Steps::store, Steps::top, Steps::wait_keys, Steps::wait_values, Steps::warpgroup;

  static_assert(!Layout::kIsSplit && Layout::kQueryStages == 2, "the next tile has a buffer");
  static constexpr bool kHalves = Layout::kKeys == 128;

  // Whether the rows of this warpgroup see half of the keys of their last tile at most.
  static __device__ __forceinline__ bool sees_half(int32_t position, int32_t tile) {
    return kHalves && position - tile * Layout::kKeys < Layout::kKeys / 2;
  }

  static __device__ __forceinline__ float (&first_half(Scores& scores))[Layout::kKeys / 4] {
    return reinterpret_cast<float(&)[Layout::kKeys / 4]>(scores);
  }

  // Starts the products of scores of a query tile's first key tile.
  __device__ __forceinline__ void open(Scores& scores, unsigned rows) {
    wait_keys();
    wgmma_fence();
    this->score(scores, by_rows(rows));
  }

  // Opens the query tile and waits. False: no row of it belongs to this warpgroup; what the others
  // use has been let pass.
  __device__ __forceinline__ bool open_here(Scores& scores) {
    const QueryWork work = Layout::read_work(base, query.stage);
    int32_t tile = work.last;
    if (work.num_rows <= warpgroup * 64) {
      for (; tile >= work.first; --tile) skip_tile();
      return false;
    }
    for (const int32_t end = max(top(), work.first); tile > end; --tile) skip_tile();
    open(scores, query_rows());
    wgmma_wait<0>();
    pin(scores);
    return true;
  }

  // Whether the next query tile can be opened already: not where something has to be let pass
  // before. All threads of the warpgroup come to the same answer.
  __device__ __forceinline__ bool can_open_next() const {
    RingPlace<Layout::kQueryStages> next = query;
    next.advance();
    // It comes without this tile's end: its buffer is free since the tile before this one.
    wait_barrier(Layout::query_ready(base, next.stage), next.parity);
    const QueryWork work = Layout::read_work(base, next.stage);
    if (work.kv_head < 0 || work.num_rows <= warpgroup * 64) return false;
    const int32_t last_row = min(warpgroup * 64 + 63, work.num_rows - 1);
    const int32_t position = work.position + last_row / Layout::kGroup;
    return position / Layout::kKeys >= work.last;
  }

  __device__ __forceinline__ void open_next(Scores& scores) {
    RingPlace<Layout::kQueryStages> next = query;
    next.advance();
    open(scores, base + next.stage * Layout::kQueryBytes + warpgroup * (64 * 128));
  }

  // Weights of the first key tile, of whose scores the first `columns` are looked at.
  template <int columns>
  __device__ __forceinline__ void first_weights(int32_t tile, float (&scores)[columns / 2],
                                                Outputs& outputs, Weights& weights) {
#pragma unroll
    for (int i = 0; i < Layout::kValueColumns / 2; ++i) outputs[i] = 0.f;
    free_keys();
    cap(scores);
    hide<Layout::kHasWindow>(scores, this->visible(tile));
    float factors[2];
    softmax.follow(scores, factors);
    softmax.weigh(scores);
    this->template pack_first<columns>(weights, scores);
  }

  // From the first scores of an open query tile to its results. Gives whether the next one is open.
  __device__ __forceinline__ bool attend(Scores& scores, Outputs& outputs) {
    const QueryWork work = Layout::read_work(base, query.stage);
    softmax.begin();
    if constexpr (Layout::kIsScaled && !Layout::kHasSoftcap) {
      softmax.scale = args.softmax_scale * Layout::key_scale(args, work.kv_head) * kLog2E;
    }
    hold = 0;
    int32_t tile = max(min(top(), work.last), work.first);
    const uint64_t rows = by_rows(query_rows());
    Weights weights;
    if (sees_half(last_position(), tile)) {
      first_weights<Layout::kKeys / 2>(tile, first_half(scores), outputs, weights);
    } else {
      first_weights<Layout::kKeys>(tile, scores, outputs, weights);
    }
    if ((work.flags & kHasDeadRows) != 0 && tile == work.last) {
      wait_values();
      const int32_t end = work.position + (work.num_rows - 1) / Layout::kGroup + 1;
      clear_values(end - tile * Layout::kKeys, Layout::kKeys);
    }
    --tile;
    for (const int32_t end = full_end(); tile >= end; --tile) {
      this->template plain_step<false>(tile, scores, outputs, weights, rows);
    }
    if constexpr (Layout::kIsAhead) {
      this->ahead_steps(tile, scores, outputs, weights, rows);
    } else if constexpr (!Layout::kTries) {
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
    return close(scores, outputs);
  }

  // The end of a query tile, whose last product is running. Nothing is in flight where ways meet.
  __device__ __forceinline__ bool close(Scores& scores, Outputs& outputs) {
    float factors[2];
    if (can_open_next()) {
      open_next(scores);
      find_factors(factors);
      wgmma_wait<1>();
      pin(outputs);
      free_values();
      store(outputs, factors);
      wgmma_wait<0>();
      pin(scores);
      return true;
    }
    find_factors(factors);
    finish_outputs(outputs);
    free_values();
    store(outputs, factors);
    return false;
  }

  __device__ __forceinline__ void run() {
    Scores scores;
    bool is_open = false;
    while (true) {
      if (!is_open) {
        wait_barrier(Layout::query_ready(base, query.stage), query.parity);
        if (this->template field<kKvHead>() < 0) return;
        is_open = open_here(scores);
      }
      if (is_open) {
        Outputs outputs;
        is_open = attend(scores, outputs);
      }
      if (is_lane_0()) arrive(Layout::query_free(base, query.stage));
      query.advance();
    }
  }
};

}  // namespace paged_trt
