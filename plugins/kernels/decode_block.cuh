// What a block of a decode kernel does for one (sequence, kv head, range of keys): every warp
// attends its steps, then the warps are merged once through shared memory.
#pragma once

#include "decode_warp.cuh"
#include "dependent_launch.cuh"

namespace paged_trt {

template <class Config>
struct DecodeShared {
  SharedQuery<Config> query;
  // 8 more floats per row spread the accumulators of a warp over the banks.
  alignas(16) float output[Config::kWarps][Config::kUsedHeads][Config::kValueDim + 8];
  float maximum[Config::kWarps][Config::kUsedHeads];
  float sum[Config::kWarps][Config::kUsedHeads];
};

// Query heads of one block.
struct HeadRange {
  int32_t kv_head;
  int32_t first;  // query head
  int32_t count;
};

template <class Config>
__device__ __forceinline__ HeadRange heads_of_block(int32_t kv_head, int32_t head_block) {
  const int32_t first = head_block * Config::kHeads;
  return {kv_head, kv_head * Config::kGroup + first, min(Config::kHeads, Config::kGroup - first)};
}

// Four value elements of one head, weighted but not normalised, in base 2.
struct PartialVector {
  float4 values;
  float maximum, sum;
};

__device__ __forceinline__ void accumulate(PartialVector& total, float factor, float4 values) {
  total.values.x += factor * values.x, total.values.y += factor * values.y;
  total.values.z += factor * values.z, total.values.w += factor * values.w;
}

template <class Config>
__device__ __forceinline__ void share_warp(DecodeShared<Config>& shared, DecodeWarp<Config>& warp) {
  const int index = threadIdx.x >> 5;
#pragma unroll
  for (int t = 0; t < Config::kHeadTiles; t++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum = warp.sum[t][i];
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
      const int head = t * 8 + 2 * warp.column() + i;
      if (head >= Config::kUsedHeads) continue;
#pragma unroll
      for (int p = 0; p < Config::Values::kProducts; p++) {
        const int element = Config::Values::element_of(p, warp.row());
        *reinterpret_cast<float2*>(&shared.output[index][head][element]) =
            make_float2(warp.output[p][t][i], warp.output[p][t][2 + i]);
      }
      if (warp.row() == 0) {
        shared.maximum[index][head] = warp.maximum[t][i];
        shared.sum[index][head] = sum;
      }
    }
  }
}

template <class Config>
__device__ __forceinline__ PartialVector merge_warps(const DecodeShared<Config>& shared, int head,
                                                     int element) {
  PartialVector total = {make_float4(0.f, 0.f, 0.f, 0.f), kNoScore, 0.f};
#pragma unroll
  for (int w = 0; w < Config::kWarps; w++) total.maximum = fmaxf(total.maximum, shared.maximum[w][head]);
#pragma unroll
  for (int w = 0; w < Config::kWarps; w++) {
    const float factor = exp2_approx(shared.maximum[w][head] - total.maximum);
    total.sum += factor * shared.sum[w][head];
    accumulate(total, factor, *reinterpret_cast<const float4*>(&shared.output[w][head][element]));
  }
  return total;
}

template <class Activation, class Config, class Args>
__device__ __forceinline__ const Activation* query_heads(const Args& args, HeadRange heads,
                                                         int32_t token) {
  return static_cast<const Activation*>(args.query) + token * args.query_token_stride +
         heads.first * Config::kHeadDim;
}

template <class Config, class Args>
__device__ __forceinline__ float key_scale(const Args& args, int32_t kv_head) {
  return Config::kQuantised ? args.kv_scales[kv_head] : 1.f;
}

template <class Config, class Args>
__device__ __forceinline__ float value_scale(const Args& args, int32_t kv_head) {
  return Config::kQuantised ? args.kv_scales[args.num_kv_heads + kv_head] : 1.f;
}

// `store(head, element, partial)` receives every vector of the block's heads; `head` counts from
// heads.first. The caller has waited for nothing yet: table and lengths are no kernel's output.
template <class Config, class Args, class Store>
__device__ __forceinline__ void attend_block(DecodeShared<Config>& shared, const Args& args,
                                             HeadRange heads, int32_t token, int32_t position,
                                             KeyRange keys, PageCursor pages,
                                             const QueryLoader<Config>& loader, Store store) {
  using Activation = typename Config::activation_type;
  const int warp_index = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const PoolView pool = {static_cast<const char*>(args.key_pool),
                         static_cast<const char*>(args.value_pool), args.num_pages,
                         args.num_kv_heads, heads.kv_head};
  DecodeWarp<Config> warp(pool, pages, keys);

  const float* angles = args.rope_cos_sin + static_cast<int64_t>(position) * args.rotary_dim;
  loader.share(shared.query, query_heads<Activation, Config>(args, heads, token), heads.count,
               warp_index, lane, angles, args.rope, args.rotary_dim);
  __syncthreads();
  warp.run(shared.query, ScoreScale(args.softmax_scale, key_scale<Config>(args, heads.kv_head),
                                    args.softcap));

  share_warp(shared, warp);
  __syncthreads();
  constexpr int kVectors = Config::kValueDim / 4;
  for (int i = threadIdx.x; i < heads.count * kVectors; i += Config::kThreads) {
    const int head = i / kVectors, element = i % kVectors * 4;
    store(head, element, merge_warps(shared, head, element));
  }
}

}  // namespace paged_trt
