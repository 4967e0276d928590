// Decode, split: one block attends one partition of the keys of a (sequence, kv head), and leaves
// a normalised partial and its base-2 log-sum-exp for the merge kernel.
//
// Grid: (partitions * blocks of heads per kv head, kv heads, sequences up to the grid's limit).
// A partition beyond a sequence's length writes nothing, and the merge does not read it: the
// workspace has no state between launches.
#include "decode_block.cuh"

namespace paged_trt {

template <class Config>
__device__ __forceinline__ void decode_partition(DecodeShared<Config>& shared,
                                                 const DecodeSplitArgs& args, HeadRange heads,
                                                 int32_t sequence, int32_t partition) {
  const int32_t token = sequence;  // T == N: one token per sequence, padding behind
  const int32_t position = args.past_lens[sequence];
  const bool is_padding = args.query_start_offsets[sequence + 1] <= token;
  // Without a window a partition's pages do not depend on the length, so both loads fly at once.
  const PageCursor pages = page_cursor<Config>(
      args, sequence, partition * (args.partition_tokens / kTokensPerPage));
  BlockInputs<Config> inputs;
  inputs.load(args, heads, token, nullptr);
  wait_for_previous_kernel();

  const KeyRange keys = visible_keys(position, args.window, args.table_width);
  const int32_t count = count_partitions(keys, args.partition_tokens, args.threshold_tokens,
                                         args.num_partitions);
  if (is_padding || partition >= count) return;
  attend_keys(shared, args, heads, token, position,
              partition_keys(keys, args.partition_tokens, count, partition), pages, inputs);
  const int32_t num_q_heads = args.num_kv_heads * Config::kGroup;
  for_each_vector(shared, heads, [&](int head, int element, const PartialVector& total) {
    const int64_t slot = (static_cast<int64_t>(sequence) * num_q_heads + heads.first + head) *
                             args.num_partitions + partition;
    store_partial<Config>(args.partial_output + slot * Config::kValueDim, args.partial_lse + slot,
                          element, total, shared.value_scale);
  });
}

template <class Activation, class Kv, int kHeadDim, int kValueDim, int kGroup, int kWarps,
          int kBlocks, int kHeadTiles, int kFeatures>
__global__ void __launch_bounds__(kWarps * 32, kBlocks)
    decode_split(const __grid_constant__ DecodeSplitArgs args) {
  using Config = DecodeConfig<Activation, Kv, kHeadDim, kValueDim, kGroup, kWarps, kBlocks,
                              kHeadTiles, kFeatures, false>;
  __shared__ DecodeShared<Config> shared;
  allow_next_kernel();
  const HeadRange heads = heads_of_block<Config>(blockIdx.y, blockIdx.x % Config::kHeadBlocks);
  for (int32_t sequence = blockIdx.z; sequence < args.num_seqs; sequence += gridDim.z) {
    decode_partition<Config>(shared, args, heads, sequence, blockIdx.x / Config::kHeadBlocks);
    __syncthreads();  // the next sequence writes the same shared memory
  }
}

}  // namespace paged_trt
