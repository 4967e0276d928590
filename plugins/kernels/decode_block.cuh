// What a block of a decode kernel does for one (sequence, kv head, range of keys): every warp
// attends its steps, then the warps are merged once through shared memory.
#pragma once

#include "decode_warp.cuh"
#include "dependent_launch.cuh"
#include "merge_partials.cuh"

namespace paged_trt {

template <class Config>
struct DecodeShared {
  SharedQuery<Config> query;
  // 8 more floats per row spread the accumulators of a warp over the banks.
  alignas(16) float output[Config::kWarps][Config::kUsedHeads][Config::kValueDim + 8];
  float maximum[Config::kWarps][Config::kUsedHeads];
  float sum[Config::kWarps][Config::kUsedHeads];
  float sink[Config::kUsedHeads];
  float value_scale;
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
      for (int p = 0; p < Config::Values::kProducts; p += 2) {
        float* place = &shared.output[index][head][Config::Values::element_of(p, warp.row())];
        const float2 first = make_float2(warp.output[p][t][i], warp.output[p][t][2 + i]);
        if constexpr (Config::Values::kProducts % 2 != 0) {
          if (p + 1 == Config::Values::kProducts) {
            *reinterpret_cast<float2*>(place) = first;
            break;
          }
        }
        // An even product and the next one make four neighbouring elements.
        const auto& second = warp.output[p + 1 < Config::Values::kProducts ? p + 1 : p][t];
        *reinterpret_cast<float4*>(place) =
            make_float4(first.x, first.y, second[i], second[2 + i]);
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
  return merge_shares<Config::kWarps>(
      [&](int w) { return *reinterpret_cast<const float4*>(&shared.output[w][head][element]); },
      [&](int w) { return shared.maximum[w][head]; }, [&](int w) { return shared.sum[w][head]; });
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

template <class Config, class Args>
__device__ __forceinline__ PageCursor page_cursor(const Args& args, int32_t sequence,
                                                  int32_t first_page) {
  return PageCursor(args.page_table + static_cast<int64_t>(sequence) * args.table_width,
                    args.table_width, first_page);
}

// What a block reads besides pages. Its loads are in flight while the block finds its keys; none
// reads what an append writes, so they need not wait for it.
template <class Config>
struct BlockInputs {
  using Activation = typename Config::activation_type;

  HeldQuery<Config> held;
  QueryLoader<Config> loader;
  float key_scale, value_scale;
  float sink;  // of the thread's head, where it has one

  template <class Args>
  __device__ __forceinline__ void load(const Args& args, HeadRange heads, int32_t token,
                                       const float* sinks) {
    const Activation* query = query_heads<Activation, Config>(args, heads, token);
    const int lane = threadIdx.x & 31;
    if constexpr (Config::kShareQuery) {
      loader.load(query, heads.count, threadIdx.x >> 5, lane);
    } else {
      held.load(query, heads.count, lane >> 2, lane & 3);
    }
    key_scale = paged_trt::key_scale<Config>(args, heads.kv_head);
    value_scale = paged_trt::value_scale<Config>(args, heads.kv_head);
    sink = 0.f;
    if (sinks != nullptr && threadIdx.x < heads.count) sink = sinks[heads.first + threadIdx.x];
  }
};

template <class Args>
__device__ __forceinline__ PoolView pool_view(const Args& args, int32_t kv_head) {
  return {static_cast<const char*>(args.key_pool), static_cast<const char*>(args.value_pool),
          args.num_pages, args.num_kv_heads, kv_head};
}

// Attends the keys that `warp` has started with; afterwards shared memory holds the warps' parts,
// for merge_warps(). `start_next()` runs as soon as the warp has no more use for its registers.
template <class Config, class Args, class StartNext>
__device__ __forceinline__ void attend_started(DecodeShared<Config>& shared, const Args& args,
                                               HeadRange heads, int32_t token, int32_t position,
                                               DecodeWarp<Config>& warp,
                                               BlockInputs<Config>& inputs,
                                               StartNext start_next) {
  using Activation = typename Config::activation_type;
  // For after the keys, so that they take no registers until then.
  if (threadIdx.x < Config::kUsedHeads) shared.sink[threadIdx.x] = inputs.sink;
  if (threadIdx.x == 0) shared.value_scale = inputs.value_scale;
  const ScoreScale<Config::kHasSoftcap> scale(args.softmax_scale, inputs.key_scale, args.softcap);
  if constexpr (Config::kShareQuery) {
    const float* angles = args.rope_cos_sin + static_cast<int64_t>(position) * args.rotary_dim;
    inputs.loader.share(shared.query, query_heads<Activation, Config>(args, heads, token),
                        heads.count, threadIdx.x >> 5, threadIdx.x & 31, angles, args.rope,
                        args.rotary_dim);
    __syncthreads();
    warp.take_query(shared.query, scale.before);
  } else {
    inputs.held.convert(warp.column());
    warp.take_query(inputs.held, scale.before);
  }
  warp.run(shared.query, scale);

  start_next();
  share_warp(shared, warp);
  __syncthreads();
}

// Attends `keys`. What the block reads of the pool must have been written: the caller has waited
// for the kernel before.
template <class Config, class Args>
__device__ __forceinline__ void attend_keys(DecodeShared<Config>& shared, const Args& args,
                                            HeadRange heads, int32_t token, int32_t position,
                                            KeyRange keys, PageCursor pages,
                                            BlockInputs<Config>& inputs) {
  DecodeWarp<Config> warp;
  warp.start(pool_view(args, heads.kv_head), pages, keys);
  attend_started(shared, args, heads, token, position, warp, inputs, [] {});
}

// `store(head, element, partial)` receives every vector of the block's heads; `head` counts from
// heads.first.
template <class Config, class Store>
__device__ __forceinline__ void for_each_vector(const DecodeShared<Config>& shared,
                                                HeadRange heads, Store store) {
  for (int i = threadIdx.x; i < heads.count * Config::kValueVectors; i += Config::kThreads) {
    const int head = i / Config::kValueVectors, element = i % Config::kValueVectors * 4;
    store(head, element, merge_warps(shared, head, element));
  }
}

// Final vector of a head: sink, normalisation, rounding. `scale` is the values', where they have not
// been multiplied by it.
template <class Config, class Args>
__device__ __forceinline__ void store_final(const DecodeShared<Config>& shared, const Args& args,
                                            HeadRange heads, int32_t token, int head, int element,
                                            const PartialVector& total, float scale) {
  const SinkFactors sink = add_sink(total.maximum, total.sum, shared.sink[head]);
  store_output<typename Config::activation_type>(
      args.output,
      token * args.output_token_stride + (heads.first + head) * Config::kValueDim + element,
      scaled(total.values, sink.factor * normaliser(sink.sum, scale)));
}

template <class Config, class Args>
__device__ __forceinline__ void store_zeros(const Args& args, HeadRange heads, int32_t token) {
  const int64_t first = token * args.output_token_stride + heads.first * Config::kValueDim;
  for (int i = threadIdx.x * 4; i < heads.count * Config::kValueDim; i += Config::kThreads * 4) {
    store_output<typename Config::activation_type>(args.output, first + i,
                                                   make_float4(0.f, 0.f, 0.f, 0.f));
  }
}

// A partial's vector: normalised, with its base-2 log-sum-exp once per head.
template <class Config>
__device__ __forceinline__ void store_partial(float* values, float* lse, int element,
                                              const PartialVector& total, float scale) {
  __stcg(reinterpret_cast<float4*>(values + element),
         scaled(total.values, normaliser(total.sum, scale)));
  if (element == 0) __stcg(lse, total.maximum + log2_approx(total.sum));
}

}  // namespace paged_trt
