// Append: rotate the new keys, quantise, and write keys and values through the page table.
//
// Grid: (token rows, slices of a token's chunks). A thread writes chunks of eight elements: one
// 16-byte load, one store. Padding rows and pages that do not exist are not written.
#include "dependent_launch.cuh"
#include "page_table.cuh"
#include "quantise.cuh"
#include "rope.cuh"
#include "sequences.cuh"

namespace paged_trt {

constexpr int kChunk = 8;  // elements

template <class Activation>
__device__ __forceinline__ void unpack_chunk(float (&values)[kChunk], uint4 raw) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = unpack_pair<Activation>(words[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}

// `head` is the whole key head, `first` the chunk's first element.
template <class Activation>
__device__ __forceinline__ void rotate_chunk(float (&values)[kChunk], const Activation* head,
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

template <class Activation, class Kv, int kHeadDim, int kValueDim>
__global__ void __launch_bounds__(256) append(const __grid_constant__ AppendArgs args) {
  static_assert(kHeadDim % kChunk == 0 && kValueDim % kChunk == 0, "heads are whole chunks");
  constexpr int kKeyChunks = kHeadDim / kChunk, kChunks = kKeyChunks + kValueDim / kChunk;
  allow_next_kernel();
  const int32_t token = blockIdx.x;
  const TokenPlace place = find_token(args, token);
  wait_for_previous_kernel();
  if (place.page < 0) return;
  const int32_t slot = static_cast<int32_t>(place.position % kTokensPerPage);
  const int32_t key_chunks = args.num_kv_heads * kKeyChunks;
  const int32_t stride = gridDim.y * blockDim.x;
  for (int32_t i = blockIdx.y * blockDim.x + threadIdx.x; i < args.num_kv_heads * kChunks;
       i += stride) {
    const bool is_key = i < key_chunks;
    const int32_t local = is_key ? i : i - key_chunks;
    const int32_t head = is_key ? local / kKeyChunks : local / (kChunks - kKeyChunks);
    const int32_t dim = is_key ? kHeadDim : kValueDim;
    const int32_t first = local * kChunk - head * dim;
    const auto* source =
        static_cast<const Activation*>(is_key ? args.key : args.value) +
        token * (is_key ? args.key_token_stride : args.value_token_stride) + head * dim;
    const uint4 raw = *reinterpret_cast<const uint4*>(source + first);
    const bool turns = is_key && args.rope != 0 && first < args.rotary_dim;
    void* pool = is_key ? args.key_pool : args.value_pool;
    const int64_t element =
        tile_offset(place.page, args.num_kv_heads, head, dim) + slot * dim + first;
    if constexpr (kSameType<Activation, Kv>) {
      if (!turns) {  // bits as they are
        *reinterpret_cast<uint4*>(static_cast<Kv*>(pool) + element) = raw;
        continue;
      }
    }
    float values[kChunk];
    unpack_chunk<Activation>(values, raw);
    if (turns) {
      const float* angles = args.rope_cos_sin + place.position * args.rotary_dim;
      rotate_chunk(values, source, first, angles, args.rope, args.rotary_dim);
    }
    const float scale =
        kIsQuantised<Kv> ? args.kv_scales[(is_key ? 0 : args.num_kv_heads) + head] : 1.f;
    store_chunk<Kv>(pool, element, values, scale);
  }
}

}  // namespace paged_trt
