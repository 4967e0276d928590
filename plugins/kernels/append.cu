// Append: rotate the new keys, quantise, and write keys and values through the page table.
//
// Grid: (tiles of tokens_per_block token rows, slices of a tile's chunks). A thread writes chunks of
// eight elements: one 16-byte load, one store. Padding rows and pages that do not exist are not
// written. Queries are rotated where they are read, by the attention kernel: here they would cost
// a copy of their own.
#include "dependent_launch.cuh"
#include "page_table.cuh"
#include "quantise.cuh"
#include "rope.cuh"
#include "sequences.cuh"

namespace paged_trt {

constexpr int kChunk = 8;  // elements
constexpr int kAppendThreads = 256;
constexpr int kMostTokensPerBlock = kAppendThreads / 32;  // a warp finds the place of one
constexpr int kChunksInFlight = 4;  // per thread: loads that do not wait for each other

template <class Activation>
__device__ __forceinline__ void unpack_chunk(float (&values)[kChunk], uint4 raw) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = unpack_pair<Activation>(words[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
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

// The same with 16-byte loads: where a chunk's partners are a chunk, and so are its angles.
template <class Activation>
__device__ __forceinline__ void rotate_whole_chunk(float (&values)[kChunk], const Activation* head,
                                                   int32_t first, const float* angles,
                                                   int32_t rope, int32_t rotary_dim) {
  const bool is_interleaved = rope == kRopeInterleaved;
  float partners[kChunk], table[2][kChunk];
  const RopePlace place = rope_place(first, rotary_dim, rope);
  if (!is_interleaved) {
    unpack_chunk<Activation>(partners, *reinterpret_cast<const uint4*>(head + place.partner));
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float4* row = reinterpret_cast<const float4*>(angles + i * (rotary_dim / 2) + place.angle);
    *reinterpret_cast<float4*>(&table[i][0]) = row[0];
    *reinterpret_cast<float4*>(&table[i][4]) = is_interleaved ? make_float4(0, 0, 0, 0) : row[1];
  }
#pragma unroll
  for (int i = 0; i < kChunk; i += 2) {
    const float own[2] = {values[i], values[i + 1]};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      values[i + j] =
          is_interleaved
              ? turned(own[j], own[1 - j], table[0][i / 2], table[1][i / 2], j == 0)
              : turned(own[j], partners[i + j], table[0][i + j], table[1][i + j], place.is_first);
    }
  }
}

template <class Kv>
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
    *reinterpret_cast<uint2*>(static_cast<Kv*>(pool) + element) = make_uint2(words[0], words[1]);
  } else {
    *reinterpret_cast<uint4*>(static_cast<Kv*>(pool) + element) =
        make_uint4(pack<Kv>(values[0], values[1]), pack<Kv>(values[2], values[3]),
                   pack<Kv>(values[4], values[5]), pack<Kv>(values[6], values[7]));
  }
}

// Where a token's key and value go.
struct TokenPlace {
  int64_t position;
  int32_t page;  // -1: nowhere
};

__device__ __forceinline__ TokenPlace find_token(const AppendArgs& args, int32_t token) {
  const int32_t* offsets = args.query_start_offsets;
  if (token >= offsets[args.num_seqs]) return {0, -1};
  // T == N: one token per sequence; otherwise the row is searched for.
  const int32_t sequence = args.num_tokens == args.num_seqs
                               ? token
                               : find_sequence(offsets, args.num_seqs, token);
  const int64_t position = static_cast<int64_t>(args.past_lens[sequence]) + token - offsets[sequence];
  const int64_t index = position / kTokensPerPage;
  const int32_t* row = args.page_table + static_cast<int64_t>(sequence) * args.table_width;
  const int32_t page = index < args.table_width ? row[index] : -1;
  return {position, is_page(page, args.num_pages) ? page : -1};
}

// One chunk of a token: which head of keys or values, and where in it.
template <int kHeadDim, int kValueDim>
struct ChunkPlace {
  static_assert(kHeadDim % kChunk == 0 && kValueDim % kChunk == 0, "heads are whole chunks");
  static constexpr int kKeyChunks = kHeadDim / kChunk, kValueChunks = kValueDim / kChunk;
  bool is_key;
  int32_t head, dim, first;

  __device__ __forceinline__ ChunkPlace(int32_t chunk, int32_t num_kv_heads) {
    const int32_t key_chunks = num_kv_heads * kKeyChunks;
    is_key = chunk < key_chunks;
    const int32_t local = is_key ? chunk : chunk - key_chunks;
    head = is_key ? local / kKeyChunks : local / kValueChunks;
    dim = is_key ? kHeadDim : kValueDim;
    first = local * kChunk - head * dim;
  }

