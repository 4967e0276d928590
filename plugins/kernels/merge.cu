// Merge of the partitions of a split decode, sink included.
//
// Grid: (query heads, sequences up to the grid's limit); one block per output row.
#include "attention_output.cuh"
#include "dependent_launch.cuh"
#include "partitions.cuh"

namespace paged_trt {

constexpr int kMergeThreads = 128;
constexpr int kPartialsInFlight = 4;  // per thread: the loads of a batch do not wait for each other

struct MergeState {
  float4 values;
  float maximum, sum;

  __device__ __forceinline__ void add(float4 partial, float lse, float factor) {
    const float weight = exp2_approx(lse - maximum);
    sum = sum * factor + weight;
    values.x = values.x * factor + weight * partial.x;
    values.y = values.y * factor + weight * partial.y;
    values.z = values.z * factor + weight * partial.z;
    values.w = values.w * factor + weight * partial.w;
  }
};

// One thread's share: every kStride-th partition from `first`.
template <int kValueDim, int kStride>
__device__ __forceinline__ MergeState merge_share(const float* outputs, const float* lses,
                                                  int32_t first, int32_t count, int element) {
  MergeState state = {make_float4(0.f, 0.f, 0.f, 0.f), kNoScore, 0.f};
  for (int32_t p0 = first; p0 < count; p0 += kStride * kPartialsInFlight) {
    float4 partials[kPartialsInFlight];
    float batch_lses[kPartialsInFlight], top = state.maximum;
#pragma unroll
    for (int k = 0; k < kPartialsInFlight; k++) {
      const int32_t p = p0 + k * kStride;
      partials[k] = make_float4(0.f, 0.f, 0.f, 0.f), batch_lses[k] = minus_infinity();
      if (p < count) {
        batch_lses[k] = __ldcg(lses + p);
        partials[k] = __ldcg(reinterpret_cast<const float4*>(
            outputs + static_cast<int64_t>(p) * kValueDim + element));
      }
    }
#pragma unroll
    for (int k = 0; k < kPartialsInFlight; k++) top = fmaxf(top, batch_lses[k]);
    const float factor = exp2_approx(state.maximum - top);
    state.maximum = top;
#pragma unroll
    for (int k = 0; k < kPartialsInFlight; k++) {
      state.add(partials[k], batch_lses[k], k == 0 ? factor : 1.f);
    }
  }
  return state;
}

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
    const MergeState state =
        merge_share<kValueDim, kShares>(args.partial_output + slot * kValueDim,
                                        args.partial_lse + slot, share, count, vector * 4);
    share_values[share][vector] = state.values;
    if (vector == 0) share_maxima[share] = state.maximum, share_sums[share] = state.sum;
  }
  __syncthreads();
  if (share != 0) return;
  MergeState total = {make_float4(0.f, 0.f, 0.f, 0.f), kNoScore, 0.f};
#pragma unroll
  for (int s = 0; s < kShares; s++) total.maximum = fmaxf(total.maximum, share_maxima[s]);
#pragma unroll
  for (int s = 0; s < kShares; s++) {
    const float factor = exp2_approx(share_maxima[s] - total.maximum);
    const float4 values = scaled(share_values[s][vector], factor);
    total.sum += factor * share_sums[s];
    total.values.x += values.x, total.values.y += values.y;
    total.values.z += values.z, total.values.w += values.w;
  }
  const SinkFactors sink = add_sink(total.maximum, total.sum, args.sinks[head]);
  store_output<Activation>(args.output, row + vector * 4,
                           scaled(total.values, sink.factor * normaliser(sink.sum, 1.f)));
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
