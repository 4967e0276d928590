// Warpgroup products (wgmma, sm_90a): descriptors of operands in shared memory, and m64nNk16.
//
// Accumulator of m64nN: d[4 * j + {0, 1}] is row 16 * warp + lane / 4, columns 8 * j + 2 *
// (lane % 4) + {0, 1}; d[4 * j + {2, 3}] the same columns of row + 8. The A operand in registers
// has the layout of m16n8k16, so an accumulator of 16 columns, packed, is that of one k16 step.
//
// Operands in shared memory have the 128-byte swizzle: rows of 64 elements, the 16-byte chunk index
// xored with the row modulo 8. A box is so many such rows; a wider tile is one box behind another.
#pragma once

#include "element_types.cuh"

namespace paged_trt {

// Orders register accesses with the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `pending` groups of this warpgroup are in flight.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving uses of an accumulator across a wait.
template <int count>
__device__ __forceinline__ void pin(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Descriptor: bits 0-13 address / 16, 16-29 leading offset / 16, 32-45 stride offset / 16, 62-63
// swizzle (1: 128 bytes). The stride offset leads to the next eight rows, 1,024 bytes on.
constexpr uint64_t kSwizzledRows = (uint64_t{1024 / 16} << 32) | (uint64_t{1} << 62);

// Rows are the M or N index, columns the k index: a k16 step is 32 bytes on, and after four of them
// the next box.
__device__ __forceinline__ uint64_t by_rows(unsigned address) {
  return ((address & 0x3ffff) >> 4) | (uint64_t{1} << 16) | kSwizzledRows;
}

// Rows are the k index, columns the N index: a k16 step is 16 rows, 2,048 bytes on. The leading
// offset leads to the next 64 columns.
template <int box_bytes>
__device__ __forceinline__ uint64_t by_columns(unsigned address) {
  return ((address & 0x3ffff) >> 4) | (uint64_t{box_bytes / 16} << 16) | kSwizzledRows;
}

// d (+)= a b, a [64, 16] and b [16, columns]. `shared` takes a from shared memory and b^T by rows;
// `registers` takes a from registers and b by columns.
template <class Element, int columns>
struct Wgmma;

#define PAGED_TRT_ACCUMULATORS_64                                                                  \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "    \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define PAGED_TRT_ACCUMULATORS_128                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "    \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "     \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "     \
  "%56, %57, %58, %59, %60, %61, %62, %63}"
#define PAGED_TRT_ACCUMULATORS_256                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "    \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "     \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "     \
  "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "     \
  "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "     \
  "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "       \
  "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, "     \
  "%123, %124, %125, %126, %127}"
#define PAGED_TRT_OUTPUTS_AT_8(i)                                                                  \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),      \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define PAGED_TRT_OUTPUTS_AT_32(i)                                                                 \
  PAGED_TRT_OUTPUTS_AT_8(i), PAGED_TRT_OUTPUTS_AT_8(i + 8), PAGED_TRT_OUTPUTS_AT_8(i + 16),        \
      PAGED_TRT_OUTPUTS_AT_8(i + 24)
#define PAGED_TRT_OUTPUTS_64 PAGED_TRT_OUTPUTS_AT_32(0)
#define PAGED_TRT_OUTPUTS_128 PAGED_TRT_OUTPUTS_AT_32(0), PAGED_TRT_OUTPUTS_AT_32(32)
#define PAGED_TRT_OUTPUTS_256                                                                      \
  PAGED_TRT_OUTPUTS_AT_32(0), PAGED_TRT_OUTPUTS_AT_32(32), PAGED_TRT_OUTPUTS_AT_32(64),            \
      PAGED_TRT_OUTPUTS_AT_32(96)

#define PAGED_TRT_WGMMA(Element, type, columns, a0, a1, a2, a3, a4)                                \
  template <>                                                                                      \
  struct Wgmma<Element, columns> {                                                                 \
    static __device__ __forceinline__ void shared(float (&d)[columns / 2], uint64_t a, uint64_t b, \
                                                  int accumulate) {                                \
      asm volatile(                                                                                \
          "{\n.reg .pred p;\nsetp.ne.b32 p, " a2 ", 0;\n"                                          \
          "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " "                \
          PAGED_TRT_ACCUMULATORS_##columns ", " a0 ", " a1 ", p, 1, 1, 0, 0;\n}\n"                 \
          : PAGED_TRT_OUTPUTS_##columns                                                            \
          : "l"(a), "l"(b), "r"(accumulate));                                                      \
    }                                                                                              \
    static __device__ __forceinline__ void registers(float (&d)[columns / 2],                      \
                                                     const uint32_t (&a)[4], uint64_t b) {         \
      asm volatile(                                                                                \
          "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                               \
          "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " "                \
          PAGED_TRT_ACCUMULATORS_##columns ", {" a0 ", " a1 ", " a2 ", " a3 "}, " a4               \
          ", p, 1, 1, 1;\n}\n"                                                                     \
          : PAGED_TRT_OUTPUTS_##columns                                                            \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                   \
    }                                                                                              \
  };
PAGED_TRT_WGMMA(BFloat16, "bf16", 64, "%32", "%33", "%34", "%35", "%36")
PAGED_TRT_WGMMA(BFloat16, "bf16", 128, "%64", "%65", "%66", "%67", "%68")
PAGED_TRT_WGMMA(BFloat16, "bf16", 256, "%128", "%129", "%130", "%131", "%132")
PAGED_TRT_WGMMA(Float16, "f16", 64, "%32", "%33", "%34", "%35", "%36")
PAGED_TRT_WGMMA(Float16, "f16", 128, "%64", "%65", "%66", "%67", "%68")
PAGED_TRT_WGMMA(Float16, "f16", 256, "%128", "%129", "%130", "%131", "%132")

#undef PAGED_TRT_WGMMA
#undef PAGED_TRT_OUTPUTS_AT_32
#undef PAGED_TRT_OUTPUTS_AT_8
#undef PAGED_TRT_OUTPUTS_64
#undef PAGED_TRT_ACCUMULATORS_64
#undef PAGED_TRT_OUTPUTS_128
#undef PAGED_TRT_ACCUMULATORS_128
#undef PAGED_TRT_OUTPUTS_256
#undef PAGED_TRT_ACCUMULATORS_256

}  // namespace paged_trt