  template <class Activation>
  __device__ __forceinline__ const Activation* source(const AppendArgs& args, int32_t token) const {
    return static_cast<const Activation*>(is_key ? args.key : args.value) +
           token * (is_key ? args.key_token_stride : args.value_token_stride) + head * dim;
  }
};

template <class Activation, class Kv, class Chunk>
__device__ __forceinline__ void append_chunk(const AppendArgs& args, const Chunk& chunk, uint4 raw,
                                             int32_t token, TokenPlace place) {
  const bool turns = chunk.is_key && args.rope != 0 && chunk.first < args.rotary_dim;
  void* pool = chunk.is_key ? args.key_pool : args.value_pool;
  const auto slot = static_cast<int32_t>(place.position % kTokensPerPage);
  const int64_t element = tile_offset(place.page, args.num_kv_heads, chunk.head, chunk.dim) +
                          slot * chunk.dim + chunk.first;
  if constexpr (kSameType<Activation, Kv>) {
    if (!turns) {  // bits as they are
      *reinterpret_cast<uint4*>(static_cast<Kv*>(pool) + element) = raw;
      return;
    }
  }
  float values[kChunk];
  unpack_chunk<Activation>(values, raw);
  if (turns) {
    const float* angles = args.rope_cos_sin + place.position * args.rotary_dim;
    const auto* head = chunk.template source<Activation>(args, token);
    if (args.rotary_dim % (2 * kChunk) == 0) {
      rotate_whole_chunk(values, head, chunk.first, angles, args.rope, args.rotary_dim);
    } else {
      rotate_elements(values, head, chunk.first, angles, args.rope, args.rotary_dim);
    }
  }
  const float scale =
      kIsQuantised<Kv> ? args.kv_scales[(chunk.is_key ? 0 : args.num_kv_heads) + chunk.head] : 1.f;
  store_chunk<Kv>(pool, element, values, scale);
}

// The counters of the decode behind: no block of it can have touched them yet.
__device__ __forceinline__ void clear_counters(const AppendArgs& args) {
  if (blockIdx.y != 0) return;
  for (int32_t i = blockIdx.x * kAppendThreads + threadIdx.x; i < args.num_counters;
       i += gridDim.x * kAppendThreads) {
    args.counters[i] = 0;
  }
}

template <class Activation, class Kv, int kHeadDim, int kValueDim>
__global__ void __launch_bounds__(kAppendThreads) append(const __grid_constant__ AppendArgs args) {
  using Chunk = ChunkPlace<kHeadDim, kValueDim>;
  __shared__ TokenPlace places[kMostTokensPerBlock];
  allow_next_kernel();
  const int32_t first = blockIdx.x * args.tokens_per_block, warp = threadIdx.x / 32;
  const int32_t count = min(args.tokens_per_block, args.num_tokens - first);
  const int32_t chunks = args.num_kv_heads * (Chunk::kKeyChunks + Chunk::kValueChunks);
  const int32_t stride = gridDim.y * kAppendThreads;
  wait_for_previous_kernel();
  clear_counters(args);
  for (int32_t i0 = blockIdx.y * kAppendThreads + threadIdx.x, round = 0; round * stride * kChunksInFlight < count * chunks;
       round++, i0 += stride * kChunksInFlight) {
    uint4 raw[kChunksInFlight];
#pragma unroll
    for (int k = 0; k < kChunksInFlight; k++) {
      const int32_t i = i0 + k * stride;
      if (i >= count * chunks) continue;
      const Chunk chunk(i % chunks, args.num_kv_heads);
      raw[k] = *reinterpret_cast<const uint4*>(
          chunk.template source<Activation>(args, first + i / chunks) + chunk.first);
    }
    if (round == 0) {  // found while the first chunks are on their way
      if (warp < count) {
        const TokenPlace place = find_token(args, first + warp);
        if (threadIdx.x % 32 == 0) places[warp] = place;
      }
      __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < kChunksInFlight; k++) {
      const int32_t i = i0 + k * stride, row = i / chunks;
      if (i >= count * chunks || places[row].page < 0) continue;
      append_chunk<Activation, Kv>(args, Chunk(i % chunks, args.num_kv_heads), raw[k], first + row,
                                   places[row]);
    }
  }
}

}  // namespace paged_trt
