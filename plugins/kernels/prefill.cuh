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

#include "cp_async.cuh"
#include "kv_fragments.cuh"
#include "page_table.cuh"
#include "query_tile.cuh"
#include "softmax_rows.cuh"

namespace paged_trt {

template <class Activation, class Kv, int head_dim, int value_head_dim, int group_size,
          int tile_rows, int tile_tokens, int num_warps, int num_stages>
struct Prefill {
  static constexpr int kThreads = num_warps * 32;
  static constexpr int kBlocks = tile_rows / (num_warps * 16);  // of 16 rows, per warp
  static constexpr int kScores = tile_tokens / 8;
  static constexpr int kOutputs = value_head_dim / 8;
  static_assert(head_dim % 16 == 0 && value_head_dim % 16 == 0, "k steps and column pairs of 16");
  static_assert(tile_rows == kBlocks * num_warps * 16, "a warp takes whole blocks of 16 rows");
  static_assert(kTokensPerPage % tile_tokens == 0 && tile_tokens % 32 == 0,
                "a key tile lies within a page, and fragments are loaded 32 tokens at a time");

  using Product = MmaType<Activation, Kv>;
  using QueryShared = SharedTile<head_dim * 2>;
  using KeyShared = SharedTile<head_dim * sizeof(Kv)>;
  using ValueShared = SharedTile<value_head_dim * sizeof(Kv)>;
  using Keys = KeyFragments<Kv, Product, head_dim * sizeof(Kv)>;
  using Values = ValueFragments<Kv, Product, value_head_dim * sizeof(Kv)>;
  static constexpr int kQueryBytes = tile_rows * QueryShared::kStride;
  static constexpr int kKeyBytes = tile_tokens * KeyShared::kStride;
  static constexpr int kValueBytes = tile_tokens * ValueShared::kStride;
  static_assert(kQueryBytes % 128 == 0 && kKeyBytes % 128 == 0 && kValueBytes % 128 == 0,
                "tiles lie where SharedTile wants them");
  static constexpr bool kByRow = kScalesRows<Activation, Kv>;
  static constexpr int kFactorsAt = kQueryBytes + num_stages * (kKeyBytes + kValueBytes);
  static constexpr int kSharedBytes = kFactorsAt + (kByRow ? tile_rows * 4 : 0);

  using Scores = float[kBlocks][kScores][4];
  using Outputs = float[kBlocks][kOutputs][4];
  using Weights = uint32_t[kBlocks][kScores][2];

  // What the query rows of a block see.
  struct View {
    const int32_t* pages;  // row of the page table
    int32_t table_width;
    int32_t num_pages;
    int32_t begin, end;  // positions that any row sees
    int32_t first_token;  // of the first key tile
    uint32_t num_tiles;

    __device__ __forceinline__ int32_t token(uint32_t tile) const {
      return first_token + tile * tile_tokens;
    }
    __device__ __forceinline__ int32_t page(uint32_t tile) const {
      return table_entry(pages, table_width, token(tile) / kTokensPerPage);
    }
  };

  struct Scales {
    float cap;  // of the argument of tanh; 0: no softcap
    float exponent;  // of what is then the exponent of 2
  };

  // softmax_scale and softcap, cap * tanh(s / cap), in base 2.
  static __device__ __forceinline__ Scales scales_of(const PrefillArgs& args, int32_t kv_head) {
    // The query took the sign. A scale of 0 would turn a masked score into NaN.
    float scale = fmaxf(fabsf(args.softmax_scale), 1e-37f);
    if (kIsQuantised<Kv>) scale *= args.kv_scales[kv_head];
    if (args.softcap > 0.f) return {scale / args.softcap, kLog2E * args.softcap};
    return {0.f, kLog2E * scale};
  }

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

  // First row of a tile that a lane holds; the others follow at multiples of 8.
  static __device__ __forceinline__ int32_t row_of_lane() {
    return threadIdx.x / 32 * (kBlocks * 16) + (threadIdx.x & 31) / 4;
  }

