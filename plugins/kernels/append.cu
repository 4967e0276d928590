// Append: rotate the new keys, quantise, and write keys and values through the page table.
//
// A warp takes a few rounds of one token. A round is as many heads of keys, or of values, as the
// lanes hold: a lane has a sixteenth of one, two chunks of eight elements: two 16-byte loads, two
// stores. All rounds are loaded before the first is stored. The chunks lie half a head apart, so
// that a warp reads and writes without gaps, and so that where a key turns half-split they are each
// other's partners. A lane has the same part of every head, and so the same angles.
//
// Grid: (tokens, a warp each; parts of their rounds). Padding rows and pages that do not exist are
// not written. Queries are rotated where they are read, by the attention kernel: here they would
// cost a copy of their own.
#include "decode_config.cuh"
#include "dependent_launch.cuh"
#include "page_table.cuh"
#include "quantise.cuh"
#include "rope.cuh"
#include "sequences.cuh"
#include "softmax_math.cuh"
#include "wide_access.cuh"

namespace paged_trt {

constexpr int kChunk = 8;  // elements
constexpr int kAppendThreads = 128;
constexpr int kMostRounds = 4;  // of a warp: eight loads of a lane that do not wait for each other
constexpr int32_t kNoHead = 1 << 22;  // more than any layer has
// Blocks of a multiprocessor. Angles and quotients take registers; eight loads are many anyway.
__device__ constexpr int append_blocks(bool is_copy) { return is_copy ? 8 : 5; }

// Where a token's key and value go.
struct TokenPlace {
  int64_t position;
  int32_t page;  // -1: nowhere
};

// The whole warp asks for one token.
__device__ __forceinline__ TokenPlace find_token(const AppendArgs& args, int32_t token) {
  const int32_t* offsets = args.query_start_offsets;
  const int32_t end = offsets[args.num_seqs];
  int32_t sequence = token;  // T == N: one token per sequence; otherwise the row is searched for
  if (args.num_tokens != args.num_seqs) {
    // Nothing waits for the end: a padding token's search ends behind the last sequence.
    sequence = min(find_sequence(offsets, args.num_seqs, token), args.num_seqs - 1);
  }
  // Nothing here waits for the length: the row's first pages are read beside it.
  const int32_t* row = args.page_table + static_cast<int64_t>(sequence) * args.table_width;
  const int32_t lane_page = table_entry(row, args.table_width, threadIdx.x & 31);
  const int64_t position =
      static_cast<int64_t>(args.past_lens[sequence]) + token - offsets[sequence];
  const int64_t index = position / kTokensPerPage;
  int32_t page = __shfl_sync(kAllLanes, lane_page, static_cast<int>(index) & 31);
  if (index >= 32) page = index < args.table_width ? row[index] : -1;
  return {position, token < end && is_page(page, args.num_pages) ? page : -1};
}

// Angles are for two chunks at once where rotary dims fill the parts of lanes.
__device__ __forceinline__ bool turns_whole_parts(const AppendArgs& args) {
  return args.rotary_dim % (2 * kChunk) == 0;
}

// The part that a lane has of every key head, or of every value head.
template <int kDim>
struct LanePart {
  static_assert(kDim % (2 * kChunk) == 0, "heads are whole parts");
  static constexpr int kParts = kDim / (2 * kChunk), kHeads = 32 / kParts;
  int32_t head;             // in the first round; out of reach where the lane has none
  int32_t start, distance;  // of its first chunk in the head, and from there to the other one

  // The elements before `turning` are dealt out among themselves, and so are those behind.
  __device__ __forceinline__ explicit LanePart(int32_t turning) {
    const int32_t lane = threadIdx.x & 31, part = lane % kParts;
    head = kHeads * kParts == 32 || lane < kHeads * kParts ? lane / kParts : kNoHead;
    const bool is_behind = part * 2 * kChunk >= turning;
    const int32_t begin = is_behind ? turning : 0, end = is_behind ? kDim : turning;
    start = part * kChunk + begin / 2, distance = (end - begin) / 2;
  }

