// What the warps of a Hopper prefill block share: tile sizes, shared memory, barriers, and the
// query tile that is handed on.
#pragma once

#include "page_table.cuh"
#include "prefill_sm90_query.cuh"

namespace paged_trt {

constexpr int kPrefillThreads = 384;
constexpr int kConsumerThreads = 256;  // two warpgroups
constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;  // 168 each at the start
constexpr int kWarpgroupBarrier = 1;                              // and 2; 3 is kLoaderBarrier
constexpr int kConsumerBarrier = 4;

// A query tile, as the blocks' warps hand it on.
struct QueryWork {
  int32_t first_token;  // token row
  int32_t num_rows;
  int32_t position;     // of the first token
  int32_t kv_head;      // -1: no tile is left
  int32_t last, first;  // key tiles
  int32_t sequence;
  int32_t flags;
};
constexpr int kFirstToken = 0, kNumRows = 1, kPosition = 2, kKvHead = 3;
constexpr int kLast = 4, kFirst = 5, kSequence = 6, kFlags = 7;
constexpr int32_t kHasInvalidPages = 1;
constexpr int32_t kHasDeadRows = 2;  // the last key tile reaches beyond the sequence

// Place in a ring of buffers.
template <int count>
struct RingPlace {
  uint32_t stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == count) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class Element, int head_dim, int value_head_dim, int group_size, bool has_window,
          bool has_softcap, bool is_split, bool is_scaled = false>
struct PrefillLayout {
  using Type = Element;
  static constexpr int kHeadDim = head_dim;
  static constexpr int kValueDim = value_head_dim;
  static constexpr int kGroup = group_size;
  static constexpr bool kHasWindow = has_window;
  static constexpr bool kHasSoftcap = has_softcap;
  static constexpr bool kIsSplit = is_split;
  static constexpr bool kIsScaled = is_scaled;  // keys and values have a scale for each key head
  static_assert(head_dim % 64 == 0 && value_head_dim % 64 == 0, "whole boxes of 64 columns");
  static_assert(value_head_dim <= head_dim, "outputs go through the query's buffer");
  static_assert(group_size <= kQueryRows, "a tile holds one token at least");
  // Accumulators of wide heads leave registers for the scores of 64 keys only.
  static constexpr bool kIsWide = head_dim > 128;
  static constexpr int kKeys = kIsWide ? 64 : 128;
  // Weights without a maximum need the scores kept until they are known to be good: too many
  // registers beside wide accumulators, and little won beside tanh.
  static constexpr bool kTries = !kIsWide && !has_softcap;
  static constexpr int kTokens = kQueryRows / group_size;
  static constexpr int kSteps = kKeys / 16;
  static constexpr int kBox = kKeys * 128;
  static constexpr int kQueryBytes = kQueryRows * head_dim * 2;
  static constexpr int kKeyBytes = kKeys * head_dim * 2;
  static constexpr int kValueBytes = kKeys * value_head_dim * 2;
  // Beside wide heads there is room for the rows of one query tile. A split block has only one, but
  // a second place all the same, for the word that none is left: the warps that wait for it end
  // before the cluster's barrier, which waits for every warp that has not.
  static constexpr int kQueryBuffers = kIsWide ? 1 : 2;
  static constexpr int kQueryStages = is_split ? 2 : kQueryBuffers;
  static constexpr int kKeyStages = 2;
  static constexpr int kValueStages = 3;
  static constexpr int kKeysAt = kQueryBuffers * kQueryBytes;
  static constexpr int kValuesAt = kKeysAt + kKeyStages * kKeyBytes;
  static constexpr int kNumBarriers = 6 + 2 * kKeyStages + 2 * kValueStages;
  static constexpr int kBarriersAt = kValuesAt + kValueStages * kValueBytes;
  static constexpr int kWorkAt = kBarriersAt + kNumBarriers * 8;
  static constexpr int kSharedBytes = kWorkAt + 64 + 1024;  // the base is rounded up to 1,024
  // Partial outputs of a split tile replace keys and values; 8 floats of padding spread the banks.
  static constexpr int kPartialStride = (value_head_dim + 8) * 4;
  static constexpr int kStatsAt = kKeysAt + kQueryRows * kPartialStride;
  static_assert(!is_split || kStatsAt + kQueryRows * 8 <= kBarriersAt, "partial outputs fit");

  using Scores = float[kKeys / 2];
  using Outputs = float[value_head_dim / 2];
  using Weights = uint32_t[kSteps][4];

