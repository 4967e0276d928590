// Append: rotate the new keys, quantise, and write keys and values through the page table.
//
// Grid: (tiles of tokens_per_block token rows, slices of a tile's items). An item is two chunks of
// eight elements: two 16-byte loads, two stores. They lie half a head apart, so that a warp reads and
// writes without gaps, and so that where a key turns half-split they are each other's partners.
// Padding rows and pages that do not exist are not written. Queries are rotated
// where they are read, by the attention kernel: here they would cost a copy of their own.
#include "decode_config.cuh"
#include "dependent_launch.cuh"
#include "page_table.cuh"
#include "quantise.cuh"
#include "rope.cuh"
#include "sequences.cuh"
#include "softmax_math.cuh"

namespace paged_trt {

constexpr int kChunk = 8;  // elements
constexpr int kAppendThreads = 256;
constexpr int kMostTokensPerBlock = kAppendThreads / 32;  // a warp finds the place of one
// Per thread: loads that do not wait for each other.
__device__ constexpr int items_in_flight(int features) {
  return (features & kWideAppend) != 0 ? 4 : 2;
}
// Blocks of a multiprocessor; their registers hold rotated items, or more of them, or both.
__device__ constexpr int append_blocks(int features) {
  return 4 - ((features & kRopeFeature) != 0) - ((features & kWideAppend) != 0);
}

template <class Activation>
__device__ __forceinline__ void unpack_chunk(float (&values)[kChunk], uint4 raw) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = unpack_pair<Activation>(words[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}

// `head` is the whole key head, `first` the chunk's first element, `values` the chunk: for rotary
// dims that do not fill whole items.
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

__device__ __forceinline__ void rotate_pair(float& first, float& second, float cosine, float sine) {
  const float own = first, partner = second;
  first = turned(own, partner, cosine, sine, true);
  second = turned(partner, own, cosine, sine, false);
}

__device__ __forceinline__ void load_angles(float (&angles)[4], const float* place) {
  *reinterpret_cast<float4*>(angles) = __ldg(reinterpret_cast<const float4*>(place));
}

// Eight pairs, an element of each in both chunks. `angles` starts at the first one's cosine.
__device__ __forceinline__ void rotate_halves(float (&values)[2][kChunk], const float* angles,
                                              int32_t rotary_dim) {
#pragma unroll
  for (int i = 0; i < kChunk; i += 4) {
    float cosines[4], sines[4];
    load_angles(cosines, angles + i);
    load_angles(sines, angles + rotary_dim / 2 + i);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      rotate_pair(values[0][i + j], values[1][i + j], cosines[j], sines[j]);
    }
  }
}

// Four pairs of neighbours. `angles` starts at the first one's cosine.
__device__ __forceinline__ void rotate_neighbours(float (&values)[kChunk], const float* angles,
                                                  int32_t rotary_dim) {
  float cosines[4], sines[4];
  load_angles(cosines, angles);
  load_angles(sines, angles + rotary_dim / 2);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    rotate_pair(values[2 * j], values[2 * j + 1], cosines[j], sines[j]);
  }
}

// The compiler makes four stores of four bytes of an assignment.
template <bool kIsVector>
__device__ __forceinline__ void store_words(void* place, uint4 words) {
  if constexpr (kIsVector) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
  } else {
    *reinterpret_cast<uint4*>(place) = words;
  }
}

template <bool kIsVector>
__device__ __forceinline__ void store_words(void* place, uint2 words) {
  if constexpr (kIsVector) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(place), "r"(words.x), "r"(words.y)
                 : "memory");
  } else {
    *reinterpret_cast<uint2*>(place) = words;
  }
}

