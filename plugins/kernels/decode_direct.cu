// Decode, direct: one block attends all keys of a (sequence, kv head).
//
// Grid: (blocks of heads per kv head, kv heads, sequences up to the grid's limit).
#include "attention_output.cuh"
#include "decode_block.cuh"

namespace paged_trt {

template <class Config>
__device__ __forceinline__ void decode_direct_sequence(DecodeShared<Config>& shared,
                                                       const DecodeDirectArgs& args,
                                                       HeadRange heads, int32_t sequence) {
  using Activation = typename Config::activation_type;
  const int32_t token = sequence;  // T == N: one token per sequence, padding behind
  const int32_t position = args.past_lens[sequence];
  const bool is_padding = args.query_start_offsets[sequence + 1] <= token;
  const PageCursor pages(args.page_table + static_cast<int64_t>(sequence) * args.table_width,
                         args.table_width, 0);
  wait_for_previous_kernel();
  QueryLoader<Config> loader;
  loader.load(query_heads<Activation, Config>(args, heads, token), heads.count, threadIdx.x >> 5,
              threadIdx.x & 31);

  const int64_t row = token * args.output_token_stride;
  if (is_padding) {
    for (int i = threadIdx.x * 4; i < heads.count * Config::kValueDim; i += Config::kThreads * 4) {
      store_output<Activation>(args.output, row + heads.first * Config::kValueDim + i,
                               make_float4(0.f, 0.f, 0.f, 0.f));
    }
    return;
  }
  const float scale = value_scale<Config>(args, heads.kv_head);
  attend_block<Config>(
      shared, args, heads, token, position, visible_keys(position, args.window, args.table_width),
      pages, loader, [&](int head, int element, const PartialVector& total) {
        const int32_t query_head = heads.first + head;
        const SinkFactors sink = add_sink(total.maximum, total.sum, args.sinks[query_head]);
        store_output<Activation>(
            args.output, row + query_head * Config::kValueDim + element,
            scaled(total.values, sink.factor * normaliser(sink.sum, scale)));
      });
}

template <class Activation, class Kv, int kHeadDim, int kValueDim, int kGroup, int kWarps,
          int kHeadTiles>
__global__ void __launch_bounds__(kWarps * 32, kWarps >= 8 ? 1 : 8 / kWarps)
    decode_direct(const __grid_constant__ DecodeDirectArgs args) {
  using Config =
      DecodeConfig<Activation, Kv, kHeadDim, kValueDim, kGroup, kWarps, kHeadTiles, true>;
  __shared__ DecodeShared<Config> shared;
  allow_next_kernel();
  const HeadRange heads = heads_of_block<Config>(blockIdx.y, blockIdx.x);
  for (int32_t sequence = blockIdx.z; sequence < args.num_seqs; sequence += gridDim.z) {
    decode_direct_sequence<Config>(shared, args, heads, sequence);
    __syncthreads();  // the next sequence writes the same shared memory
  }
}

}  // namespace paged_trt
