// Decode, balanced: the blocks that the device holds at once share the keys of the whole batch
// evenly; whoever finishes a (sequence, block of heads) that several share merges it.
//
// Grid: (num_blocks).
#include "decode_counter.cuh"
#include "decode_schedule.cuh"

namespace paged_trt {

template <class Config>
__device__ __forceinline__ void decode_piece(CounterShared<Config>& shared,
                                             const DecodeCounterArgs& args, const Piece& piece) {
  const int32_t head_block = piece.column % Config::kHeadBlocks;
  const HeadRange heads = heads_of_block<Config>(piece.column / Config::kHeadBlocks, head_block);
  const int32_t token = piece.sequence;  // T == N: one token per sequence, padding behind
  const PageCursor pages =
      page_cursor<Config>(args, piece.sequence, piece.keys.first / kTokensPerPage);
  BlockInputs<Config> inputs;
  inputs.load(args, heads, token, args.sinks);
  wait_for_previous_kernel();
  attend_keys(shared.block, args, heads, token, args.past_lens[piece.sequence], piece.keys, pages,
              inputs);
  if (piece.num_blocks == 1) {
    return finish_whole(shared.block, args, heads, token, inputs.value_scale);
  }
  // A block leaves at most two partials: of the keys that it starts in the middle of in its even
  // slot, of those that it starts in its odd one.
  const int64_t first = piece.first_block;
  const PartialSlots slots = {2 * first + 1, 2 * (first + 1), 2, piece.num_blocks};
  finish_partial(shared, args, heads, token, head_block, slots, piece.index, inputs.value_scale);
}

template <class Config>
__device__ __forceinline__ void clear_padding_rows(const DecodeCounterArgs& args) {
  const HeadRange all = {0, 0, args.num_kv_heads * Config::kGroup};
  for (int32_t sequence = blockIdx.x; sequence < args.num_seqs; sequence += gridDim.x) {
    if (args.query_start_offsets[sequence + 1] <= sequence) store_zeros<Config>(args, all, sequence);
  }
}

template <class Activation, class Kv, int kHeadDim, int kValueDim, int kGroup, int kWarps,
          int kHeadTiles, int kFeatures>
__global__ void __launch_bounds__(kWarps * 32, blocks_per_multiprocessor(kWarps))
    decode_balanced(const __grid_constant__ DecodeCounterArgs args) {
  using Config = DecodeConfig<Activation, Kv, kHeadDim, kValueDim, kGroup, kWarps, kHeadTiles,
                              kFeatures, true>;
  static_assert(kChunkTokens % Config::kTokens == 0, "a step does not cross a cut");
  __shared__ CounterShared<Config> shared;
  allow_next_kernel();
  Schedule<DecodeCounterArgs> schedule(args, args.num_kv_heads * Config::kHeadBlocks);
  Piece piece;
  bool has_piece = schedule.next(piece);
  wait_for_previous_kernel();
  clear_padding_rows<Config>(args);
  while (has_piece) {
    decode_piece<Config>(shared, args, piece);
    __syncthreads();  // the next piece writes the same shared memory
    has_piece = schedule.next(piece);
  }
}

}  // namespace paged_trt
