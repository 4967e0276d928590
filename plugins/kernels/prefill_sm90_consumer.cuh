// Products and softmax of a Hopper prefill block: one object for each of two warpgroups of 64 rows.
#pragma once

#include "prefill_sm90_merge.cuh"
#include "prefill_sm90_softmax.cuh"
#include "wgmma.cuh"

namespace paged_trt {

template <class Layout>
struct PrefillConsumer {
  using Element = typename Layout::Type;
  using Scores = typename Layout::Scores;
  using Outputs = typename Layout::Outputs;
  using Weights = typename Layout::Weights;

  const PrefillSm90Args& args;
  unsigned base;
  int warpgroup;  // 0 or 1
  RingPlace<Layout::kQueryStages> query;
  RingPlace<Layout::kKeyStages> keys;
  RingPlace<Layout::kValueStages> values, used_values;  // to use next; to give back next
  SoftmaxPair softmax;
  int hold;  // full tiles for which the maximum is computed all the same

  // Full tiles after one that had to be done again: references have not settled yet.
  static constexpr int kHold = 4;

  __device__ __forceinline__ bool is_lane_0() const { return (threadIdx.x & 31) == 0; }
  __device__ __forceinline__ void wait_keys() {
    wait_barrier(Layout::key_ready(base, keys.stage), keys.parity);
  }
  __device__ __forceinline__ void wait_values() {
    wait_barrier(Layout::value_ready(base, values.stage), values.parity);
  }
  __device__ __forceinline__ void free_keys() {
    if (is_lane_0()) arrive(Layout::key_free(base, keys.stage));
    keys.advance();
  }
  __device__ __forceinline__ void free_values() {
    if (is_lane_0()) arrive(Layout::value_free(base, used_values.stage));
    used_values.advance();
  }

  template <int place>
  __device__ __forceinline__ int32_t field() const {
    return Layout::template work_field<place>(base, query.stage);
  }

  // Rows of this warpgroup in the query's buffer, and later of the output.
  __device__ __forceinline__ unsigned query_rows() const {
    return base + query.stage * Layout::kQueryBytes + warpgroup * (64 * 128);
  }

  // Starts the products of scores.
  template <int columns = Layout::kKeys>
  __device__ __forceinline__ void score(float (&scores)[columns / 2], uint64_t query_rows) {
    const uint64_t key_rows = by_rows(base + Layout::kKeysAt + keys.stage * Layout::kKeyBytes);
#pragma unroll
    for (int step = 0; step < Layout::kHeadDim / 16; ++step) {
      const uint64_t within = step % 4 * 2;
      Wgmma<Element, columns>::shared(scores, query_rows + step / 4 * (kQueryRows * 8) + within,
                                      key_rows + step / 4 * (Layout::kBox / 16) + within,
                                      step != 0);
    }
    wgmma_commit();
  }

  // Starts the products of outputs.
  __device__ __forceinline__ void accumulate(Outputs& outputs, const Weights& weights) {
    wgmma_fence();
    const uint64_t rows =
        by_columns<Layout::kBox>(base + Layout::kValuesAt + values.stage * Layout::kValueBytes);
#pragma unroll
    for (int step = 0; step < Layout::kSteps; ++step) {
      Wgmma<Element, Layout::kValueDim>::registers(outputs, weights[step], rows + step * 128);
    }
    wgmma_commit();
    values.advance();
  }

  __device__ __forceinline__ void finish_outputs(Outputs& outputs) {
    wgmma_wait<0>();
    pin(outputs);
  }

  // Scores as the softmax wants them: inside of softcap they are what tanh gives.
  template <int count>
  __device__ __forceinline__ void cap(float (&scores)[count]) const {
    if constexpr (Layout::kHasSoftcap) {
      float scale = args.softmax_scale / args.softcap;
      if constexpr (Layout::kIsScaled) scale *= Layout::key_scale(args, field<kKvHead>());
#pragma unroll
      for (int i = 0; i < count; ++i) scores[i] = tanh_accurate(scores[i] * scale);
    }
  }

