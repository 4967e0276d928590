// What a block of the portable prefill does with one key tile: copies, products, masks.
#pragma once

#include "cp_async.cuh"
#include "kv_fragments.cuh"
#include "page_table.cuh"
#include "query_tile.cuh"
#include "softmax_rows.cuh"

namespace paged_trt {

template <class Activation, class Kv, int head_dim, int value_head_dim, int group_size,
          int tile_rows, int tile_tokens, int num_warps, int num_stages>
struct PrefillTiles {
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
};

}  // namespace paged_trt
