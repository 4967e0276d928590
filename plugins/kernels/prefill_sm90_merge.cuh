// A split tile: each block of a cluster has attended a share of the keys, and all merge the results
// through each other's shared memory.
#pragma once

#include "attention_output.cuh"
#include "prefill_sm90_layout.cuh"
#include "prefill_sm90_softmax.cuh"

namespace paged_trt {

// Row of the output that a row of a query tile goes to.
template <class Layout>
__device__ __forceinline__ typename Layout::Type* output_row(const PrefillSm90Args& args,
                                                             unsigned base, uint32_t stage,
                                                             int row) {
  const int64_t token =
      Layout::template work_field<kFirstToken>(base, stage) + row / Layout::kGroup;
  const int head =
      Layout::template work_field<kKvHead>(base, stage) * Layout::kGroup + row % Layout::kGroup;
  return static_cast<typename Layout::Type*>(args.output) + token * args.output_token_stride +
         head * Layout::kValueDim;
}

template <class Layout>
struct TileMerger {
  using Element = typename Layout::Type;
  using Outputs = typename Layout::Outputs;

  const PrefillSm90Args& args;
  unsigned base;
  int warpgroup;
  uint32_t stage;  // of the query tile

  // This block's outputs, not normalised, and for each row the reference and the sum.
  __device__ __forceinline__ void store(const Outputs& outputs, const SoftmaxPair& softmax,
                                        bool has_outputs) const {
    sync_threads(kConsumerBarrier, 256);  // nobody reads keys and values any more
    const int thread = thread_here(), lane = thread & 31, warp_row = (thread / 32 & 3) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warpgroup * 64 + warp_row + lane / 4 + half * 8;
      const float sum = has_outputs ? sum_of_quad(softmax.sum[half]) : 0.f;
      if ((lane & 3) == 0) {
        store_pair(base + Layout::kStatsAt + row * 8, softmax.exponent(half), sum);
      }
      if (!has_outputs) continue;
      const unsigned at = base + Layout::kKeysAt + row * Layout::kPartialStride + (lane & 3) * 8;
#pragma unroll
      for (int column = 0; column < Layout::kValueDim / 8; ++column) {
        store_pair(at + column * 32, outputs[4 * column + 2 * half],
                   outputs[4 * column + 2 * half + 1]);
      }
    }
  }

  static __device__ __forceinline__ void store_pair(unsigned address, float low, float high) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(low), "f"(high) : "memory");
  }

  static __device__ __forceinline__ unsigned of_block(unsigned address, int32_t rank) {
    unsigned mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
  }

  static __device__ __forceinline__ float2 load_pair(unsigned address) {
    float2 pair;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(pair.x), "=f"(pair.y)
                 : "r"(address)
                 : "memory");
    return pair;
  }

  static __device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }

  // Each block of the cluster merges an equal share of the rows.
  __device__ __forceinline__ void merge() const {
    __syncwarp();
    sync_cluster();
    const int32_t size = Layout::cluster_size(),
                  kv_head = Layout::template work_field<kKvHead>(base, stage);
    const int thread = thread_here(), lane = thread & 31;
    const int warp = warpgroup * 4 + (thread / 32 & 3);
    for (int row = Layout::cluster_rank() * 8 + warp;
         row < Layout::template work_field<kNumRows>(base, stage); row += size * 8) {
      const int head = kv_head * Layout::kGroup + row % Layout::kGroup;
      float top = args.sinks[head] * kLog2E, sum = 0.f;
      for (int32_t rank = 0; rank < size; ++rank) {
        const float2 stats = load_pair(of_block(base + Layout::kStatsAt + row * 8, rank));
        if (stats.y != 0.f) top = fmaxf(top, stats.x);
      }
      float total[Layout::kValueDim / 32] = {};
      for (int32_t rank = 0; rank < size; ++rank) {
        const float2 stats = load_pair(of_block(base + Layout::kStatsAt + row * 8, rank));
        if (stats.y == 0.f) continue;  // saw nothing, and left no outputs
        const float weight = exp2_approx(stats.x - top);
        sum += weight * stats.y;
        const unsigned at =
            of_block(base + Layout::kKeysAt + row * Layout::kPartialStride + lane * 8, rank);
#pragma unroll
        for (int i = 0; i < Layout::kValueDim / 64; ++i) {
          const float2 pair = load_pair(at + i * 256);
          total[2 * i] += weight * pair.x;
          total[2 * i + 1] += weight * pair.y;
        }
      }
      if (top != minus_infinity()) sum += exp2_approx(args.sinks[head] * kLog2E - top);
      const float factor = normaliser(sum, 1.f);
      uint32_t* out =
          reinterpret_cast<uint32_t*>(output_row<Layout>(args, base, stage, row)) + lane;
#pragma unroll
      for (int i = 0; i < Layout::kValueDim / 64; ++i) {
        out[i * 32] = pack<Element>(total[2 * i] * factor, total[2 * i + 1] * factor);
      }
    }
    __syncwarp();
    sync_cluster();  // nobody leaves while its shared memory is read
  }
};

}  // namespace paged_trt
