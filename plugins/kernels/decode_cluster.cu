// Decode, cluster: the blocks of a cluster share the keys of a (sequence, kv head) evenly, and
// merge through each other's shared memory: no workspace, no counter, no second launch.
//
// Grid: (cluster * blocks of heads per kv head, kv heads, sequences); clusters of 2, 4 or 8 blocks
// along x. sm_90 and later.
#include "cluster.cuh"
#include "decode_block.cuh"

namespace paged_trt {

constexpr int kMostClusterBlocks = 8;

// What the blocks of a cluster send to this one, which finishes every `blocks`-th vector.
template <class Config>
struct ClusterShared {
  static constexpr int kVectors = Config::kUsedHeads * Config::kValueVectors;
  // Of a cluster of any size: each block finishes as many vectors as another, or one less.
  static constexpr int kReceived =
      (kVectors + kMostClusterBlocks - 1) / kMostClusterBlocks * kMostClusterBlocks;
  DecodeShared<Config> block;
  alignas(16) float4 values[kReceived];  // [blocks][ClusterPlace::most]
  float2 maximum_and_sum[kMostClusterBlocks][Config::kUsedHeads];
  alignas(8) uint64_t barrier;
};

#if __CUDA_ARCH__ >= 900

// This block's place in its cluster, and how many vectors it finishes.
struct ClusterPlace {
  int32_t blocks, shift, rank, vectors, most;  // blocks: 1 << shift; most: vectors of any block

  __device__ __forceinline__ ClusterPlace(int32_t total)
      : blocks(cluster_blocks()), shift(31 - __clz(blocks)), rank(blockIdx.x & (blocks - 1)) {
    most = (total + blocks - 1) >> shift;
    vectors = (total - rank + blocks - 1) >> shift;
  }
};

template <class Config>
__device__ __forceinline__ void send_vectors(ClusterShared<Config>& shared, HeadRange heads,
                                             const ClusterPlace& place) {
  for_each_vector(shared.block, heads, [&](int head, int element, const PartialVector& total) {
    const int vector = head * Config::kValueVectors + element / 4;
    const int target = vector & (place.blocks - 1), index = vector >> place.shift;
    send(&shared.values[place.rank * place.most + index], &shared.barrier, target, total.values);
    for (int block = element / 4; block < place.blocks; block += Config::kValueVectors) {
      send(&shared.maximum_and_sum[place.rank][head], &shared.barrier, block,
           make_float2(total.maximum, total.sum));
    }
  });
}

template <class Config>
__device__ __forceinline__ void merge_vectors(const ClusterShared<Config>& shared,
                                              const DecodeDirectArgs& args, HeadRange heads,
                                              int32_t token, const ClusterPlace& place,
                                              float scale) {
  for (int i = threadIdx.x; i < place.vectors; i += Config::kThreads) {
    const int vector = (i << place.shift) + place.rank;
    const int head = vector / Config::kValueVectors, element = vector % Config::kValueVectors * 4;
    const PartialVector total = merge_shares<kMostClusterBlocks>(
        [&](int s) {
          return s < place.blocks ? shared.values[s * place.most + i]
                                  : make_float4(0.f, 0.f, 0.f, 0.f);
        },
        [&](int s) { return s < place.blocks ? shared.maximum_and_sum[s][head].x : kNoScore; },
        [&](int s) { return s < place.blocks ? shared.maximum_and_sum[s][head].y : 0.f; });
    store_final(shared.block, args, heads, token, head, element, total, scale);
  }
}

template <class Config>
__device__ __forceinline__ void decode_in_cluster(ClusterShared<Config>& shared,
                                                  const DecodeDirectArgs& args) {
  const int32_t head_block = blockIdx.x >> (31 - __clz(cluster_blocks()));
  const HeadRange heads = heads_of_block<Config>(blockIdx.y, head_block);
  const ClusterPlace place(heads.count * Config::kValueVectors);
  if (threadIdx.x == 0) {
    expect_bytes(&shared.barrier, place.blocks * (place.vectors * 16 + heads.count * 8));
  }
  __syncwarp();
  arrive_at_cluster();

  const int32_t sequence = blockIdx.z, token = sequence;  // T == N, padding behind
  const int32_t position = args.past_lens[sequence];
  const bool is_padding = args.query_start_offsets[sequence + 1] <= token;
  const PageCursor pages = page_cursor<Config>(args, sequence, 0);
  BlockInputs<Config> inputs;
  inputs.load(args, heads, token, args.sinks);
  wait_for_previous_kernel();
  if (is_padding) {
    if (place.rank == 0) store_zeros<Config>(args, heads, token);
    return wait_for_cluster();
  }
  const EvenShares<Config::kTokens> shares(visible_keys(position, args.window, args.table_width),
                                           place.blocks);
  attend_keys(shared.block, args, heads, token, position, shares.share(place.rank), pages, inputs);
  wait_for_cluster();
  send_vectors(shared, heads, place);
  wait_for_bytes(&shared.barrier);
  merge_vectors(shared, args, heads, token, place, shared.block.value_scale);
}

#endif

template <class Activation, class Kv, int kHeadDim, int kValueDim, int kGroup, int kWarps,
          int kBlocks, int kHeadTiles, int kFeatures>
__global__ void __launch_bounds__(kWarps * 32, kBlocks)
    decode_cluster(const __grid_constant__ DecodeDirectArgs args) {
#if __CUDA_ARCH__ >= 900
  using Config = DecodeConfig<Activation, Kv, kHeadDim, kValueDim, kGroup, kWarps, kBlocks,
                              kHeadTiles, kFeatures, false>;
  __shared__ ClusterShared<Config> shared;
  allow_next_kernel();
  decode_in_cluster<Config>(shared, args);
#endif
}

}  // namespace paged_trt
