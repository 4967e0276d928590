// Gather: the pages of an 8-bit pool that a prefill step reads become pages of 16-bit elements in
// the workspace, for the kernel of prefill_sm90.cuh.
//
// Elements are converted, not scaled: e4m3 and int8 are exact in fp16 and bf16, and the scales of
// the pool belong to the softmax scale and to the result. Gathered pages lie sequence after
// sequence, each sequence's from the first page that its queries see to the last one of the table;
// `gathered_table` names them. What no query sees is not read: pages before the window, pages and
// rows behind the last token, and page ids outside of the pool, whose entry becomes -1. Rows of a
// gathered page that are not read are zero.
//
// Grid: slots of gathered pages x key heads, in one dimension, key heads fastest; there is a slot
// for every page that a step of this shape may read, and blocks of unused slots end. A block moves
// the keys and the values of one key head of one page. No shared memory, no barrier. The counter of
// the prefill behind is set to zero on the way.
#include "conversions.cuh"
#include "dependent_launch.cuh"
#include "page_table.cuh"
#include "softmax_math.cuh"

namespace paged_trt {

constexpr int kGatherThreads = 256;
constexpr int kGatherChunk = 8;  // elements: 8 bytes in, 16 out
constexpr int kGatherInFlight = 8;  // chunks of a thread that do not wait for each other

// Positions [begin, end) of a sequence that its queries see, and the pages that hold them.
struct SeenPages {
  int32_t begin, end;
  int32_t first, count;
};

__device__ __forceinline__ SeenPages seen_pages(const GatherArgs& args, int32_t sequence) {
  if (sequence >= args.num_seqs) return {0, 0, 0, 0};
  const int32_t* offsets = args.query_start_offsets + sequence;
  const int32_t past = args.past_lens[sequence];
  const int32_t tokens = offsets[1] - offsets[0];
  if (tokens <= 0) return {0, 0, 0, 0};
  const int32_t begin = first_visible(past, args.window), end = past + tokens;
  const int32_t first = begin / kTokensPerPage;
  const int32_t last = min((end - 1) / kTokensPerPage, args.table_width - 1);
  return {begin, end, first, max(last - first + 1, 0)};
}

// What a slot holds.
struct GatheredPage {
  int32_t sequence;  // -1: nothing
  int32_t index;  // of the page in its row of the table
  int32_t begin, end;  // rows of the page that are read
};

// Every warp looks for itself: lengths are in L1 after the first, and no barrier is needed.
__device__ __forceinline__ GatheredPage find_page(const GatherArgs& args, int32_t slot) {
  const int32_t lane = threadIdx.x & 31;
  int32_t before = 0;
  for (int32_t first = 0; first < args.num_seqs; first += 32) {
    const SeenPages seen = seen_pages(args, first + lane);
    int32_t through = seen.count;
#pragma unroll
    for (int32_t distance = 1; distance < 32; distance *= 2) {
      const int32_t other = __shfl_up_sync(kAllLanes, through, distance);
      if (lane >= distance) through += other;
    }
    through += before;
    const uint32_t reached = __ballot_sync(kAllLanes, slot < through);
    if (reached != 0) {
      const int32_t owner = __ffs(reached) - 1;
      const int32_t own = seen.first + slot - (through - seen.count);
      const int32_t index = __shfl_sync(kAllLanes, own, owner);
      const int32_t begin = __shfl_sync(kAllLanes, seen.begin, owner);
      const int32_t end = __shfl_sync(kAllLanes, seen.end, owner);
      const int32_t position = index * kTokensPerPage;
      return {first + owner, index, max(begin - position, 0), min(end - position, kTokensPerPage)};
    }
    before = __shfl_sync(kAllLanes, through, 31);
  }
  return {-1, 0, 0, 0};
}

// Eight elements, unscaled.
template <class Activation, class Kv>
__device__ __forceinline__ uint4 widen(uint2 raw) {
  uint32_t pairs[4];
  expand_quad<Kv>(raw.x, pairs[0], pairs[1]);
  expand_quad<Kv>(raw.y, pairs[2], pairs[3]);
#pragma unroll
  for (int i = 0; i < 4; i++) pairs[i] = convert_pair<Float16, Activation>(pairs[i]);
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// The [128, dim] tile of one page and key head.
template <class Activation, class Kv, int dim>
__device__ __forceinline__ void gather_tile(const void* pool, int64_t from, void* gathered,
                                            int64_t to, const GatheredPage& page) {
  constexpr int kChunksPerRow = dim / kGatherChunk;
  constexpr int kChunks = kTokensPerPage * kChunksPerRow;
  constexpr int kInFlight = kChunks / kGatherThreads < kGatherInFlight ? kChunks / kGatherThreads
                                                                       : kGatherInFlight;
  constexpr int kStep = kInFlight * kGatherThreads;
  static_assert(sizeof(Kv) == 1 && sizeof(Activation) == 2, "8-bit pools, 16-bit activations");
  static_assert(dim % kGatherChunk == 0 && kChunks % kStep == 0, "whole steps");
  const uint2* source = reinterpret_cast<const uint2*>(static_cast<const Kv*>(pool) + from);
  uint4* target = reinterpret_cast<uint4*>(static_cast<Activation*>(gathered) + to);
#pragma unroll 1
  for (int first = threadIdx.x; first < kChunks; first += kStep) {
    uint2 raw[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      const int chunk = first + i * kGatherThreads, row = chunk / kChunksPerRow;
      raw[i] = make_uint2(0, 0);
      if (row >= page.begin && row < page.end) raw[i] = source[chunk];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      target[first + i * kGatherThreads] = widen<Activation, Kv>(raw[i]);
    }
  }
}

template <class Activation, class Kv, int head_dim, int value_head_dim>
__global__ void __launch_bounds__(kGatherThreads)
    gather(const __grid_constant__ GatherArgs args) {
  const auto block = static_cast<int32_t>(blockIdx.x);
  const int32_t slot = block / args.num_kv_heads, kv_head = block - slot * args.num_kv_heads;
  const GatheredPage page = find_page(args, slot);
  const int64_t entry = static_cast<int64_t>(page.sequence) * args.table_width + page.index;
  const int32_t id = page.sequence < 0 ? -1 : args.page_table[entry];
  wait_for_previous_kernel();  // all blocks: whoever follows this kernel follows the append too
  if (block == 0 && threadIdx.x == 0) *args.tile_counter = 0;
  if (page.sequence < 0) return;
  const bool is_valid = is_page(id, args.num_pages);
  if (kv_head == 0 && threadIdx.x == 0) args.gathered_table[entry] = is_valid ? slot : -1;
  if (!is_valid) return;
  gather_tile<Activation, Kv, head_dim>(
      args.key_pool, tile_offset(id, args.num_kv_heads, kv_head, head_dim), args.gathered_keys,
      tile_offset(slot, args.num_kv_heads, kv_head, head_dim), page);
  gather_tile<Activation, Kv, value_head_dim>(
      args.value_pool, tile_offset(id, args.num_kv_heads, kv_head, value_head_dim),
      args.gathered_values, tile_offset(slot, args.num_kv_heads, kv_head, value_head_dim), page);
}

}  // namespace paged_trt