  // Starts the copy of one tile of a pool.
  template <int dim, class Tile>
  static __device__ __forceinline__ void stage(unsigned shared, const void* pool, const View& view,
                                               uint32_t tile, int32_t num_kv_heads,
                                               int32_t kv_head) {
    if (tile < view.num_tiles) {
      const int32_t page = view.page(tile), token = view.token(tile);
      if (is_page(page, view.num_pages)) {
        const int64_t offset = tile_offset(page, num_kv_heads, kv_head, dim) +
                               (token % kTokensPerPage) * dim;
        const char* source = static_cast<const char*>(pool) + offset * int64_t{sizeof(Kv)};
        constexpr int kChunks = tile_tokens * Tile::kChunks;
#pragma unroll
        for (uint32_t i = 0; i < (kChunks + kThreads - 1) / kThreads; ++i) {
          const uint32_t index = i * kThreads + threadIdx.x;
          if (kChunks % kThreads != 0 && index >= kChunks) break;
          const uint32_t row = index / Tile::kChunks, chunk = index % Tile::kChunks;
          const bool is_seen = static_cast<uint32_t>(token + row - view.begin) <
                               static_cast<uint32_t>(view.end - view.begin);
          copy_async_16(shared + Tile::offset(row, chunk), source + index * 16, is_seen);
        }
      }
    }
    commit_copies();
  }

  static __device__ __forceinline__ void score(Scores& scores, unsigned query, unsigned keys,
                                               const typename QueryShared::Lane& query_lane,
                                               const Keys& fragments) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int column = 0; column < kScores; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[block][column][i] = 0.f;
      }
    }
#pragma unroll
    for (int step = 0; step < head_dim / 16; ++step) {
      uint32_t a[kBlocks][4];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        load_matrices(a[block], query_lane.address(query, block * 16, step * 2));
      }
#pragma unroll
      for (int tokens = 0; tokens < tile_tokens / 32; ++tokens) {
        uint32_t b[4][2];
        fragments.load(b, keys, tokens * 32, step);
#pragma unroll
        for (int group = 0; group < 4; ++group) {
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            mma_m16n8k16<Product>(scores[block][tokens * 4 + group], a[block], b[group]);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void accumulate(Outputs& outputs, const Weights& weights,
                                                    unsigned values, const Values& fragments) {
#pragma unroll
    for (int tokens = 0; tokens < tile_tokens / 32; ++tokens) {
#pragma unroll
      for (int columns = 0; columns < value_head_dim / 16; ++columns) {
        uint32_t b[2][2][2];
        fragments.load(b, values, tokens * 32, columns);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const int first = tokens * 4 + step * 2;
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            const uint32_t a[4] = {weights[block][first][0], weights[block][first][1],
                                   weights[block][first + 1][0], weights[block][first + 1][1]};
#pragma unroll
            for (int group = 0; group < 2; ++group) {
              mma_m16n8k16<Product>(outputs[block][columns * 2 + group], a, b[step][group]);
            }
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void cap(Scores& scores, const ScoreScale<kByRow>& scale) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = scale(block, half);
#pragma unroll
        for (int column = 0; column < kScores; ++column) {
#pragma unroll
          for (int i = half * 2; i < half * 2 + 2; ++i) {
            scores[block][column][i] = tanh_accurate(scores[block][column][i] * factor);
          }
        }
      }
    }
  }

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

  // Hides what a row does not see. `first_row`: of the block's tile, within the sequence.
  static __device__ __forceinline__ void mask(Scores& scores, int32_t first_row, int32_t past,
                                              int32_t token, int32_t window) {
    const int32_t row = first_row + row_of_lane();
    const int32_t first_column = token + (threadIdx.x & 3) * 2;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t position = past + (row + block * 16 + half * 8) / group_size;
        const int32_t first = first_visible(position, window) - first_column;
        const int32_t last = position - first_column;
#pragma unroll
        for (int column = 0; column < kScores; ++column) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int32_t here = column * 8 + i;
            float& score = scores[block][column][half * 2 + i];
            score = here >= first && here <= last ? score : minus_infinity();
          }
        }
      }
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
      stage<head_dim, KeyShared>(shared_keys + key_tile % num_stages * kKeyBytes, args.key_pool,
                                 seen, key_tile, args.num_kv_heads, head);
    };
    const auto stage_values = [&](const View& seen, int32_t head, uint32_t key_tile) {
      stage<value_head_dim, ValueShared>(shared_values + key_tile % num_stages * kValueBytes,
                                         args.value_pool, seen, key_tile, args.num_kv_heads,
                                         head);
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
