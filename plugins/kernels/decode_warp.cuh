// One warp's share of a decode: scores, softmax and weighted values of every kWarps-th step.
//
//   S^T[16 tokens, 8 heads] = K[16, D] Q^T       P^T: transposed 8 x 8 by 8 x 8
//   O^T[Dv, 8 heads] += V^T[Dv, 16 tokens] P^T
//
// The next keys are loaded right behind QK, the next values behind PV: registers are the only
// buffer, and they are never empty.
#pragma once

#include "decode_config.cuh"
#include "decode_query.cuh"
#include "decode_scores.cuh"
#include "page_cursor.cuh"
#include "partitions.cuh"

namespace paged_trt {

// Where the tiles of one kv head are.
struct PoolView {
  const char* keys;
  const char* values;
  int32_t num_pages, num_kv_heads, kv_head;
};

template <class Config>
class DecodeWarp {
 public:
  static constexpr int kHeadTiles = Config::kHeadTiles;
  using Keys = typename Config::Keys;
  using Values = typename Config::Values;
  using Mma = typename Config::mma_type;

  // Accumulators; head tile * 8 + 2 * column + {0, 1} in the last index of maximum and sum.
  float output[Values::kProducts][kHeadTiles][4];
  float maximum[kHeadTiles][2];
  float sum[kHeadTiles][2];

  __device__ __forceinline__ DecodeWarp()
      : row_((threadIdx.x & 31) >> 2), column_(threadIdx.x & 3) {}

  // Loads of the first steps of these keys. It touches no result: those of the keys before may
  // still be read.
  __device__ __forceinline__ void start(PoolView pool, PageCursor pages, KeyRange keys) {
    pages_ = pages, keys_ = keys, num_pages_ = pool.num_pages;
    const uint32_t tiles = pool.num_kv_heads * kTokensPerPage;
    const uint32_t tile = pool.kv_head * kTokensPerPage;
    key_page_bytes_ = tiles * Keys::kRowBytes, value_page_bytes_ = tiles * Values::kRowBytes;
    key_base_ = pool.keys + tile * Keys::kRowBytes + Keys::lane_offset(row_, column_);
    value_base_ = pool.values + tile * Values::kRowBytes + Values::lane_offset(row_, column_);
    token_ = (keys.first & -Config::kTokens) + (threadIdx.x >> 5) * Config::kTokens;
    next_ = token_;
#pragma unroll
    for (int i = 0; i < Config::kDepth; i++) {
      Step& step = steps_[i];
      step.end = 0;
      if (next_ < keys_.end) {
        const Place place = locate(next_);
        load_keys(step, place);
        load_values(step, place);
        step.end = place.end;
      }
      next_ += kStride;
    }
  }

  // The query of a warp whose block shares none.
  __device__ __forceinline__ void take_query(const HeldQuery<Config>& query, float scale) {
#pragma unroll
    for (int t = 0; t < kHeadTiles; t++) {
#pragma unroll
      for (int i = 0; i < 2; i++) head_scale_[t][i] = scale * query.inverse_scale[t][i];
#pragma unroll
      for (int s = 0; s < Keys::kSteps; s++) query_[t][s] = query.operand[t][s];
    }
  }

  // The query that the block shares.
  __device__ __forceinline__ void take_query(const SharedQuery<Config>& query, float scale) {
#pragma unroll
    for (int t = 0; t < kHeadTiles; t++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        head_scale_[t][i] = scale * query.inverse_scale[t * 8 + 2 * column_ + i];
      }
      if constexpr (Config::kHoldQuery) {
#pragma unroll
        for (int s = 0; s < Keys::kSteps; s++) query_[t][s] = query_operand(query, t, s);
      }
    }
  }

  __device__ __forceinline__ void run(const SharedQuery<Config>& query,
                                      const ScoreScale<Config::kHasSoftcap>& scale) {
    clear();
    while (token_ < keys_.end) {
#pragma unroll
      for (int i = 0; i < Config::kDepth; i++) {
        if (i == 0 || token_ < keys_.end) advance(steps_[i], query, scale);
      }
    }
  }

  __device__ __forceinline__ int row() const { return row_; }
  __device__ __forceinline__ int column() const { return column_; }

 private:
  static constexpr int kStride = Config::kWarps * Config::kTokens;

