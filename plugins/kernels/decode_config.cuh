// Sizes of a decode kernel, each chosen here with its reason.
#pragma once

#include "kv_registers.cuh"

namespace paged_trt {

// Features of the op that a kernel is compiled for. One that is off costs no instruction.
constexpr int kWindowFeature = 1;
constexpr int kSoftcapFeature = 2;
constexpr int kRopeFeature = 4;

// Tiles of 16 tokens in one step of a warp: 8 KB of keys and values in flight, which is what
// hides the memory's latency, as long as the scores of a step do not take the registers back.
__device__ constexpr int tiles_per_step(int row_bytes) {
  if (row_bytes <= 64) return 4;
  return row_bytes <= 128 ? 2 : 1;
}

// Steps whose keys and values are in registers at once, where a warp may have 255. 185 leaves some 70 of 255 registers for
// addresses and operands; beyond it the compiler spills.
__device__ constexpr int steps_in_flight(int registers_per_step, int other_registers) {
  return 2 * registers_per_step + other_registers <= 185 ? 2 : 1;
}

// `kBlocks` blocks of `kWarps` warps are to fit a multiprocessor.
template <class Activation, class Kv, int kHeadDim_, int kValueDim_, int kGroup_, int kWarps_,
          int kBlocks, int kHeadTiles_, int kFeatures, bool kPreferDeep>
struct DecodeConfig {
  using activation_type = Activation;
  using mma_type = MmaType<Activation, Kv>;
  static constexpr bool kQuantised = kIsQuantised<Kv>;
  static constexpr bool kHasWindow = (kFeatures & kWindowFeature) != 0;
  static constexpr bool kHasSoftcap = (kFeatures & kSoftcapFeature) != 0;
  static constexpr bool kHasRope = (kFeatures & kRopeFeature) != 0;
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_, kGroup = kGroup_;
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32;
  static_assert(kHeadDim % 16 == 0 && kValueDim % 16 == 0, "head dims are multiples of 16");
  static_assert(kHeadDim <= 256 && kValueDim <= 256, "accumulators of larger heads would spill");

  // Query heads on N = 8; a block serves kHeads of the group, the grid has a block for each more.
  static constexpr int kHeadTiles = kHeadTiles_, kHeads = kHeadTiles * 8;
  static constexpr int kUsedHeads = kGroup < kHeads ? kGroup : kHeads;
  static constexpr int kHeadBlocks = (kGroup + kHeads - 1) / kHeads;

  static constexpr int kWiderDim = kHeadDim > kValueDim ? kHeadDim : kValueDim;
  static constexpr int kTiles = tiles_per_step(kWiderDim * static_cast<int>(sizeof(Kv)));
  static constexpr int kTokens = kTiles * 16;
  using Keys = KeyRegisters<Kv, mma_type, kHeadDim, kTiles>;
  using Values = ValueRegisters<Kv, mma_type, kValueDim, kTiles>;

  // Held queries save two shared loads per product, until they cost more than 16 registers.
  static constexpr int kQueryRegisters = kHeadDim / 8 * kHeadTiles;
  static constexpr bool kHoldQuery = kQueryRegisters <= 16;
  // Held and not rotated, a query goes from memory straight to its operands.
  static constexpr bool kShareQuery = !kHoldQuery || kHasRope;
  static constexpr int kAccumulators = (kValueDim / 4 + kTiles * 4) * kHeadTiles;
  static constexpr int kDepth =
      !kPreferDeep || kBlocks * kWarps > 8
          ? 1
          : steps_in_flight(sizeof(Keys) / 4 + sizeof(Values) / 4,
                            kAccumulators + (kHoldQuery ? kQueryRegisters : 0));

  static constexpr int kValueVectors = kValueDim / 4;  // of four elements
};

}  // namespace paged_trt
