// Tensor-core products of one warp, and what loads and packs their operands (sm_80 and later).
//
// m16n8k16, lane = 4 * row + pair: A holds rows {row, row + 8} x columns 2 * pair + {0, 1} and
// the same + 8, B columns `row` x the same k, and the accumulator rows {row, row + 8} x columns
// 2 * pair + {0, 1}.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace paged_trt {

// d += a * b, products of `Element` summed in float32.
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const unsigned (&a)[4],
                                                     const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4],
                                                            const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit elements; lane i holds the address of row i % 8 of matrix i / 8.
// Matrix j lands in m[j]: lane = 4 * row + pair receives elements 2 * pair + {0, 1} of `row`.
__device__ __forceinline__ void load_matrices(unsigned (&m)[4], unsigned shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_row)
               : "memory");
}

// The same with each matrix transposed: elements 2 * pair + {0, 1} of column `row`.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&m)[4], unsigned shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_row)
               : "memory");
}

// Transpose of an 8 x 8 matrix of 16-bit elements: before and after, lane = 4 * row + pair holds
// elements 2 * pair + {0, 1} of `row`.
__device__ __forceinline__ unsigned transpose_matrix(unsigned m) {
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(m));
  return transposed;
}

// Two float32 rounded to `Element`, `low` in the low half.
template <typename Element>
__device__ __forceinline__ unsigned pack(float low, float high);

template <>
__device__ __forceinline__ unsigned pack<__half>(float low, float high) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ unsigned pack<__nv_bfloat16>(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace paged_trt