template <class Kv, bool kIsVector>
__device__ __forceinline__ void store_chunk(void* pool, int64_t element,
                                            const float (&values)[kChunk], float scale) {
  if constexpr (kIsQuantised<Kv>) {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      // Divided, not multiplied by the inverse: the specification rounds the quotient.
      words[i] = quantise_two<Kv>(__fdiv_rn(values[4 * i], scale),
                                  __fdiv_rn(values[4 * i + 1], scale)) |
                 quantise_two<Kv>(__fdiv_rn(values[4 * i + 2], scale),
                                  __fdiv_rn(values[4 * i + 3], scale)) << 16;
    }
    store_words<kIsVector>(static_cast<Kv*>(pool) + element, make_uint2(words[0], words[1]));
  } else {
    store_words<kIsVector>(
        static_cast<Kv*>(pool) + element,
        make_uint4(pack<Kv>(values[0], values[1]), pack<Kv>(values[2], values[3]),
                   pack<Kv>(values[4], values[5]), pack<Kv>(values[6], values[7])));
  }
}

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
    if (token >= end) return {0, -1};
    sequence = find_sequence(offsets, args.num_seqs, token);
  }
  // Nothing here waits for the length: the row's first pages are read beside it.
  const int32_t* row = args.page_table + static_cast<int64_t>(sequence) * args.table_width;
  const int32_t lane_page = table_entry(row, args.table_width, threadIdx.x & 31);
  const int64_t position = static_cast<int64_t>(args.past_lens[sequence]) + token - offsets[sequence];
  const int64_t index = position / kTokensPerPage;
  int32_t page = __shfl_sync(kAllLanes, lane_page, static_cast<int>(index) & 31);
  if (index >= 32) page = index < args.table_width ? row[index] : -1;
  return {position, token < end && is_page(page, args.num_pages) ? page : -1};
}

// One item of a token: which head of keys or values, and where its two chunks start.
template <int kHeadDim, int kValueDim, bool kHasRope>
struct Item {
  static constexpr int kKeyItems = kHeadDim / (2 * kChunk), kValueItems = kValueDim / (2 * kChunk);
  static_assert(kHeadDim % (2 * kChunk) == 0 && kValueDim % (2 * kChunk) == 0,
                "heads are whole items");
  bool is_key;
  int32_t head, dim, index;
  int32_t starts[2];

  __device__ __forceinline__ Item(const AppendArgs& args, int32_t item) {
    const int32_t key_items = args.num_kv_heads * kKeyItems;
    is_key = item < key_items;
    const int32_t local = is_key ? item : item - key_items;
    head = is_key ? local / kKeyItems : local / kValueItems;
    index = local - head * (is_key ? kKeyItems : kValueItems);
    dim = is_key ? kHeadDim : kValueDim;
    // The part that turns, the part behind it, or all: two chunks half of it apart.
    int32_t begin = 0, length = dim;
    if (kHasRope && is_key && turns_whole_chunks(args)) {
      const bool turns = index * 2 * kChunk < args.rotary_dim;
      begin = turns ? 0 : args.rotary_dim;
      length = turns ? args.rotary_dim : dim - args.rotary_dim;
    }
    starts[0] = begin + (index - begin / (2 * kChunk)) * kChunk, starts[1] = starts[0] + length / 2;
  }

  static __device__ __forceinline__ bool turns_whole_chunks(const AppendArgs& args) {
    return args.rotary_dim % (2 * kChunk) == 0;
  }

  template <class Activation>
  __device__ __forceinline__ const Activation* source(const AppendArgs& args, int32_t token) const {
    return static_cast<const Activation*>(is_key ? args.key : args.value) +
           token * (is_key ? args.key_token_stride : args.value_token_stride) + head * dim;
  }
};

template <class Activation, class ItemPlace, bool kHasRope>
__device__ __forceinline__ void rotate(float (&values)[2][kChunk], const AppendArgs& args,
                                       const ItemPlace& item, int32_t token, int64_t position) {
  if constexpr (kHasRope) {
    if (!item.is_key || item.starts[0] >= args.rotary_dim) return;
    const float* angles = args.rope_cos_sin + position * args.rotary_dim;
    if (!ItemPlace::turns_whole_chunks(args)) {
      const auto* head = item.template source<Activation>(args, token);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        rotate_elements(values[i], head, item.starts[i], angles, args.rope, args.rotary_dim);
      }
    } else if (args.rope == kRopeInterleaved) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        rotate_neighbours(values[i], angles + item.starts[i] / 2, args.rotary_dim);
      }
    } else {
      rotate_halves(values, angles + item.starts[0], args.rotary_dim);
    }
  }
}

