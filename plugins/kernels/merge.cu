// Merge of the partitions of a split decode, sink included.
//
// Grid: (query heads, sequences up to the grid's limit); one block per output row.
#include "dependent_launch.cuh"
#include "merge_partials.cuh"
#include "partitions.cuh"

namespace paged_trt {

constexpr int kMergeThreads = 128;
constexpr int kPartialsInFlight = 4;  // per thread

template <class Activation, int kValueDim>
__device__ __forceinline__ void merge_row(const MergeArgs& args, int32_t head, int32_t sequence) {
  constexpr int kVectors = kValueDim / 4;
  constexpr int kShares = kMergeThreads / kVectors;
  static_assert(kShares >= 1, "a thread holds one vector of the row");
  __shared__ alignas(16) float4 share_values[kShares][kVectors];
  __shared__ float share_maxima[kShares], share_sums[kShares];

  const int share = threadIdx.x / kVectors, vector = threadIdx.x % kVectors;
  const int64_t row = sequence * args.output_token_stride + head * kValueDim;
  const bool is_padding = args.query_start_offsets[sequence + 1] <= sequence;
  const KeyRange keys = visible_keys(args.past_lens[sequence], args.window, args.table_width);
  const float sink = args.sinks[head];
  wait_for_previous_kernel();
  if (is_padding) {
    if (share == 0) {
      store_output<Activation>(args.output, row + vector * 4, make_float4(0.f, 0.f, 0.f, 0.f));
    }
    return;
  }
  const int32_t count = count_partitions(keys, args.partition_tokens, args.threshold_tokens,
                                         args.num_partitions);
  const int64_t slot =
      (static_cast<int64_t>(sequence) * args.num_q_heads + head) * args.num_partitions;
  if (share < kShares) {
    const float* place = args.partial_output + slot * kValueDim + vector * 4;
    const PartialVector part = merge_share<kPartialsInFlight>(
        share, kShares, count,
        [&](int32_t p) { return place + static_cast<int64_t>(p) * kValueDim; },
        [&](int32_t p) { return args.partial_lse + slot + p; });
    share_values[share][vector] = part.values;
    if (vector == 0) share_maxima[share] = part.maximum, share_sums[share] = part.sum;
  }
  __syncthreads();
  if (share != 0) return;
  const PartialVector total = merge_shares<kShares>(
      [&](int s) { return share_values[s][vector]; }, [&](int s) { return share_maxima[s]; },
      [&](int s) { return share_sums[s]; });
  const SinkFactors factors = add_sink(total.maximum, total.sum, sink);
  store_output<Activation>(args.output, row + vector * 4,
                           scaled(total.values, factors.factor * normaliser(factors.sum, 1.f)));
}

template <class Activation, int kValueDim>
__global__ void __launch_bounds__(kMergeThreads) merge(const __grid_constant__ MergeArgs args) {
  allow_next_kernel();
  for (int32_t sequence = blockIdx.y; sequence < args.num_seqs; sequence += gridDim.y) {
    merge_row<Activation, kValueDim>(args, blockIdx.x, sequence);
    __syncthreads();  // the next sequence writes the same shared memory
  }
}

}  // namespace paged_trt
