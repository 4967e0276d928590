// Query rows of a tile: from device memory to shared memory, rotated there where the op rotates.
//
// A row is one (token, query head) of a key head's group, token by token. Three warps that would
// idle do this for the next tile while the products of this one run.
#pragma once

#include "conversions.cuh"
#include "cp_async.cuh"
#include "rope.cuh"
#include "tma.cuh"

namespace paged_trt {

constexpr int kLoaderThreads = 96;
constexpr int kLoaderBarrier = 3;
constexpr int kQueryRows = 128;

// Where the 16-byte chunk of a row lies in a tile of 64-column boxes with the 128-byte swizzle.
template <int rows>
__device__ __forceinline__ unsigned swizzled(int row, int chunk) {
  return (chunk / 8) * (rows * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

template <class Element, int head_dim, int group_size>
struct QueryLoader {
  static constexpr int kChunks = head_dim / 8;

  // Threads 32 to 127 of the block call this, and `finish` after it. Rows past the tile's end
  // become zero.
  static __device__ __forceinline__ void start(const PrefillSm90Args& args, unsigned tile,
                                               int32_t first_token, int32_t num_rows,
                                               int32_t kv_head) {
    const int thread = thread_here() - 32;
    const Element* source = static_cast<const Element*>(args.query) +
                            int64_t{first_token} * args.query_token_stride +
                            kv_head * (group_size * head_dim);
#pragma unroll 2
    for (int index = thread; index < kQueryRows * kChunks; index += kLoaderThreads) {
      const int row = index / kChunks, chunk = index % kChunks;
      const int token = row / group_size, head = row % group_size;
      copy_async_16(tile + swizzled<kQueryRows>(row, chunk),
                    source + token * args.query_token_stride + head * head_dim + chunk * 8,
                    row < num_rows);
    }
    commit_copies();
  }

  static __device__ __forceinline__ void finish(const PrefillSm90Args& args, unsigned tile,
                                                int32_t num_rows, int32_t position) {
    wait_copies<0>();
    if (args.rope != 0) {
      sync_threads(kLoaderBarrier, kLoaderThreads);  // a thread rotates what others have copied
      rotate_rows(args, tile, num_rows, position, thread_here() - 32);
    }
    fence_async_proxy();
  }

  // Four elements at a time: a pair's elements are both in reach, and few registers are needed.
  static __device__ __forceinline__ void rotate_rows(const PrefillSm90Args& args, unsigned tile,
                                                     int32_t num_rows, int32_t position,
                                                     int thread) {
    const int half = args.rotary_dim / 2;
    const bool is_split = args.rope == kRopeHalfSplit;
    const int pieces = (is_split ? half : args.rotary_dim) / 4;
    const int num_tokens = (num_rows + group_size - 1) / group_size;
    for (int index = thread; index < num_tokens * pieces; index += kLoaderThreads) {
      const int token = index / pieces, piece = index - token * pieces;
      const float* angles = args.rope_cos_sin + (int64_t{position} + token) * args.rotary_dim;
      const unsigned rows = token * group_size;
      if (is_split) {
        const float4 cosines = *reinterpret_cast<const float4*>(angles + piece * 4);
        const float4 sines = *reinterpret_cast<const float4*>(angles + half + piece * 4);
#pragma unroll 1
        for (int head = 0; head < group_size; ++head) {
          rotate_halves(place(tile, rows + head, piece * 4),
                        place(tile, rows + head, half + piece * 4), cosines, sines);
        }
      } else {
        const float2 cosines = *reinterpret_cast<const float2*>(angles + piece * 2);
        const float2 sines = *reinterpret_cast<const float2*>(angles + half + piece * 2);
#pragma unroll 1
        for (int head = 0; head < group_size; ++head) {
          rotate_neighbours(place(tile, rows + head, piece * 4), cosines, sines);
        }
      }
    }
  }

  static __device__ __forceinline__ unsigned place(unsigned tile, int row, int element) {
    return tile + swizzled<kQueryRows>(row, element / 8) + element % 8 * 2;
  }

  static __device__ __forceinline__ float2 turned(float first, float second, float cosine,
                                                  float sine) {
    float2 pair = make_float2(__fsub_rn(__fmul_rn(first, cosine), __fmul_rn(second, sine)),
                              __fadd_rn(__fmul_rn(second, cosine), __fmul_rn(first, sine)));
    if constexpr (kSameType<Element, Float16>) {
      pair.x = clamp_keeping_nan(pair.x, 65504.f);
      pair.y = clamp_keeping_nan(pair.y, 65504.f);
    }
    return pair;
  }

  static __device__ __forceinline__ uint2 read(unsigned address) {
    uint2 words;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address));
    return words;
  }

  static __device__ __forceinline__ void write(unsigned address, uint32_t low, uint32_t high) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high) : "memory");
  }

  static __device__ __forceinline__ void rotate_halves(unsigned low, unsigned high, float4 cosines,
                                                       float4 sines) {
    const uint2 first = read(low), second = read(high);
    const float2 a = unpack_pair<Element>(first.x), b = unpack_pair<Element>(first.y);
    const float2 c = unpack_pair<Element>(second.x), d = unpack_pair<Element>(second.y);
    const float2 p0 = turned(a.x, c.x, cosines.x, sines.x);
    const float2 p1 = turned(a.y, c.y, cosines.y, sines.y);
    const float2 p2 = turned(b.x, d.x, cosines.z, sines.z);
    const float2 p3 = turned(b.y, d.y, cosines.w, sines.w);
    write(low, pack<Element>(p0.x, p1.x), pack<Element>(p2.x, p3.x));
    write(high, pack<Element>(p0.y, p1.y), pack<Element>(p2.y, p3.y));
  }

  static __device__ __forceinline__ void rotate_neighbours(unsigned address, float2 cosines,
                                                           float2 sines) {
    const uint2 words = read(address);
    const float2 a = unpack_pair<Element>(words.x), b = unpack_pair<Element>(words.y);
    const float2 p0 = turned(a.x, a.y, cosines.x, sines.x);
    const float2 p1 = turned(b.x, b.y, cosines.y, sines.y);
    write(address, pack<Element>(p0.x, p0.y), pack<Element>(p1.x, p1.y));
  }
};

}  // namespace paged_trt