  // What the rows of this lane see of a key tile; nothing of one without a page.
  __device__ __forceinline__ VisibleColumns visible(int32_t tile) const {
    const int32_t first_position = field<kPosition>();
    const int thread = thread_here(), lane = thread & 31, warp = thread / 32 & 3;
    const int row = warpgroup * 64 + warp * 16 + lane / 4;
    const int32_t first_column = tile * Layout::kKeys + (lane & 3) * 2;
    VisibleColumns columns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t position = first_position + (row + half * 8) / Layout::kGroup;
      columns.last[half] = position - first_column;
      columns.first[half] =
          Layout::kHasWindow ? first_visible(position, args.window) - first_column : 0;
    }
    if ((field<kFlags>() & kHasInvalidPages) != 0 &&
        !is_page(Layout::page_of(args, field<kSequence>(), tile), args.num_pages)) {
      columns.last[0] = columns.last[1] = -1;
    }
    return columns;
  }

  // The first tile, of which only the first `columns` keys are looked at.
  template <int columns>
  __device__ __forceinline__ void first_step(int32_t tile, Outputs& outputs, Weights& weights,
                                             uint64_t query_rows) {
    float scores[columns / 2];
    wgmma_fence();
    score<columns>(scores, query_rows);
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
    score(scores, query_rows);
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
    score(scores, query_rows);
    wait_values();
    accumulate(outputs, weights);
    wgmma_wait<1>();
    pin(scores);
    free_keys();
    if (is_pending) free_values();
    if (hold > 0 || !softmax.try_weigh<Element, Layout::kSteps>(next, scores)) {
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

  // Rows [first, end) of the values to use next become zero.
  __device__ __forceinline__ void clear_values(int32_t first, int32_t end) {
    constexpr int kChunks = Layout::kValueDim / 8;
    const unsigned tile = base + Layout::kValuesAt + values.stage * Layout::kValueBytes;
    for (int i = first * kChunks + (thread_here() & 127); i < end * kChunks; i += 128) {
      const int row = i / kChunks, chunk = i % kChunks;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                       tile + chunk / 8 * Layout::kBox + row * 128 + chunk % 8 * 16),
                   "r"(0)
                   : "memory");
    }
    fence_async_proxy();
    sync_threads(kWarpgroupBarrier + warpgroup, 128);
  }

  // Bounds of the key tiles by what they need. They are worked out where they are used: registers
  // are short.

  // The last tile that a row of this warpgroup sees.
  __device__ __forceinline__ int32_t top() const { return last_position() / Layout::kKeys; }

  __device__ __forceinline__ int32_t last_position() const {
    const int32_t last_row = min(warpgroup * 64 + 63, field<kNumRows>() - 1);
    return field<kPosition>() + last_row / Layout::kGroup;
  }

  // From here up, tiles have keys that come after a row, or that have no page.
  __device__ __forceinline__ int32_t full_end() const {
    const int32_t first = field<kFirst>();
    if (field<kFlags>() & kHasInvalidPages) return first;
    return max((field<kPosition>() + warpgroup * 64 / Layout::kGroup + 1) / Layout::kKeys, first);
  }

  // Below, tiles have keys that come before the window of a row.
  __device__ __forceinline__ int32_t full_begin() const {
    const int32_t first = field<kFirst>();
    if (!Layout::kHasWindow) return first;
    return max((first_visible(last_position(), args.window) + Layout::kKeys - 1) / Layout::kKeys,
               first);
  }

  // A full tile on its own: the weights of the tile before are replaced by its own.
  __device__ __forceinline__ void lone_step(Scores& scores, Outputs& outputs, Weights& weights,
                                            uint64_t query_rows) {
    wait_keys();
    wgmma_fence();
    score(scores, query_rows);
    wait_values();
    accumulate(outputs, weights);
    wgmma_wait<1>();
    pin(scores);
    free_keys();
    finish_outputs(outputs);
    free_values();
    if (hold > 0 || !softmax.try_weigh<Element, Layout::kSteps>(weights, scores)) {
      float factors[2];
      softmax.follow(scores, factors);
      softmax.weigh(scores);
      pack_weights<Element, Layout::kSteps>(weights, scores);
      multiply_rows(outputs, factors);
    }
  }

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

