// A warpgroup of a Hopper prefill block: its state, its products, and what it sees of key tiles.
#pragma once

#include "prefill_sm90_layout.cuh"
#include "prefill_sm90_softmax.cuh"
#include "wgmma.cuh"

namespace paged_trt {

// One of two warpgroups of 64 rows.
template <class Layout>
struct PrefillWarpgroup {
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

  // Values before the window of the tile's first row, in the last key tile of the walk.
  __device__ __forceinline__ void clear_before_window() {
    const int32_t dead =
        first_visible(field<kPosition>(), args.window) - field<kFirst>() * Layout::kKeys;
    if (dead > 0) clear_values(0, dead);
  }
};

}  // namespace paged_trt
