// Paged prefill: packed ragged queries against the pages of their sequences, FlashAttention-2
// style, with mma.sync and cp.async (sm_80 and later).
//
// A block takes one tile of query rows of one key head and walks the key tiles that any of them
// sees, first to last. A key tile lies within one page, so an invalid page skips whole tiles.
// Rows outside what the block sees are not read and are zero in shared memory: whatever a pool
// holds there, NaN included, cannot reach a product. Masking code runs only in tiles that the
// diagonal or the window's edge crosses.
//
// Two barriers a tile: at the first, the keys of this tile have arrived and nobody reads the
// values of the last one; at the second, the values have arrived and nobody reads these keys.
// Each frees one buffer, which is filled right after it.
#pragma once

#include "prefill_tiles.cuh"

namespace paged_trt {

template <class Activation, class Kv, int head_dim, int value_head_dim, int group_size,
          int tile_rows, int tile_tokens, int num_warps, int num_stages>
struct Prefill : PrefillTiles<Activation, Kv, head_dim, value_head_dim, group_size, tile_rows,
                              tile_tokens, num_warps, num_stages> {
  using Tiles = PrefillTiles<Activation, Kv, head_dim, value_head_dim, group_size, tile_rows,
                             tile_tokens, num_warps, num_stages>;
  using typename Tiles::Keys, typename Tiles::KeyShared, typename Tiles::Outputs,
      typename Tiles::Product, typename Tiles::QueryShared, typename Tiles::Scales,
      typename Tiles::Scores, typename Tiles::Values, typename Tiles::ValueShared,
      typename Tiles::View, typename Tiles::Weights;
  using Tiles::accumulate, Tiles::cap, Tiles::kBlocks, Tiles::kByRow, Tiles::kFactorsAt,
      Tiles::kKeyBytes, Tiles::kQueryBytes, Tiles::kThreads, Tiles::kValueBytes, Tiles::mask,
      Tiles::row_of_lane, Tiles::scales_of, Tiles::score;

  // What a block knows about its tile.
  struct Kept {
    QueryTile tile;
    View view;
    int32_t past;
    int32_t kv_head;
    Scales scales;
  };

  // Positions of the rows of one warp; it has none where `last` is below `first`.
  struct Span {
    int32_t first, last;
    int32_t window;

    __device__ __forceinline__ bool sees(int32_t token) const {
      return first <= last && token <= last &&
             (window < 0 || token + tile_tokens - 1 > first - window);
    }
    __device__ __forceinline__ bool sees_all(int32_t token) const {
      return token + tile_tokens - 1 <= first && (window < 0 || token > last - window);
    }
  };

  // From scores to weights of a tile: softcap, mask, softmax.
  static __device__ __forceinline__ void weigh(Weights& weights, Scores& scores,
                                               SoftmaxRows<kBlocks>& rows, Outputs& outputs,
                                               const Kept& kept, const float* factors, bool masked,
                                               int32_t token, int32_t window) {
    const float* own = factors + row_of_lane();
    const bool has_cap = kept.scales.cap > 0.f;
    if (has_cap) cap(scores, {kept.scales.cap, own});
    if (masked) mask(scores, kept.tile.first_row, kept.past, token, window);
    if (kByRow && has_cap) {  // the factors of the rows went into tanh
      const ScoreScale<false> scale = {kept.scales.exponent, nullptr};
      rows.follow(scores, outputs, scale);
      rows.template weigh<Product>(weights, scores, scale);
    } else {
      const ScoreScale<kByRow> scale = {kept.scales.exponent, own};
      rows.follow(scores, outputs, scale);
      rows.template weigh<Product>(weights, scores, scale);
    }
  }

  // The neighbouring outputs of a row that a lane holds, of 16 columns: see kv_fragments.cuh.
  static __device__ __forceinline__ void store_columns(Activation* row, int columns,
                                                       const float (&even)[4],
                                                       const float (&odd)[4], int half,
                                                       float factor) {
    const float a = even[half * 2] * factor, b = even[half * 2 + 1] * factor;
    const float c = odd[half * 2] * factor, d = odd[half * 2 + 1] * factor;
    Activation* target = row + columns * 16 + (threadIdx.x & 3) * (kIsQuantised<Kv> ? 4 : 2);
    if constexpr (kIsQuantised<Kv>) {
      *reinterpret_cast<uint2*>(target) =
          make_uint2(pack<Activation>(a, c), pack<Activation>(b, d));
    } else {
      *reinterpret_cast<uint32_t*>(target) = pack<Activation>(a, b);
      *reinterpret_cast<uint32_t*>(target + 8) = pack<Activation>(c, d);
    }
  }

  static __device__ __forceinline__ Activation* output_row(const PrefillArgs& args,
                                                           const QueryTile& tile, int32_t kv_head,
                                                           int32_t row) {
    const int64_t token = tile.first_token + (tile.first_row + row) / group_size;
    const int32_t head = kv_head * group_size + (tile.first_row + row) % group_size;
    return static_cast<Activation*>(args.output) + token * args.output_token_stride +
           head * value_head_dim;
  }

  // Token rows after the last sequence.
  static __device__ void clear(const PrefillArgs& args, const QueryTile& tile, int32_t kv_head) {
    constexpr int kChunks = value_head_dim / 8;
    for (int32_t index = threadIdx.x; index < tile.num_rows * kChunks; index += kThreads) {
      Activation* row = output_row(args, tile, kv_head, index / kChunks);
      reinterpret_cast<uint4*>(row)[index % kChunks] = make_uint4(0, 0, 0, 0);
    }
  }

  static __device__ __forceinline__ View view_of(const PrefillArgs& args, const QueryTile& tile,
                                                 int32_t past) {
    View view;
    view.pages = args.page_table + static_cast<int64_t>(tile.sequence) * args.table_width;
    view.table_width = args.table_width;
    view.num_pages = args.num_pages;
    const int32_t last_row = tile.first_row + tile.num_rows - 1;
    view.begin = first_visible(past + tile.first_row / group_size, args.window);
    view.end = past + last_row / group_size + 1;
    view.first_token = view.begin / tile_tokens * tile_tokens;
    view.num_tiles = (view.end - view.first_token + tile_tokens - 1) / tile_tokens;
    return view;
  }

  static __device__ __forceinline__ void attend(const PrefillArgs& args, const QueryTile& tile,
                                                int32_t kv_head, unsigned char* shared) {
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int32_t past = args.past_lens[tile.sequence];
    const View view = view_of(args, tile, past);
    const unsigned shared_query = shared_address(shared);
    const unsigned shared_keys = shared_query + kQueryBytes;
    const unsigned shared_values = shared_keys + num_stages * kKeyBytes;
    const auto stage_keys = [&](const View& seen, int32_t head, uint32_t key_tile) {
      Tiles::template stage<head_dim, KeyShared>(
          shared_keys + key_tile % num_stages * kKeyBytes, args.key_pool, seen, key_tile,
          args.num_kv_heads, head);
    };
    const auto stage_values = [&](const View& seen, int32_t head, uint32_t key_tile) {
      Tiles::template stage<value_head_dim, ValueShared>(
          shared_values + key_tile % num_stages * kValueBytes, args.value_pool, seen, key_tile,
          args.num_kv_heads, head);
    };
#pragma unroll
    for (uint32_t ahead = 0; ahead < num_stages; ++ahead) {
      stage_keys(view, kv_head, ahead);
      if (ahead + 1 < num_stages) stage_values(view, kv_head, ahead);
    }
    float* factors = reinterpret_cast<float*>(shared + kFactorsAt);
    if constexpr (kByRow) {
      find_row_factors<head_dim, group_size, tile_rows, kThreads>(factors, args, tile, kv_head);
      __syncthreads();
    }
    stage_query<Activation, Kv, head_dim, group_size, tile_rows, kThreads>(
        shared, factors, args, tile, kv_head, past, args.softmax_scale < 0.f ? -1.f : 1.f);

    // What all threads of the block share does not have to be in registers, short in the loop.
    __shared__ Kept kept;
    if (threadIdx.x == 0) kept = {tile, view, past, kv_head, scales_of(args, kv_head)};
    __syncthreads();

    const int32_t warp_row = tile.first_row + warp * kBlocks * 16;
    const int32_t end_row = min(warp_row + kBlocks * 16, tile.first_row + tile.num_rows);
    const Span span = {past + warp_row / group_size,
                       end_row > warp_row ? past + (end_row - 1) / group_size : -1, args.window};
    const typename QueryShared::Lane query_lane(lane & 15, lane >> 4);
    const unsigned warp_query = shared_query + warp * kBlocks * 16 * QueryShared::kStride;
    const Keys key_fragments(lane);
    const Values value_fragments(lane);

    SoftmaxRows<kBlocks> rows;
    Outputs outputs = {};
    for (uint32_t key_tile = 0; key_tile < kept.view.num_tiles; ++key_tile) {
      const int32_t token = kept.view.token(key_tile);
      const bool is_needed =
          span.sees(token) && is_page(kept.view.page(key_tile), args.num_pages);
      Weights weights;
      wait_copies<2 * (num_stages - 1)>();
      __syncthreads();
      stage_values(kept.view, kept.kv_head, key_tile + num_stages - 1);
      if (is_needed) {
        Scores scores;
        score(scores, warp_query, shared_keys + key_tile % num_stages * kKeyBytes, query_lane,
              key_fragments);
        weigh(weights, scores, rows, outputs, kept, factors, !span.sees_all(token), token,
              args.window);
      }
      wait_copies<2 * (num_stages - 1)>();
      __syncthreads();
      stage_keys(kept.view, kept.kv_head, key_tile + num_stages);
      if (is_needed) {
        accumulate(outputs, weights, shared_values + key_tile % num_stages * kValueBytes,
                   value_fragments);
      }
    }
    store(args, kept.tile, kept.kv_head, rows, outputs);
  }

  static __device__ __forceinline__ void store(const PrefillArgs& args, const QueryTile& tile,
                                               int32_t kv_head, const SoftmaxRows<kBlocks>& rows,
                                               const Outputs& outputs) {
    const float value_scale = kIsQuantised<Kv> ? args.kv_scales[args.num_kv_heads + kv_head] : 1.f;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = row_of_lane() + block * 16 + half * 8;
        const int32_t head = kv_head * group_size + (tile.first_row + row) % group_size;
        const float factor = rows.final_factor(block, half, args.sinks[head] * kLog2E);
        if (row >= tile.num_rows) continue;
        Activation* target = output_row(args, tile, kv_head, row);
#pragma unroll
        for (int columns = 0; columns < value_head_dim / 16; ++columns) {
          store_columns(target, columns, outputs[block][columns * 2],
                        outputs[block][columns * 2 + 1], half, factor * value_scale);
        }
      }
    }
  }
};

// Grid: key heads x an upper bound of the tiles, in one dimension. Key heads run fastest and the
// last tiles of a sequence, which see most keys, start first.
template <class Activation, class Kv, int head_dim, int value_head_dim, int group_size,
          int tile_rows, int tile_tokens, int num_warps, int num_stages>
__global__ void __launch_bounds__(num_warps * 32) prefill(const PrefillArgs args) {
  using Block = Prefill<Activation, Kv, head_dim, value_head_dim, group_size, tile_rows,
                        tile_tokens, num_warps, num_stages>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int32_t num_tiles = gridDim.x / args.num_kv_heads;
  const int32_t kv_head = blockIdx.x % args.num_kv_heads;
  const int32_t target = num_tiles - 1 - blockIdx.x / args.num_kv_heads;
  const QueryTile tile = find_query_tile<group_size, tile_rows>(args.query_start_offsets,
                                                                args.num_seqs, args.num_tokens,
                                                                target);
  if (tile.sequence < 0) return;
  if (tile.sequence == args.num_seqs) {
    Block::clear(args, tile, kv_head);
  } else {
    Block::attend(args, tile, kv_head, shared);
  }
}

}  // namespace paged_trt
