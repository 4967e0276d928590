// Sample: one block chooses the token of one row of logits, by temperature, top-k and top-p.
//
// Passes over the row, which lies in L2 after the first one: the largest logit; where top-k or
// top-p is on, one histogram per digit of the key finds the smallest key that stays; four passes of
// sums find the token, each over a 32nd of the one before. Sums are of whole numbers, so no order
// of addition changes them.
#include "sample_args.cuh"
#include "sample_math.cuh"

namespace paged_trt {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr float kLog2E = 1.44269502f;

struct SampleShared {
  uint64_t bins[256];
  uint64_t parts[kWarp];
  uint64_t value;
  uint32_t digit;
  int32_t broken;  // a logit is NaN
};

// What a set of tokens is measured by: how many they are, or what they weigh.
struct CountOf {
  __device__ uint64_t operator()(float) const { return 1; }
};
struct WeightOf {
  float largest;
  float scale;
  __device__ uint64_t operator()(float value) const {
    return token_weight(value, largest, scale);
  }
};

template <class Logit>
struct Row {
  const Logit* logits;
  int32_t size;

  __device__ float value(int32_t token) const { return logit_value(logits[token]); }
};

__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

__device__ __forceinline__ uint64_t warp_max(uint64_t value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

// Key of the largest logit above its token, inverted: of equal logits the lowest token wins.
template <class Logit, int kThreads>
__device__ uint64_t find_largest(const Row<Logit>& row, SampleShared& shared) {
  uint64_t best = 0;
  bool is_broken = false;
  for (int32_t token = threadIdx.x; token < row.size; token += kThreads) {
    const float value = row.value(token);
    is_broken |= value != value;
    const uint64_t candidate =
        static_cast<uint64_t>(order_key<Logit>(value)) << 32 | ~static_cast<uint32_t>(token);
    best = candidate > best ? candidate : best;
  }
  best = warp_max(best);
  if (is_broken) shared.broken = 1;
  if (threadIdx.x % kWarp == 0) shared.parts[threadIdx.x / kWarp] = best;
  __syncthreads();
  for (int warp = 0; warp < kThreads / kWarp; warp++) {
    best = shared.parts[warp] > best ? shared.parts[warp] : best;
  }
  __syncthreads();
  return best;
}

// What the tokens with keys from `lowest` on measure, each thread's the same.
template <class Logit, int kThreads, class Measure>
__device__ uint64_t measure_row(const Row<Logit>& row, uint32_t lowest, const Measure& measure,
                                SampleShared& shared) {
  uint64_t sum = 0;
  for (int32_t token = threadIdx.x; token < row.size; token += kThreads) {
    const float value = row.value(token);
    if (order_key<Logit>(value) >= lowest) sum += measure(value);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) shared.parts[threadIdx.x / kWarp] = sum;
  __syncthreads();
  uint64_t total = 0;
  for (int warp = 0; warp < kThreads / kWarp; warp++) total += shared.parts[warp];
  __syncthreads();
  return total;
}

// Adds the measures of a warp to bins, lanes of one bin first among themselves: the first digit has
// few bins. Measures pass 32 bits and the sum of lanes is made of 24-bit halves.
__device__ __forceinline__ void add_to_few_bins(SampleShared& shared, uint32_t bin,
                                                uint64_t measure) {
  uint32_t left = __ballot_sync(kAllLanes, measure != 0);
  while (left != 0) {
    const int leader = __ffs(left) - 1;
    const uint32_t leaders_bin = __shfl_sync(kAllLanes, bin, leader);
    const bool is_same = (left >> (threadIdx.x % kWarp) & 1) != 0 && bin == leaders_bin;
    const uint32_t same = __ballot_sync(kAllLanes, is_same);
    const uint32_t low = is_same ? static_cast<uint32_t>(measure & 0xffffffu) : 0;
    const uint32_t high = is_same ? static_cast<uint32_t>(measure >> 24) : 0;
    const uint64_t sum = static_cast<uint64_t>(__reduce_add_sync(kAllLanes, high)) << 24;
    const uint64_t whole = sum + __reduce_add_sync(kAllLanes, low);
    if (static_cast<int>(threadIdx.x % kWarp) == leader) {
      atomicAdd(&shared.bins[leaders_bin], whole);
    }
    left &= ~same;
  }
}

// How much of a set is to stay, from what all of it measures.
struct CountGoal {
  uint64_t count;
  __device__ uint64_t operator()(uint64_t) const { return count; }
};
struct ShareGoal {
  uint32_t share;  // in units of 2^-32
  __device__ uint64_t operator()(uint64_t total) const {
    const uint64_t part = (total >> 32) * share + ((total & 0xffffffffu) * share >> 32);
    return part == 0 ? 1 : part;
  }
};

// The first warp: the highest bin at which the sum from the top reaches what is wanted, which is
// `shared.value`, or for the first digit what `goal` makes of the sum of all bins.
template <class Goal>
__device__ void find_bin(SampleShared& shared, const Goal& goal, bool is_first) {
  if (threadIdx.x >= kWarp) return;
  const int lane = threadIdx.x, top = 255 - 8 * lane;
  uint64_t own = 0;
  for (int i = 0; i < 8; i++) own += shared.bins[top - i];
  uint64_t reached = own;
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint64_t other = __shfl_up_sync(kAllLanes, reached, offset);
    if (lane >= offset) reached += other;
  }
  const uint64_t total = __shfl_sync(kAllLanes, reached, kWarp - 1);
  const uint64_t wanted = is_first ? goal(total) : shared.value;
  const uint32_t enough = __ballot_sync(kAllLanes, reached >= wanted);
  if (lane != __ffs(enough) - 1) return;
  uint64_t before = reached - own;
  int bin = top;
  while (before + shared.bins[bin] < wanted) before += shared.bins[bin--];
  shared.digit = bin;
  shared.value = wanted - before;
}

// The largest key such that the tokens from it on measure what `goal` wants of the tokens from
// `lowest` on: at least 1, and at most all of it.
template <class Logit, int kThreads, class Measure, class Goal>
__device__ uint32_t find_key(const Row<Logit>& row, uint32_t lowest, const Measure& measure,
                             const Goal& goal, SampleShared& shared) {
  uint32_t prefix = 0;
  for (int digit = kKeyDigits<Logit> - 1; digit >= 0; digit--) {
    const bool is_first = digit == kKeyDigits<Logit> - 1;
    for (int bin = threadIdx.x; bin < 256; bin += kThreads) shared.bins[bin] = 0;
    __syncthreads();
    const int32_t rounds = (row.size + kThreads - 1) / kThreads;
    for (int32_t round = 0; round < rounds; round++) {
      // All lanes come along: they add up together.
      const int32_t token = round * kThreads + threadIdx.x;
      const float value = token < row.size ? row.value(token) : 0.f;
      const uint32_t key = order_key<Logit>(value);
      const uint64_t above = static_cast<uint64_t>(key) >> (8 * digit + 8);
      const bool is_in = token < row.size && key >= lowest && above == prefix;
      const uint64_t own = is_in ? measure(value) : 0;
      const uint32_t bin = key >> (8 * digit) & 255;
      if (is_first) {
        add_to_few_bins(shared, bin, own);
      } else if (own != 0) {
        atomicAdd(&shared.bins[bin], own);
      }
    }
    __syncthreads();
    find_bin(shared, goal, is_first);
    __syncthreads();
    prefix = prefix << 8 | shared.digit;
  }
  return prefix;
}

// The token at which the sum of weights in the order of tokens passes the random point.
template <class Logit, int kThreads>
__device__ int32_t find_token(const Row<Logit>& row, uint32_t lowest, const WeightOf& weight,
                              uint64_t bits, SampleShared& shared) {
  constexpr int kParts = kThreads / kWarp;
  const int32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int32_t begin = 0, end = row.size;
  uint64_t point = 0;
  bool is_first = true;
  do {
    const int32_t part = (end - begin + kParts - 1) / kParts;
    const int32_t from = begin + warp * part, to = min(from + part, end);
    uint64_t sum = 0;
    for (int32_t token = from + lane; token < to; token += kWarp) {
      const float value = row.value(token);
      if (order_key<Logit>(value) >= lowest) sum += weight(value);
    }
    sum = warp_sum(sum);
    if (lane == 0) shared.parts[warp] = sum;
    __syncthreads();
    if (is_first) {
      uint64_t total = 0;
      for (int i = 0; i < kParts; i++) total += shared.parts[i];
      point = __umul64hi(bits, total);
      is_first = false;
    }
    int32_t found = 0;
    while (point >= shared.parts[found]) point -= shared.parts[found++];
    __syncthreads();
    begin += found * part;
    end = min(begin + part, end);
  } while (end - begin > 1);
  return begin;
}

template <class Logit, int kThreads>
__device__ int32_t draw(const Row<Logit>& row, const SampleRow& how, float largest,
                        SampleShared& shared) {
  uint32_t lowest = 0;
  const WeightOf weight{largest, how.scale};
  if (how.top_k > 0 && how.top_k < row.size) {
    const CountGoal goal{static_cast<uint64_t>(how.top_k)};
    lowest = find_key<Logit, kThreads>(row, 0, CountOf{}, goal, shared);
  }
  if (how.top_p != 0) {
    lowest = find_key<Logit, kThreads>(row, lowest, weight, ShareGoal{how.top_p}, shared);
  }
  return find_token<Logit, kThreads>(row, lowest, weight, random_bits(how.seed, how.step), shared);
}

template <class Logit, class Token, int kThreads>
__global__ void __launch_bounds__(kThreads, 1) sample(const __grid_constant__ SampleArgs args) {
  static_assert(kThreads % kWarp == 0 && kThreads <= kWarp * kWarp, "whole warps, one part each");
  __shared__ SampleShared shared;
  const int32_t sequence = blockIdx.x;
  const Row<Logit> row{static_cast<const Logit*>(args.logits) + sequence * args.row_stride,
                       args.vocab_size};
  if (threadIdx.x == 0) shared.broken = 0;
  __syncthreads();
  const uint64_t best = find_largest<Logit, kThreads>(row, shared);
  Token* result = static_cast<Token*>(args.tokens) + sequence;
  int32_t token = static_cast<int32_t>(~static_cast<uint32_t>(best));
  const float largest = row.value(token);
  // As the engine's own greedy choice says it.
  if (shared.broken != 0 || __float_as_uint(largest) == 0xff800000u) {
    if (threadIdx.x == 0) *result = shared.broken != 0 ? -1 : args.vocab_size;
    return;
  }
  const SampleRow how = args.rows[sequence];
  if (how.scale != 0.f) token = draw<Logit, kThreads>(row, how, largest, shared);
  if (threadIdx.x == 0) *result = token;
  if (args.logprobs == nullptr) return;
  const uint64_t total =
      measure_row<Logit, kThreads>(row, 0, WeightOf{largest, kLog2E}, shared);
  if (threadIdx.x == 0) {
    const float value = row.value(token);
    const float difference = value == largest ? 0.f : value - largest;
    // 2^-40 of the unit of weights.
    args.logprobs[sequence] = difference - logf(static_cast<float>(total) * 9.09494702e-13f);
  }
}

}  // namespace paged_trt
