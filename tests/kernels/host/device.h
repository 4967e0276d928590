// What a kernel needs of CUDA, on a CPU: one block at a time, its threads as contexts that take
// turns. A context gives up its turn only where it waits for others, so the warp functions here
// mean what CUDA's do for warps whose lanes all come along.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

namespace host {

constexpr int kLanes = 32;

struct Index {
  unsigned x, y, z;
};
struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  Index index;
  bool is_done;
};
struct Barrier {
  int waiting, generation;
};

inline std::vector<Thread> threads;
inline int current;
inline ucontext_t scheduler;
inline Barrier block_barrier, warp_barriers[kLanes];
inline unsigned long long lanes[kLanes][kLanes];

inline void wait_for(Barrier& barrier, int count) {
  const int generation = barrier.generation;
  if (++barrier.waiting == count) {
    barrier.waiting = 0;
    barrier.generation++;
  }
  while (barrier.generation == generation) swapcontext(&threads[current].context, &scheduler);
}

// Shows `value` to the warp, reads with `read`, and lets nobody overwrite what is being read.
template <class Read>
auto exchange(unsigned long long value, Read read) {
  const int warp = current / kLanes, lane = current % kLanes;
  lanes[warp][lane] = value;
  wait_for(warp_barriers[warp], kLanes);
  const auto result = read(lanes[warp], lane);
  wait_for(warp_barriers[warp], kLanes);
  return result;
}

template <class Body>
void run_block(int count, Body body) {
  static Body* running;
  running = &body;
  const auto enter = +[] {
    (*running)();
    threads[current].is_done = true;
    swapcontext(&threads[current].context, &scheduler);
  };
  threads.resize(count);
  block_barrier = {};
  for (Barrier& barrier : warp_barriers) barrier = {};
  for (int i = 0; i < count; i++) {
    Thread& thread = threads[i];
    thread.stack.resize(65536);
    thread.index = {static_cast<unsigned>(i), 0, 0};
    thread.is_done = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    makecontext(&thread.context, enter, 0);
  }
  for (int left = count; left > 0;) {
    left = 0;
    for (current = 0; current < count; current++) {
      if (threads[current].is_done) continue;
      swapcontext(&scheduler, &threads[current].context);
      left += !threads[current].is_done;
    }
  }
}

}  // namespace host

inline host::Index blockIdx;
#define threadIdx (host::threads[host::current].index)

inline void __syncthreads() {
  host::wait_for(host::block_barrier, static_cast<int>(host::threads.size()));
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return host::exchange(value, [&](auto& all, int lane) { return static_cast<T>(all[lane ^ mask]); });
}
template <class T>
T __shfl_up_sync(unsigned, T value, int offset) {
  return host::exchange(
      value, [&](auto& all, int lane) { return static_cast<T>(all[lane < offset ? lane : lane - offset]); });
}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return host::exchange(value, [&](auto& all, int) { return static_cast<T>(all[source]); });
}
inline unsigned __ballot_sync(unsigned, bool value) {
  return host::exchange(value, [](auto& all, int) {
    unsigned votes = 0;
    for (int i = 0; i < host::kLanes; i++) votes |= (all[i] != 0 ? 1u : 0u) << i;
    return votes;
  });
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  return host::exchange(value, [](auto& all, int) {
    unsigned sum = 0;
    for (unsigned long long each : all) sum += static_cast<unsigned>(each);
    return sum;
  });
}
inline int __ffs(unsigned value) { return __builtin_ffs(static_cast<int>(value)); }
inline void atomicAdd(unsigned long long* place, unsigned long long value) { *place += value; }
inline unsigned long long __umul64hi(unsigned long long left, unsigned long long right) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(left) * right >> 64);
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
// One rounding each: compiled without contraction.
inline float __fadd_rn(float left, float right) { return left + right; }
inline float __fsub_rn(float left, float right) { return left - right; }
inline float __fmul_rn(float left, float right) { return left * right; }
inline int min(int left, int right) { return left < right ? left : right; }