template <class Activation, class Kv, int kFeatures, class ItemPlace>
__device__ __forceinline__ void append_item(const AppendArgs& args, const ItemPlace& item,
                                            const uint4 (&raw)[2], int32_t token,
                                            TokenPlace place) {
  constexpr bool kHasRope = (kFeatures & kRopeFeature) != 0;
  constexpr bool kIsVector = (kFeatures & kVectorStores) != 0;
  void* pool = item.is_key ? args.key_pool : args.value_pool;
  const auto slot = static_cast<int32_t>(place.position % kTokensPerPage);
  const int64_t row = tile_offset(place.page, args.num_kv_heads, item.head, item.dim) +
                      static_cast<int64_t>(slot * item.dim);
  if constexpr (kSameType<Activation, Kv>) {
    if (!kHasRope || !item.is_key) {  // bits as they are
#pragma unroll
      for (int i = 0; i < 2; i++) {
        store_words<kIsVector>(static_cast<Kv*>(pool) + row + item.starts[i], raw[i]);
      }
      return;
    }
  }
  float values[2][kChunk];
  unpack_chunk<Activation>(values[0], raw[0]);
  unpack_chunk<Activation>(values[1], raw[1]);
  rotate<Activation, ItemPlace, kHasRope>(values, args, item, token, place.position);
  const float scale =
      kIsQuantised<Kv> ? args.kv_scales[(item.is_key ? 0 : args.num_kv_heads) + item.head] : 1.f;
#pragma unroll
  for (int i = 0; i < 2; i++) store_chunk<Kv, kIsVector>(pool, row + item.starts[i], values[i], scale);
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
__global__ void __launch_bounds__(kAppendThreads, append_blocks(kFeatures))
    append(const __grid_constant__ AppendArgs args) {
  constexpr bool kHasRope = (kFeatures & kRopeFeature) != 0;
  constexpr int kItemsInFlight = items_in_flight(kFeatures);
  using ItemPlace = Item<kHeadDim, kValueDim, kHasRope>;
  __shared__ TokenPlace places[kMostTokensPerBlock];
  allow_next_kernel();
  const int32_t first = blockIdx.x * args.tokens_per_block, warp = threadIdx.x / 32;
  const int32_t count = min(args.tokens_per_block, args.num_tokens - first);
  const int32_t items = args.num_kv_heads * (ItemPlace::kKeyItems + ItemPlace::kValueItems);
  const int32_t stride = gridDim.y * kAppendThreads, total = count * items;
  wait_for_previous_kernel();
  clear_counters(args);
  const int32_t own = blockIdx.y * kAppendThreads + threadIdx.x;
  for (int32_t base = 0; base < total; base += stride * kItemsInFlight) {
    uint4 raw[kItemsInFlight][2];
#pragma unroll
    for (int k = 0; k < kItemsInFlight; k++) {
      const int32_t i = base + k * stride + own, row = i / items;
      if (i >= total) continue;
      const ItemPlace item(args, i - row * items);
      const auto* source = item.template source<Activation>(args, first + row);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        raw[k][c] = *reinterpret_cast<const uint4*>(source + item.starts[c]);
      }
    }
    if (base == 0) {  // found while the first items are on their way
      if (warp < count) {
        const TokenPlace place = find_token(args, first + warp);
        if (threadIdx.x % 32 == 0) places[warp] = place;
      }
      __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < kItemsInFlight; k++) {
      const int32_t i = base + k * stride + own, row = i / items;
      if (i >= total || places[row].page < 0) continue;
      append_item<Activation, Kv, kFeatures>(args, ItemPlace(args, i - row * items), raw[k],
                                            first + row, places[row]);
    }
  }
}

}  // namespace paged_trt