  static __device__ __forceinline__ int32_t rounds(int32_t num_heads) {
    return (num_heads + kHeads - 1) / kHeads;
  }
};

// What a lane moves in one round.
struct LaneRound {
  bool is_key, is_used;
  int32_t head, dim;
  int32_t start, distance;

  template <int kHeadDim, int kValueDim>
  __device__ __forceinline__ LaneRound(const AppendArgs& args, const LanePart<kHeadDim>& keys,
                                       const LanePart<kValueDim>& values, int32_t round) {
    const int32_t key_rounds = keys.rounds(args.num_kv_heads);
    is_key = round < key_rounds;
    dim = is_key ? kHeadDim : kValueDim;
    head = is_key ? keys.head + round * keys.kHeads
                  : values.head + (round - key_rounds) * values.kHeads;
    is_used = head < args.num_kv_heads;
    start = is_key ? keys.start : values.start;
    distance = is_key ? keys.distance : values.distance;
  }

  // The first chunk, in what the step brings.
  template <class Activation>
  __device__ __forceinline__ const Activation* source(const AppendArgs& args, int32_t token) const {
    return static_cast<const Activation*>(is_key ? args.key : args.value) +
           token * (is_key ? args.key_token_stride : args.value_token_stride) +
           (head * dim + start);
  }

  // The first chunk, in its page.
  template <class Kv>
  __device__ __forceinline__ Kv* target(const AppendArgs& args, TokenPlace place) const {
    const auto slot = static_cast<int32_t>(place.position % kTokensPerPage);
    return static_cast<Kv*>(is_key ? args.key_pool : args.value_pool) +
           tile_offset(place.page, args.num_kv_heads, head, dim) + (slot * dim + start);
  }

  __device__ __forceinline__ float scale(const AppendArgs& args) const {
    return args.kv_scales[(is_key ? 0 : args.num_kv_heads) + head];
  }
};

template <class Activation>
__device__ __forceinline__ void unpack_chunk(float (&values)[kChunk], uint4 raw) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = unpack_pair<Activation>(words[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}

template <class Kv>
__device__ __forceinline__ void store_chunk(Kv* place, const float (&values)[kChunk]) {
  if constexpr (kIsQuantised<Kv>) {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      words[i] = quantise_two<Kv>(values[4 * i], values[4 * i + 1]) |
                 quantise_two<Kv>(values[4 * i + 2], values[4 * i + 3]) << 16;
    }
    store_words(place, make_uint2(words[0], words[1]));
  } else {
    store_words(place, make_uint4(pack<Kv>(values[0], values[1]), pack<Kv>(values[2], values[3]),
                                  pack<Kv>(values[4], values[5]), pack<Kv>(values[6], values[7])));
  }
}

__device__ __forceinline__ void rotate_pair(float& first, float& second, float cosine, float sine) {
  const float own = first, partner = second;
  first = turned(own, partner, cosine, sine, true);
  second = turned(partner, own, cosine, sine, false);
}

__device__ __forceinline__ void load_four(float* angles, const float* place) {
  *reinterpret_cast<float4*>(angles) = __ldg(reinterpret_cast<const float4*>(place));
}

// The angles of a lane's eight pairs: half-split, an element of each in both chunks; interleaved,
// neighbours, four pairs a chunk.
struct LaneAngles {
  float cosines[kChunk], sines[kChunk];

  // `angles` is the position's row.
  template <int kHeadDim>
  __device__ __forceinline__ void load(const AppendArgs& args, const float* angles,
                                       const LanePart<kHeadDim>& part) {
    const bool are_neighbours = args.rope == kRopeInterleaved;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* place =
          angles + (are_neighbours ? (part.start + part.distance * i) / 2 : part.start + 4 * i);
      load_four(cosines + 4 * i, place);
      load_four(sines + 4 * i, place + args.rotary_dim / 2);
    }
  }

