// Decode, balanced: the blocks that the device holds at once share the keys of the whole batch
// evenly; whoever finishes a (sequence, block of heads) that several share merges it.
//
// Grid: (num_blocks, or one block for each (sequence, block of heads) where those are a few times
// as many). Blocks beyond num_blocks have work where nothing is shared.
#include "decode_counter.cuh"
#include "decode_schedule.cuh"

namespace paged_trt {

// The query heads of a piece.
template <class Config>
__device__ __forceinline__ HeadRange heads_of_piece(const Piece& piece) {
  return heads_of_block<Config>(piece.column / Config::kHeadBlocks,
                                piece.column % Config::kHeadBlocks);
}

__device__ __forceinline__ const int32_t* table_row(const DecodeCounterArgs& args,
                                                    const Piece& piece) {
  return args.page_table + static_cast<int64_t>(piece.sequence) * args.table_width;
}

// The lane's page id of the first 32 of a piece.
__device__ __forceinline__ int32_t read_pages(const DecodeCounterArgs& args, const Piece& piece) {
  const int32_t first = piece.keys.first / kTokensPerPage;
  return table_entry(table_row(args, piece), args.table_width, first + (threadIdx.x & 31));
}

template <class Config>
__device__ __forceinline__ void finish_piece(CounterShared<Config>& shared,
                                             const DecodeCounterArgs& args,
                                             const Piece& piece) {
  const HeadRange heads = heads_of_piece<Config>(piece);
  const int32_t token = piece.sequence;
  const float scale = shared.block.value_scale;
  if (piece.num_blocks == 1) return finish_whole(shared.block, args, heads, token, scale);
  // A block leaves at most two partials: of the keys that it starts in the middle of in its even
  // slot, of those that it starts with in its odd one.
  const int64_t first = piece.first_block;
  const PartialSlots slots = {2 * first + 1, 2 * (first + 1), 2, piece.num_blocks};
  finish_partial(shared, args, heads, token, piece.column % Config::kHeadBlocks, slots,
                 piece.index, scale);
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
  __shared__ Schedule<DecodeCounterArgs> schedule;
  allow_next_kernel();
  if (threadIdx.x < 32) schedule.begin(args, args.num_kv_heads * Config::kHeadBlocks);
  __syncthreads();
  wait_for_previous_kernel();
  clear_padding_rows<Config>(args);
  if (schedule.piece(0).exists == 0) return;

  DecodeWarp<Config> warp;
  BlockInputs<Config> inputs;
  const auto start = [&](const Piece& piece, int32_t lane_page) {
    const HeadRange heads = heads_of_piece<Config>(piece);
    const PageCursor pages(table_row(args, piece), args.table_width,
                           piece.keys.first / kTokensPerPage, lane_page);
    warp.start(pool_view(args, heads.kv_head), pages, piece.keys);
    inputs.load(args, heads, piece.sequence, args.sinks);
  };
  start(schedule.piece(0), read_pages(args, schedule.piece(0)));
  for (int32_t i = 0; schedule.piece(i).exists != 0; i++) {
    const Piece &piece = schedule.piece(i), &next = schedule.piece(i + 1);
    // The memory is never idle: the next piece's pages are read under this one's keys, and its
    // first keys under this one's merge.
    const int32_t lane_page = next.exists != 0 ? read_pages(args, next) : -1;
    if (threadIdx.x == 0) schedule.make(args, i + 2);
    __syncwarp();
    attend_started(shared.block, args, heads_of_piece<Config>(piece), piece.sequence,
                   args.past_lens[piece.sequence], warp, inputs, [&] {
                     if (next.exists != 0) start(next, lane_page);
                   });
    finish_piece(shared, args, piece);
    __syncthreads();  // the next piece writes the same shared memory
  }
}

}  // namespace paged_trt
