// Decode, counter: num_blocks blocks share the keys of a (sequence, kv head) evenly, whatever its
// length; the last to arrive merges.
//
// Grid: (num_blocks * blocks of heads per kv head, kv heads, sequences up to the grid's limit).
#include "decode_counter.cuh"

namespace paged_trt {

template <class Config>
__device__ __forceinline__ void decode_share(CounterShared<Config>& shared,
                                             const DecodeCounterArgs& args, int32_t sequence) {
  const int32_t blocks = args.num_blocks, share = blockIdx.x % blocks, head_block = blockIdx.x / blocks;
  const HeadRange heads = heads_of_block<Config>(blockIdx.y, head_block);
  const int32_t token = sequence;  // T == N: one token per sequence, padding behind
  const int32_t position = args.past_lens[sequence];
  const bool is_padding = args.query_start_offsets[sequence + 1] <= token;
  // Which pages are this block's follows from the length; while that is on its way the pages are
  // read for the longest sequence that the table holds.
  const int32_t guess = static_cast<int64_t>(args.table_width) * share / blocks - 4;
  const PageCursor pages = page_cursor<Config>(args, sequence, max(guess, 0));
  BlockInputs<Config> inputs;
  inputs.load(args, heads, token, args.sinks);
  wait_for_previous_kernel();
  if (is_padding) {
    if (share == 0) store_zeros<Config>(args, heads, token);
    return;
  }
  const EvenShares<Config::kTokens> shares(visible_keys(position, args.window, args.table_width),
                                           blocks);
  const int32_t count = shares.count();
  if (share >= count) return;
  attend_keys(shared.block, args, heads, token, position, shares.share(share), pages, inputs);
  if (count == 1) return finish_whole(shared.block, args, heads, token, shared.block.value_scale);
  const int64_t row = (static_cast<int64_t>(sequence) * args.num_kv_heads + heads.kv_head) *
                          Config::kHeadBlocks + head_block;
  const PartialSlots slots = {row * blocks, row * blocks + 1, 1, count};
  finish_partial(shared, args, heads, token, head_block, slots, share, shared.block.value_scale);
}

template <class Activation, class Kv, int kHeadDim, int kValueDim, int kGroup, int kWarps,
          int kBlocks, int kHeadTiles, int kFeatures>
__global__ void __launch_bounds__(kWarps * 32, kBlocks)
    decode_counter(const __grid_constant__ DecodeCounterArgs args) {
  using Config = DecodeConfig<Activation, Kv, kHeadDim, kValueDim, kGroup, kWarps, kBlocks,
                              kHeadTiles, kFeatures, false>;
  __shared__ CounterShared<Config> shared;
  allow_next_kernel();
  for (int32_t sequence = blockIdx.z; sequence < args.num_seqs; sequence += gridDim.z) {
    decode_share<Config>(shared, args, sequence);
    __syncthreads();  // the next sequence writes the same shared memory
  }
}

}  // namespace paged_trt
