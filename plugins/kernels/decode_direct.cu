// Decode, direct: one block attends all keys of a (sequence, kv head).
//
// Grid: (blocks of heads per kv head, kv heads, sequences up to the grid's limit).
#include "decode_block.cuh"

namespace paged_trt {

template <class Config>
__device__ __forceinline__ void decode_direct_sequence(DecodeShared<Config>& shared,
                                                       const DecodeDirectArgs& args,
                                                       HeadRange heads, int32_t sequence) {
  const int32_t token = sequence;  // T == N: one token per sequence, padding behind
  const int32_t position = args.past_lens[sequence];
  const bool is_padding = args.query_start_offsets[sequence + 1] <= token;
  const PageCursor pages = page_cursor<Config>(args, sequence, 0);
  BlockInputs<Config> inputs;
  inputs.load(args, heads, token, args.sinks);
  wait_for_previous_kernel();
  if (is_padding) return store_zeros<Config>(args, heads, token);
  attend_keys(shared, args, heads, token, position,
              visible_keys(position, args.window, args.table_width), pages, inputs);
  for_each_vector(shared, heads, [&](int head, int element, const PartialVector& total) {
    store_final(shared, args, heads, token, head, element, total, shared.value_scale);
  });
}

template <class Activation, class Kv, int kHeadDim, int kValueDim, int kGroup, int kWarps,
          int kBlocks, int kHeadTiles, int kFeatures>
__global__ void __launch_bounds__(kWarps * 32, kBlocks)
    decode_direct(const __grid_constant__ DecodeDirectArgs args) {
  using Config = DecodeConfig<Activation, Kv, kHeadDim, kValueDim, kGroup, kWarps, kBlocks,
                              kHeadTiles, kFeatures, true>;
  __shared__ DecodeShared<Config> shared;
  allow_next_kernel();
  const HeadRange heads = heads_of_block<Config>(blockIdx.y, blockIdx.x);
  for (int32_t sequence = blockIdx.z; sequence < args.num_seqs; sequence += gridDim.z) {
    decode_direct_sequence<Config>(shared, args, heads, sequence);
    __syncthreads();  // the next sequence writes the same shared memory
  }
}

}  // namespace paged_trt