  struct Step {
    Keys keys;
    Values values;
    int32_t end;  // rows of the step that exist; 0 where it has no page
  };
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < kHeadTiles; t++) {
#pragma unroll
      for (int i = 0; i < 2; i++) maximum[t][i] = kNoScore, sum[t][i] = 0.f;
#pragma unroll
      for (int p = 0; p < Values::kProducts; p++) {
#pragma unroll
        for (int i = 0; i < 4; i++) output[p][t][i] = 0.f;
      }
    }
  }

  struct Place {
    uint32_t page, slot;
    int32_t begin, end;
  };

  __device__ __forceinline__ Place locate(int32_t token) {
    const int32_t page = pages_.at(token / kTokensPerPage);
    const bool exists = is_page(page, num_pages_);
    return {exists ? static_cast<uint32_t>(page) : 0u,
            static_cast<uint32_t>(token) & (kTokensPerPage - 1),
            Config::kHasWindow ? keys_.first - token : 0,
            exists ? min(Config::kTokens, keys_.end - token) : 0};
  }

  __device__ __forceinline__ void load_keys(Step& step, Place place) {
    const uint64_t offset = static_cast<uint64_t>(place.page) * key_page_bytes_;
    step.keys.load(key_base_ + (offset + place.slot * Keys::kRowBytes), row_, column_,
                   place.begin, place.end);
  }

  __device__ __forceinline__ void load_values(Step& step, Place place) {
    const uint64_t offset = static_cast<uint64_t>(place.page) * value_page_bytes_;
    step.values.load(value_base_ + (offset + place.slot * Values::kRowBytes), row_, column_,
                     place.begin, place.end);
  }

  __device__ __forceinline__ uint2 query_operand(const SharedQuery<Config>& query, int tile,
                                                 int step) const {
    if constexpr (Config::kShareQuery) {
      const uint16_t* elements = query.elements[tile * 8 + row_];
      return *reinterpret_cast<const uint2*>(elements + Keys::element_of(step, column_));
    } else {
      return query_[tile][step];
    }
  }

  __device__ __forceinline__ void advance(Step& step, const SharedQuery<Config>& query,
                                          const ScoreScale<Config::kHasSoftcap>& scale) {
    Place place = {0, 0, 0, 0};
    const bool has_next = next_ < keys_.end;
    if (has_next) place = locate(next_);
    float scores[Config::kTiles][kHeadTiles][4];
    multiply_keys(scores, step.keys, query);
    if (has_next) load_keys(step, place);
    finish_scores<Config>(scores, scale, head_scale_, row_,
                          Config::kHasWindow ? keys_.first - token_ : 0, step.end);
    raise_maximum(scores);
    multiply_values(scores, step.values);
    if (has_next) load_values(step, place);
    step.end = place.end;
    token_ += kStride, next_ += kStride;
  }

  __device__ __forceinline__ void multiply_keys(float (&scores)[Config::kTiles][kHeadTiles][4],
                                                const Keys& keys,
                                                const SharedQuery<Config>& query) const {
    // A single chain of dependent products would wait for each: two, where there is one tile.
    constexpr int kChains = Config::kTiles * kHeadTiles == 1 ? 2 : 1;
    float sums[kChains][Config::kTiles][kHeadTiles][4] = {};
#pragma unroll
    for (int s = 0; s < Keys::kSteps; s++) {
      uint2 b[kHeadTiles];
#pragma unroll
      for (int t = 0; t < kHeadTiles; t++) {
        if constexpr (Config::kHoldQuery) {
          b[t] = query_[t][s];
        } else {
          b[t] = query_operand(query, t, s);
        }
      }
#pragma unroll
      for (int u = 0; u < Config::kTiles; u++) {
        uint32_t a[4];
        keys.operand(a, u, s);
#pragma unroll
        for (int t = 0; t < kHeadTiles; t++) {
          const uint32_t operand[2] = {b[t].x, b[t].y};
          mma_m16n8k16<Mma>(sums[s % kChains][u][t], a, operand);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < Config::kTiles; u++) {
#pragma unroll
      for (int t = 0; t < kHeadTiles; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          scores[u][t][i] = sums[0][u][t][i];
          if constexpr (kChains == 2) scores[u][t][i] += sums[kChains - 1][u][t][i];
        }
      }
    }
  }

  // The kept maximum moves only when a score passes it by 2^8: weights then stay within fp16, and
  // most steps neither reduce across lanes nor rescale.
  __device__ __forceinline__ void raise_maximum(
      const float (&scores)[Config::kTiles][kHeadTiles][4]) {
    float highest[kHeadTiles][2];
    bool must_rise = false;
#pragma unroll
    for (int t = 0; t < kHeadTiles; t++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        highest[t][i] = kNoScore;
#pragma unroll
        for (int u = 0; u < Config::kTiles; u++) {
          highest[t][i] = fmaxf(highest[t][i], fmaxf(scores[u][t][i], scores[u][t][2 + i]));
        }
        must_rise |= highest[t][i] > maximum[t][i] + 8.f;
      }
    }
    if (!__any_sync(kAllLanes, must_rise)) return;
#pragma unroll
    for (int t = 0; t < kHeadTiles; t++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float top = highest[t][i];
#pragma unroll
        for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, d));
        top = fmaxf(top, maximum[t][i]);
        const float factor = exp2_approx(maximum[t][i] - top);
        maximum[t][i] = top, sum[t][i] *= factor;
#pragma unroll
        for (int p = 0; p < Values::kProducts; p++) {
          output[p][t][i] *= factor, output[p][t][2 + i] *= factor;
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_values(
      const float (&scores)[Config::kTiles][kHeadTiles][4], const Values& values) {
#pragma unroll
    for (int u = 0; u < Config::kTiles; u++) {
      uint32_t b[kHeadTiles][2];
#pragma unroll
      for (int t = 0; t < kHeadTiles; t++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float low = exp2_approx(scores[u][t][2 * i] - maximum[t][0]);
          const float high = exp2_approx(scores[u][t][2 * i + 1] - maximum[t][1]);
          sum[t][0] += low, sum[t][1] += high;
          b[t][i] = transpose_matrix(pack<Mma>(low, high));
        }
      }
#pragma unroll
      for (int p = 0; p < Values::kProducts; p++) {
        uint32_t a[4];
        values.operand(a, u, p);
#pragma unroll
        for (int t = 0; t < kHeadTiles; t++) mma_m16n8k16<Mma>(output[p][t], a, b[t]);
      }
    }
  }

  PageCursor pages_;
  KeyRange keys_;
  const char* key_base_;  // of page 0, with the lane's offset
  const char* value_base_;
  uint32_t key_page_bytes_, value_page_bytes_;
  int32_t num_pages_;
  int row_, column_;
  int32_t token_, next_;  // first token of the step in work, and of the next one to load
  Step steps_[Config::kDepth];
  uint2 query_[kHeadTiles][Config::kHoldQuery ? Keys::kSteps : 1];
  float head_scale_[kHeadTiles][2];
};

}  // namespace paged_trt
