// Blocks that share the keys of a (sequence, block of heads): each leaves a partial, and the last
// to arrive at a counter merges them all.
//
// The append kernel of the same layer sets the counters to zero, so a launch that was aborted
// half-way leaves nothing behind; a launch that ends leaves them at zero by itself.
#pragma once

#include "decode_block.cuh"

namespace paged_trt {

template <class Config>
struct CounterShared {
  DecodeShared<Config> block;
  bool is_last;
};

// Where the partials of one (sequence, block of heads) are: slot first_slot for partial 0 and
// next_slot + k * slot_stride for partial k + 1.
struct PartialSlots {
  int64_t first_slot, next_slot;
  int32_t slot_stride, count;

  __device__ __forceinline__ int64_t slot(int32_t partial) const {
    return partial == 0 ? first_slot : next_slot + (partial - 1) * slot_stride;
  }
};

template <class Config>
__device__ __forceinline__ float* slot_values(const DecodeCounterArgs& args, int64_t slot, int head) {
  return args.partial_output + (slot * Config::kUsedHeads + head) * Config::kValueDim;
}

template <class Config>
__device__ __forceinline__ float* slot_lse(const DecodeCounterArgs& args, int64_t slot, int head) {
  return args.partial_lse + slot * Config::kUsedHeads + head;
}

// Whether this block is the last of `count` to arrive, with everything that the others stored.
__device__ __forceinline__ bool arrive_last(int32_t* counter, int32_t count) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(count - 1)
               : "memory");
  return before == static_cast<uint32_t>(count - 1);
}

// Several threads share an output vector where a block has more threads than vectors.
template <class Config>
__device__ __forceinline__ void merge_slots(DecodeShared<Config>& shared,
                                            const DecodeCounterArgs& args, HeadRange heads,
                                            int32_t token, const PartialSlots& slots) {
  constexpr int kVectors = Config::kUsedHeads * Config::kValueVectors;
  constexpr int kWanted = Config::kThreads / kVectors;
  constexpr int kShares = kWanted < 1 ? 1 : kWanted < Config::kWarps ? kWanted : Config::kWarps;
  auto& values = *reinterpret_cast<float4(*)[kShares][kVectors]>(&shared.output[0][0][0]);
  static_assert(sizeof(values) <= sizeof(shared.output), "shares lie where the warps' parts were");

  const int share = threadIdx.x / kVectors;
  for (int i = kShares == 1 ? threadIdx.x : threadIdx.x % kVectors; i < kVectors;
       i += Config::kThreads) {
    const int head = i / Config::kValueVectors, element = i % Config::kValueVectors * 4;
    const bool exists = head < heads.count;
    PartialVector part = no_partial();
    if (exists && (kShares == 1 || share < kShares)) {
      part = merge_share<Config::kPartialsInFlight>(
          share * (kShares > 1), kShares, slots.count,
          [&](int32_t p) { return slot_values<Config>(args, slots.slot(p), head) + element; },
          [&](int32_t p) { return slot_lse<Config>(args, slots.slot(p), head); });
    }
    if constexpr (kShares == 1) {
      if (exists) store_final(shared, args, heads, token, head, element, part, 1.f);
    } else {
      if (share < kShares) {
        values[share][i] = part.values;
        if (element == 0) shared.maximum[share][head] = part.maximum, shared.sum[share][head] = part.sum;
      }
      __syncthreads();
      if (share == 0 && exists) {
        const PartialVector total = merge_shares<kShares>(
            [&](int s) { return values[s][i]; }, [&](int s) { return shared.maximum[s][head]; },
            [&](int s) { return shared.sum[s][head]; });
        store_final(shared, args, heads, token, head, element, total, 1.f);
      }
    }
  }
}

// Store what attend_keys() left in shared memory as partial `index`, and merge where this block is
// the last.
template <class Config>
__device__ __forceinline__ void finish_partial(CounterShared<Config>& shared,
                                               const DecodeCounterArgs& args, HeadRange heads,
                                               int32_t token, int32_t head_block,
                                               const PartialSlots& slots, int32_t index,
                                               float scale) {
  const int64_t slot = slots.slot(index);
  for_each_vector(shared.block, heads, [&](int head, int element, const PartialVector& total) {
    store_partial<Config>(slot_values<Config>(args, slot, head), slot_lse<Config>(args, slot, head),
                          element, total, scale);
  });
  __syncthreads();
  if (threadIdx.x == 0) {
    const int64_t row = static_cast<int64_t>(token) * args.num_kv_heads + heads.kv_head;
    shared.is_last = arrive_last(args.counters + row * Config::kHeadBlocks + head_block, slots.count);
  }
  __syncthreads();
  if (shared.is_last) merge_slots(shared.block, args, heads, token, slots);
}

// All keys of the heads were in this block.
template <class Config>
__device__ __forceinline__ void finish_whole(const DecodeShared<Config>& shared,
                                             const DecodeCounterArgs& args, HeadRange heads,
                                             int32_t token, float scale) {
  for_each_vector(shared, heads, [&](int head, int element, const PartialVector& total) {
    store_final(shared, args, heads, token, head, element, total, scale);
  });
}

}  // namespace paged_trt