  __device__ __forceinline__ void turn(float (&values)[2][kChunk], int32_t rope) const {
    if (rope == kRopeInterleaved) {
#pragma unroll
      for (int i = 0; i < kChunk; i++) {
        rotate_pair(values[i / 4][2 * (i % 4)], values[i / 4][2 * (i % 4) + 1], cosines[i],
                    sines[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; i++)
        rotate_pair(values[0][i], values[1][i], cosines[i], sines[i]);
    }
  }
};

// Values over their scale; whether they are what a division gives.
__device__ __forceinline__ bool divide(float (&values)[2][kChunk], float scale) {
  const float inverse = __frcp_rn(scale);
  float sum = 0.f;  // of zeros, or NaN
#pragma unroll
  for (int i = 0; i < 2 * kChunk; i++) {
    float& value = values[i / kChunk][i % kChunk];
    value = quotient(value, scale, inverse);
    sum = __fmaf_rn(value, 0.f, sum);
  }
  return sum == 0.f && is_plain_scale(scale);
}

// False: nothing was written, the round is left to `append_carefully`.
template <class Activation, class Kv, bool kHasRope>
__device__ __forceinline__ bool append_round(const AppendArgs& args, const LaneRound& round,
                                             const uint4 (&raw)[2], const LaneAngles& angles,
                                             TokenPlace place, float scale) {
  Kv* target = round.target<Kv>(args, place);
  const bool has_angles = kHasRope && round.is_key;
  if constexpr (kSameType<Activation, Kv>) {
    if (!has_angles || (turns_whole_parts(args) && round.start >= args.rotary_dim)) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        store_words(target + round.distance * i, raw[i]);  // bits as they are
      return true;
    }
  }
  if (has_angles && !turns_whole_parts(args)) return false;
  float values[2][kChunk];
#pragma unroll
  for (int i = 0; i < 2; i++) unpack_chunk<Activation>(values[i], raw[i]);
  if (has_angles && round.start < args.rotary_dim) angles.turn(values, args.rope);
  if constexpr (kIsQuantised<Kv>) {
    if (!divide(values, scale)) return false;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) store_chunk(target + round.distance * i, values[i]);
  return true;
}

// `head` is the whole key head, `first` the chunk's first element, `values` the chunk.
template <class Activation>
__device__ __forceinline__ void rotate_elements(float (&values)[kChunk], const Activation* head,
                                                int32_t first, const float* angles, int32_t rope,
                                                int32_t rotary_dim) {
  const auto* bits = reinterpret_cast<const uint16_t*>(head);
#pragma unroll
  for (int i = 0; i < kChunk; i++) {
    if (first + i >= rotary_dim) break;
    const RopePlace place = rope_place(first + i, rotary_dim, rope);
    values[i] =
        rotate(values[i], unpack_one<Activation>(bits[place.partner]), place, angles, rotary_dim);
  }
}

// A round element by element: rotary dims that do not fill parts, quotients that need a division.
template <class Activation, class Kv, bool kHasRope>
__device__ __forceinline__ void append_carefully(const AppendArgs& args, const LaneRound& round,
                                                 int32_t token, TokenPlace place) {
  const Activation* source = round.source<Activation>(args, token);
#pragma unroll 1
  for (int32_t offset = 0; offset <= round.distance; offset += round.distance) {
    float values[kChunk];
    unpack_chunk<Activation>(values, *reinterpret_cast<const uint4*>(source + offset));
    if (kHasRope && round.is_key) {
      const float* angles = args.rope_cos_sin + place.position * args.rotary_dim;
      rotate_elements(values, source - round.start, round.start + offset, angles, args.rope,
                      args.rotary_dim);
    }
    if constexpr (kIsQuantised<Kv>) {
      const float scale = round.scale(args);
#pragma unroll
      for (int j = 0; j < kChunk; j++) values[j] = __fdiv_rn(values[j], scale);
    }
    store_chunk(round.target<Kv>(args, place) + offset, values);
  }
}

// What a lane has loaded.
struct LoadedRounds {
  bool is_used[kMostRounds];
  uint4 raw[kMostRounds][2];
  float scales[kMostRounds];
};

template <class Activation, class Kv, bool kHasRope, class Keys, class Values>
__device__ __forceinline__ void store_rounds(const AppendArgs& args, const Keys& keys,
                                             const Values& values, int32_t first,
                                             const LoadedRounds& rounds, int32_t token,
                                             TokenPlace place) {
  LaneAngles angles;
  if constexpr (kHasRope) {
    if (first < keys.rounds(args.num_kv_heads) && turns_whole_parts(args) &&
        keys.start < args.rotary_dim) {
      angles.load(args, args.rope_cos_sin + place.position * args.rotary_dim, keys);
    }
  }
  uint32_t left = 0;  // rounds, a bit each
#pragma unroll
  for (int k = 0; k < kMostRounds; k++) {
    const LaneRound round(args, keys, values, first + k);
    if (!rounds.is_used[k]) continue;
    const bool is_written = append_round<Activation, Kv, kHasRope>(args, round, rounds.raw[k],
                                                                   angles, place, rounds.scales[k]);
    if (!is_written) left |= 1u << k;
  }
  if constexpr (kHasRope || kIsQuantised<Kv>) {
#pragma unroll 1
    for (int k = 0; left >> k != 0; k++) {
      if ((left >> k & 1) == 0) continue;
      const LaneRound round(args, keys, values, first + k);
      append_carefully<Activation, Kv, kHasRope>(args, round, token, place);
    }
  }
}

// The counters of the decode behind: no block of it can have touched them yet.
__device__ __forceinline__ void clear_counters(const AppendArgs& args) {
  if (blockIdx.y != 0) return;
  for (int32_t i = blockIdx.x * kAppendThreads + threadIdx.x; i < args.num_counters;
       i += gridDim.x * kAppendThreads) {
    args.counters[i] = 0;
  }
}

template <class Activation, class Kv, int kHeadDim, int kValueDim, int kFeatures>
__global__ void __launch_bounds__(kAppendThreads, append_blocks(kSameType<Activation, Kv> &&
                                                                (kFeatures & kRopeFeature) == 0))
    append(const __grid_constant__ AppendArgs args) {
  constexpr bool kHasRope = (kFeatures & kRopeFeature) != 0;
  allow_next_kernel();
  const LanePart<kHeadDim> keys(kHasRope && turns_whole_parts(args) ? args.rotary_dim : 0);
  const LanePart<kValueDim> values(0);
  const int32_t first = blockIdx.y * args.rounds_per_warp;
  const int32_t heads = args.num_kv_heads;
  const int32_t count =
      min(args.rounds_per_warp, keys.rounds(heads) + values.rounds(heads) - first);
  const int32_t token = blockIdx.x * (kAppendThreads / 32) + threadIdx.x / 32;
  const Activation* sources[kMostRounds];
  LoadedRounds rounds;
#pragma unroll
  for (int k = 0; k < kMostRounds; k++) {
    const LaneRound round(args, keys, values, first + k);
    rounds.is_used[k] = k < count && round.is_used;
    sources[k] = round.source<Activation>(args, token);
    know_before_waiting(sources[k]);
  }
  // Two waits, for the assembler moves a single one ahead of the addresses.
  if (token >= args.num_tokens) {
    wait_for_previous_kernel();
    clear_counters(args);
    return;
  }
  wait_for_previous_kernel();
#pragma unroll
  for (int k = 0; k < kMostRounds; k++) {
    const LaneRound round(args, keys, values, first + k);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      load_words_if(rounds.is_used[k], rounds.raw[k][i], sources[k] + round.distance * i);
    }
    if (kIsQuantised<Kv> && rounds.is_used[k]) rounds.scales[k] = round.scale(args);
  }
  // While the rounds are on their way.
  clear_counters(args);
  const TokenPlace place = find_token(args, token);
  if (place.page < 0) return;
  store_rounds<Activation, Kv, kHasRope>(args, keys, values, first, rounds, token, place);
}

}  // namespace paged_trt