  // The first tile of the walk, and zeros for values behind the sequence.
  __device__ __forceinline__ void begin(int32_t tile, bool has_dead_rows, int32_t end_position,
                                        Outputs& outputs, Weights& weights, uint64_t query_rows) {
    wait_keys();
    const int32_t seen = last_position() - tile * Layout::kKeys + 1;
    if constexpr (Layout::kKeys == 128) {
      if (seen <= Layout::kKeys / 2) {
        first_step<Layout::kKeys / 2>(tile, outputs, weights, query_rows);
      } else {
        first_step<Layout::kKeys>(tile, outputs, weights, query_rows);
      }
    } else {
      first_step<Layout::kKeys>(tile, outputs, weights, query_rows);
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
      plain_step<false>(tile, scores, outputs, weights, rows);
    }
    if constexpr (!Layout::kTries) {
      for (const int32_t end = full_begin(); tile >= end; --tile) {
        plain_step<true>(tile, scores, outputs, weights, rows);
      }
    } else {
      full_steps(tile, scores, outputs, weights, rows);
    }
    if constexpr (Layout::kHasWindow) {
      for (const int32_t end = field<kFirst>(); tile >= end; --tile) {
        plain_step<false>(tile, scores, outputs, weights, rows);
      }
    }
    wait_values();
    if (Layout::kHasWindow) clear_before_window();
    accumulate(outputs, weights);
    if constexpr (!Layout::kIsSplit) find_factors(factors);
    finish_outputs(outputs);
    free_values();
    return true;
  }

  // What turns outputs into results, while the last product runs.
  __device__ __forceinline__ void find_factors(float (&factors)[2]) const {
    const int thread = thread_here();
    const int kv_head = field<kKvHead>(), first_head = kv_head * Layout::kGroup;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warpgroup * 64 + (thread / 32 & 3) * 16 + (thread & 31) / 4 + half * 8;
      const float own_sink = args.sinks[first_head + row % Layout::kGroup];
      const float sum = sum_of_quad(softmax.sum[half]);
      const SinkFactors sink = add_sink(softmax.exponent(half), sum, own_sink);
      factors[half] = sink.factor * normaliser(sink.sum, Layout::value_scale(args, kv_head));
    }
  }

  // Values before the window of the tile's first row, in the last key tile of the walk.
  __device__ __forceinline__ void clear_before_window() {
    const int32_t dead =
        first_visible(field<kPosition>(), args.window) - field<kFirst>() * Layout::kKeys;
    if (dead > 0) clear_values(0, dead);
  }

  // Normalised outputs, through this warpgroup's rows of the query's buffer to device memory.
  __device__ __forceinline__ void store(const Outputs& outputs, const float (&factors)[2]) {
    const QueryWork work = Layout::read_work(base, query.stage);
    const int thread = thread_here(), lane = thread & 31, warp_row = (thread / 32 & 3) * 16;
    sync_threads(kWarpgroupBarrier + warpgroup, 128);  // no warp reads the query any more
    const unsigned rows = query_rows();
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
    __syncwarp();
  }

  static __device__ __forceinline__ void store_word(unsigned address, uint32_t word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
  }

  static __device__ __forceinline__ uint4 load_words(unsigned address) {
    uint4 words;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(address)
                 : "memory");
    return words;
  }

  __device__ __forceinline__ void run() {
    while (true) {
      wait_barrier(Layout::query_ready(base, query.stage), query.parity);
      if (field<kKvHead>() < 0) return;
      Outputs outputs;
      float factors[2];
      const bool has_outputs = attend(outputs, factors);
      if constexpr (Layout::kIsSplit) {
        merger().store(outputs, softmax, has_outputs);
        merger().merge();
      } else {
        if (has_outputs) store(outputs, factors);
      }
      if (is_lane_0()) arrive(Layout::query_free(base, query.stage));
      query.advance();
    }
  }

  __device__ __forceinline__ TileMerger<Layout> merger() const {
    return {args, base, warpgroup, query.stage};
  }
};

}  // namespace paged_trt
