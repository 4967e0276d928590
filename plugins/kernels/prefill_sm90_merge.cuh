// A split tile: each block of a cluster has attended a share of the keys, and all merge the results
// through each other's shared memory.
#pragma once

#include "prefill_sm90_output.cuh"
#include "prefill_sm90_softmax.cuh"

namespace paged_trt {

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
    sync_threads(kConsumerBarrier, kConsumerThreads);  // nobody reads keys and values any more
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
    const QueryWork work = Layout::read_work(base, stage);
    const int32_t size = Layout::cluster_size();
    const int warp = warpgroup * 4 + (thread_here() / 32 & 3);
    for (int row = Layout::cluster_rank() * 8 + warp; row < work.num_rows; row += size * 8) {
      merge_row(row, work, size);
    }
    __syncwarp();
    sync_cluster();  // nobody leaves while its shared memory is read
  }

  // One warp; each lane knows the statistics of one block's share and holds some columns.
  __device__ __forceinline__ void merge_row(int row, const QueryWork& work, int32_t size) const {
    const int lane = thread_here() & 31;
    float2 stats = make_float2(0.f, 0.f);
    if (lane < size) stats = load_pair(of_block(base + Layout::kStatsAt + row * 8, lane));
    const bool has_seen = stats.y != 0.f;  // otherwise it may have left no outputs
    const int head = work.kv_head * Layout::kGroup + row % Layout::kGroup;
    const float sink = args.sinks[head] * kLog2E;
    const float top = fmaxf(maximum_of_shares(has_seen ? stats.x : kNoScore), sink);
    const float weight = has_seen ? exp2_approx(stats.x - top) : 0.f;
    const float sum = sum_of_shares(has_seen ? weight * stats.y : 0.f) + exp2_approx(sink - top);
    constexpr int kPairs = Layout::kValueDim / 64;  // of each lane
    float total[2 * kPairs] = {};
    const unsigned at = base + Layout::kKeysAt + row * Layout::kPartialStride + lane * 8;
#pragma unroll 4
    for (int32_t rank = 0; rank < size; ++rank) {
      const float of_rank = __shfl_sync(kAllLanes, weight, rank);
      const unsigned place = of_block(at, rank);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 pair = load_pair(place + i * 256);
        // What a block left unwritten can be NaN.
        total[2 * i] += of_rank == 0.f ? 0.f : of_rank * pair.x;
        total[2 * i + 1] += of_rank == 0.f ? 0.f : of_rank * pair.y;
      }
    }
    const float factor = normaliser(sum, Layout::value_scale(args, work.kv_head));
    Element* target = output_row<Layout>(args, work.first_token, work.kv_head, row);
    uint32_t* out = reinterpret_cast<uint32_t*>(target) + lane;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      out[i * 32] = pack<Element>(total[2 * i] * factor, total[2 * i + 1] * factor);
    }
  }

  // Over the lanes of up to 8 shares, in every lane.
  static __device__ __forceinline__ float maximum_of_shares(float value) {
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
      value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    return __shfl_sync(kAllLanes, value, 0);
  }

  static __device__ __forceinline__ float sum_of_shares(float value) {
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
      value += __shfl_xor_sync(kAllLanes, value, distance);
    }
    return __shfl_sync(kAllLanes, value, 0);
  }
};

}  // namespace paged_trt
