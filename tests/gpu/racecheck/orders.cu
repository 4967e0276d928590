// The ways in which Hopper's prefill kernel hands a buffer of shared memory from the threads that
// used it to the threads that fill it again, one way a kernel, for compute-sanitizer's racecheck.
//
// 256 threads store to a buffer and read it across lanes, as results leave a tile; 96 others fill it
// for the next round. `Freed` says who tells, `Awaited` who asks, `Filled` how it is filled. `Early`,
// `EarlyByEveryThread` and `Unordered` are races on purpose, to show that the tool sees those.
#include "cp_async.cuh"
#include "softmax_math.cuh"
#include "tma.cuh"

namespace paged_trt {

constexpr int kUsers = 256, kFillers = 96, kThreads = 384;  // one warp is idle
constexpr int kStages = 2, kStageBytes = 16 * 1024, kWarpBytes = kStageBytes / 8;

struct ByEveryThread { static constexpr int kCount = kUsers; };
struct ByOneOfAWarp { static constexpr int kCount = 8; };  // after __syncwarp
// Races: before this round's stores, and one of a warp without __syncwarp.
struct Early { static constexpr int kCount = 8; };
struct EarlyByEveryThread { static constexpr int kCount = kUsers; };
struct Unordered { static constexpr int kCount = 8; };  // and without reads
struct ByEachFiller {};
struct ByOneWarp {};          // whose lane 0 then tells all fillers through another barrier
struct ByOneWarpThenEach {};  // as that, and then each filler asks as well
struct Copies {};             // cp.async
struct Stores {};

template <class A, class B> constexpr bool kIs = false;
template <class A> constexpr bool kIs<A, A> = true;

struct Barriers {
  uint64_t filled[kStages], free[kStages], told[kStages];
};

template <class Awaited, class Filled>
__device__ void fill(unsigned buffer, const Barriers& barriers, const uint4* source, int rounds) {
  const int thread = threadIdx.x - 32;
  for (int round = 0; round < rounds; ++round) {
    const int stage = round % kStages;
    const unsigned parity = round / kStages & 1, place = buffer + stage * kStageBytes;
    const unsigned free = shared_address(&barriers.free[stage]);
    const unsigned told = shared_address(&barriers.told[stage]);
    if constexpr (kIs<Awaited, ByEachFiller>) {
      wait_barrier(free, parity ^ 1);
    } else {
      if (thread < 32) {
        wait_barrier(free, parity ^ 1);
        if (thread == 0) arrive(told);
      }
      wait_barrier(told, parity);
      if constexpr (kIs<Awaited, ByOneWarpThenEach>) wait_barrier(free, parity ^ 1);
    }
#pragma unroll 1
    for (int chunk = thread; chunk < kStageBytes / 16; chunk += kFillers) {
      if constexpr (kIs<Filled, Copies>) {
        copy_async_16(place + chunk * 16, source + chunk, true);
      } else {
        const uint4 words = source[chunk];
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(place + chunk * 16),
                     "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
                     : "memory");
      }
    }
    if constexpr (kIs<Filled, Copies>) {
      commit_copies();
      wait_copies<0>();
    }
    fence_async_proxy();
    arrive(shared_address(&barriers.filled[stage]));
  }
}

template <class Freed>
__device__ void use(unsigned buffer, const Barriers& barriers, uint32_t* sums, int rounds) {
  const int thread = threadIdx.x - 128, lane = thread & 31;
  uint32_t sum = 0;
  for (int round = 0; round < rounds; ++round) {
    const int stage = round % kStages;
    const unsigned own = buffer + stage * kStageBytes + thread / 32 * kWarpBytes;
    const unsigned free = shared_address(&barriers.free[stage]);
    wait_barrier(shared_address(&barriers.filled[stage]), round / kStages & 1);
    if (kIs<Freed, EarlyByEveryThread> || (kIs<Freed, Early> && lane == 0)) arrive(free);
    sync_threads(1 + thread / 128, 128);
#pragma unroll 1
    for (int word = lane; word < kWarpBytes / 4; word += 32) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(own + word * 4), "r"(round + lane) : "memory");
    }
    if constexpr (!kIs<Freed, Unordered>) {
      __syncwarp();
#pragma unroll 1
      for (int chunk = lane; chunk < kWarpBytes / 16; chunk += 32) {
        uint4 words;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                     : "r"(own + chunk * 16)
                     : "memory");
        sum += words.x + words.y + words.z + words.w;
      }
      __syncwarp();
    }
    if (kIs<Freed, ByEveryThread>) arrive(free);
    if ((kIs<Freed, ByOneOfAWarp> || kIs<Freed, Unordered>) && lane == 0) arrive(free);
  }
  sums[blockIdx.x * kUsers + thread] = sum;
}

struct HandBackArgs {
  const uint4* source;  // of one buffer
  uint32_t* sums;       // [blocks, kUsers]
  int32_t rounds;
};

template <class Freed, class Awaited, class Filled>
__global__ void __launch_bounds__(kThreads) hand_back(const __grid_constant__ HandBackArgs args) {
  __shared__ __align__(1024) unsigned char memory[kStages * kStageBytes];
  __shared__ Barriers barriers;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(shared_address(&barriers.filled[stage]), kFillers);
      init_barrier(shared_address(&barriers.free[stage]), Freed::kCount);
      init_barrier(shared_address(&barriers.told[stage]), 1);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
  if (warp >= 4) {
    use<Freed>(shared_address(memory), barriers, args.sums, args.rounds);
  } else if (warp > 0) {
    fill<Awaited, Filled>(shared_address(memory), barriers, args.source, args.rounds);
  }
}

}  // namespace paged_trt
