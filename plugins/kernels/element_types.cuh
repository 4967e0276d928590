// Element types of activations and pools, and the integers that NVRTC does not name.
//
// Kernels move elements as raw words; the type says what the bits mean.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch_args.cuh"

namespace paged_trt {

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

using Float16 = __half;
using BFloat16 = __nv_bfloat16;
// Tags of one byte: kernels never compute in these types.
struct Float8 {  // e4m3, no infinities
  uint8_t bits;
};
struct Int8 {
  uint8_t bits;
};

template <class A, class B>
constexpr bool kSameType = false;
template <class A>
constexpr bool kSameType<A, A> = true;

// Whether a pool of this type carries a float32 scale per head.
template <class Kv>
constexpr bool kIsQuantised = sizeof(Kv) == 1;

// Type in which the tensor cores multiply. 8-bit pools always go through fp16: both 8-bit types
// are exact in it, its conversion is one instruction on sm_89 and it keeps NaN.
template <class Activation, class Kv>
struct MmaTypeOf {
  using type = Activation;
};
template <class Activation>
struct MmaTypeOf<Activation, Float8> {
  using type = Float16;
};
template <class Activation>
struct MmaTypeOf<Activation, Int8> {
  using type = Float16;
};
template <class Activation, class Kv>
using MmaType = typename MmaTypeOf<Activation, Kv>::type;

constexpr int kTokensPerPage = 128;

}  // namespace paged_trt