  // Barriers, 8 bytes each.
  static __device__ __forceinline__ unsigned barrier(unsigned base, int index, uint32_t stage) {
    return base + kBarriersAt + (index + stage) * 8;
  }
  static __device__ __forceinline__ unsigned work_ready(unsigned base, uint32_t stage) {
    return barrier(base, 0, stage);
  }
  static __device__ __forceinline__ unsigned query_ready(unsigned base, uint32_t stage) {
    return barrier(base, 2, stage);
  }
  static __device__ __forceinline__ unsigned query_free(unsigned base, uint32_t stage) {
    return barrier(base, 4, stage);
  }
  static __device__ __forceinline__ unsigned key_ready(unsigned base, uint32_t stage) {
    return barrier(base, 6, stage);
  }
  static __device__ __forceinline__ unsigned key_free(unsigned base, uint32_t stage) {
    return barrier(base, 6 + kKeyStages, stage);
  }
  static __device__ __forceinline__ unsigned value_ready(unsigned base, uint32_t stage) {
    return barrier(base, 6 + 2 * kKeyStages, stage);
  }
  static __device__ __forceinline__ unsigned value_free(unsigned base, uint32_t stage) {
    return barrier(base, 6 + 2 * kKeyStages + kValueStages, stage);
  }

  static __device__ __forceinline__ void init_barriers(unsigned base) {
    for (int stage = 0; stage < kQueryStages; ++stage) {
      init_barrier(work_ready(base, stage), 1);
      init_barrier(query_ready(base, stage), kLoaderThreads);
      init_barrier(query_free(base, stage), kConsumerThreads);
    }
    for (int stage = 0; stage < kKeyStages; ++stage) {
      init_barrier(key_ready(base, stage), 1);
      init_barrier(key_free(base, stage), 8);
    }
    for (int stage = 0; stage < kValueStages; ++stage) {
      init_barrier(value_ready(base, stage), 1);
      init_barrier(value_free(base, stage), 8);
    }
    fence_barrier_init();
  }

  // Read again wherever it is needed: no register holds it during the products. For those who have
  // waited for the query: `flags` are complete then, and not before.
  static __device__ __forceinline__ QueryWork read_work(unsigned base, uint32_t stage) {
    QueryWork work;
    const unsigned address = base + kWorkAt + stage * 32;
    read_four(address, work.first_token, work.num_rows, work.position, work.kv_head);
    read_four(address + 16, work.last, work.first, work.sequence, work.flags);
    return work;
  }

  // For those who have only waited for the tile: without `flags`.
  static __device__ __forceinline__ QueryWork read_work_early(unsigned base, uint32_t stage) {
    QueryWork work;
    const unsigned address = base + kWorkAt + stage * 32;
    read_four(address, work.first_token, work.num_rows, work.position, work.kv_head);
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
                 : "=r"(work.last), "=r"(work.first)
                 : "r"(address + 16)
                 : "memory");
    work.sequence = work_field<kSequence>(base, stage);
    return work;
  }

  static __device__ __forceinline__ void read_four(unsigned address, int32_t& first,
                                                   int32_t& second, int32_t& third,
                                                   int32_t& fourth) {
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(first), "=r"(second), "=r"(third), "=r"(fourth)
                 : "r"(address)
                 : "memory");
  }

  // One field of it, by its place in QueryWork.
  template <int place>
  static __device__ __forceinline__ int32_t work_field(unsigned base, uint32_t stage) {
    int32_t value;
    asm volatile("ld.shared.s32 %0, [%1];"
                 : "=r"(value)
                 : "r"(base + kWorkAt + stage * 32 + place * 4)
                 : "memory");
    return value;
  }

  template <int place>
  static __device__ __forceinline__ void write_field(unsigned base, uint32_t stage, int32_t value) {
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(base + kWorkAt + stage * 32 + place * 4),
                 "r"(value)
                 : "memory");
  }

  static __device__ __forceinline__ void write_work(unsigned base, uint32_t stage,
                                                    const QueryWork& work) {
    const unsigned address = base + kWorkAt + stage * 32;
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(work.first_token),
                 "r"(work.num_rows), "r"(work.position), "r"(work.kv_head)
                 : "memory");
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address + 16), "r"(work.last),
                 "r"(work.first), "r"(work.sequence), "r"(work.flags)
                 : "memory");
  }

  static __device__ __forceinline__ float key_scale(const PrefillSm90Args& args, int32_t kv_head) {
    return is_scaled ? args.kv_scales[kv_head] : 1.f;
  }
  static __device__ __forceinline__ float value_scale(const PrefillSm90Args& args,
                                                      int32_t kv_head) {
    return is_scaled ? args.kv_scales[args.num_kv_heads + kv_head] : 1.f;
  }

  // The id of the page of a key tile.
  static __device__ __forceinline__ int32_t page_of(const PrefillSm90Args& args, int32_t sequence,
                                                    int32_t key_tile) {
    const int32_t* row = args.page_table + static_cast<int64_t>(sequence) * args.table_width;
    return table_entry(row, args.table_width, key_tile / (kTokensPerPage / kKeys));
  }

  static __device__ __forceinline__ int32_t block_index() {
    return is_split ? static_cast<int32_t>(cluster_index()) : static_cast<int32_t>(blockIdx.x);
  }

  static __device__ __forceinline__ uint32_t cluster_index() {
    uint32_t index;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
    return index;
  }
  static __device__ __forceinline__ int32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int32_t>(rank);
  }
  static __device__ __forceinline__ int32_t cluster_size() {
    uint32_t size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return static_cast<int32_t>(size);
  }
};

}  // namespace paged_trt
