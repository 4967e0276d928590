// Sizes of a decode kernel, each chosen here with its reason.
#pragma once

#include "kv_registers.cuh"

namespace paged_trt {

// Features of the op that a kernel is compiled for. One that is off costs no instruction.
constexpr int kWindowFeature = 1;
constexpr int kSoftcapFeature = 2;
constexpr int kRopeFeature = 4;

// What a benchmark may ask for besides, in the same number: no layer does. Off, they change no
// instruction.
constexpr int kOtherDepth = 8;  // of decode: one step in flight instead of two, or two instead of one

// Tiles of 16 tokens in one step of a warp: 8 KB of keys and values in flight, which is what
// hides the memory's latency, as long as the scores of a step do not take the registers back.
__device__ constexpr int tiles_per_step(int row_bytes) {
  if (row_bytes <= 64) return 4;
  return row_bytes <= 128 ? 2 : 1;
}

// Steps whose keys and values are in registers at once. 185 leaves some 70 of 255 registers for
// addresses and operands; beyond it the compiler spills.
__device__ constexpr int steps_in_flight(int registers_per_step, int other_registers) {
  return 2 * registers_per_step + other_registers <= 185 ? 2 : 1;
}

// Eight warps per multiprocessor with up to 255 registers each read as fast as twelve with 168. And
// where three blocks fit, a grid that fills two thirds of them is placed badly behind a kernel of
// its own kind, which it may overlap.
__device__ constexpr int blocks_per_multiprocessor(int warps) { return warps >= 8 ? 1 : 8 / warps; }

template <class Activation, class Kv, int kHeadDim_, int kValueDim_, int kGroup_, int kWarps_,
          int kHeadTiles_, int kFeatures, bool kPreferDeep>
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
  static constexpr bool kIsDeep = kPreferDeep != ((kFeatures & kOtherDepth) != 0);
  static constexpr int kDepth =
      !kIsDeep
          ? 1
          : steps_in_flight(sizeof(Keys) / 4 + sizeof(Values) / 4,
                            kAccumulators + (kHoldQuery ? kQueryRegisters : 0));

  static constexpr int kValueVectors = kValueDim / 4;  // of four elements
  // A thread that merges a vector alone has more partials to wait for than one that has help. A
  // balanced block has the next piece's keys in its registers meanwhile, and two tiles of heads
  // leave no room either: more would spill.
  static constexpr bool kMergesAlone = kThreads < 2 * kUsedHeads * kValueVectors && kHeadTiles == 1;
  static constexpr int kPartialsInFlight = kPreferDeep ? 4 : kMergesAlone ? 16 : 8;  // per thread
};

}  // namespace paged_trt
