// One warp of CUDA on host threads: enough for device code that is arithmetic and warp votes.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
#define asm(...)  // what needs machine code is not called here

struct Index {
  unsigned x, y, z;
};
inline thread_local Index threadIdx, blockIdx;
inline Index gridDim;

// Every vote is two meetings: all have given, all have read.
inline std::barrier<> meeting{32};
inline long long given[32];

template <class T, class Read>
auto vote(T value, Read read) {
  given[threadIdx.x] = static_cast<long long>(value);
  meeting.arrive_and_wait();
  auto result = read();
  meeting.arrive_and_wait();
  return result;
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return vote(value, [&] { return static_cast<T>(given[lane]); });
}

template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = static_cast<int>(threadIdx.x) - distance;
  return vote(value, [&] { return static_cast<T>(given[lane < 0 ? threadIdx.x : lane]); });
}

inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  return vote(value, [] {
    unsigned sum = 0;
    for (const auto other : given) sum += static_cast<unsigned>(other);
    return sum;
  });
}

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return vote(value, [] { return static_cast<unsigned>(*std::max_element(given, given + 32)); });
}

inline unsigned __ballot_sync(unsigned, bool value) {
  return vote(value, [] {
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= given[lane] != 0 ? 1u << lane : 0u;
    return bits;
  });
}

inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int atomicAdd(int* place, int value) {
  return std::atomic_ref(*place).fetch_add(value);
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float __fdividef(float a, float b) { return a / b; }

template <class A, class B>
auto min(A a, B b) {
  return a < b ? a : b;
}
template <class A, class B>
auto max(A a, B b) {
  return a > b ? a : b;
}

template <class Work>
void run_warp(unsigned block, Work work) {
  std::vector<std::thread> lanes;
  for (unsigned lane = 0; lane < 32; lane++) {
    lanes.emplace_back([=] {
      threadIdx = {lane, 0, 0}, blockIdx = {block, 0, 0};
      work();
    });
  }
  for (auto& lane : lanes) lane.join();
}
