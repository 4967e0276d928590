// The append kernel as functions of a shared library; see device.h.
#include "device.h"
#include "vectors.h"

#define asm(...)  // what needs machine code is not called here

inline int max(int left, int right) { return left < right ? right : left; }
inline long long min(long long left, long long right) { return left < right ? left : right; }
inline float __fdividef(float left, float right) { return left / right; }
inline float __fdiv_rn(float left, float right) { return left / right; }
inline float __frcp_rn(float value) { return 1.f / value; }
inline float __fmaf_rn(float left, float right, float sum) { return std::fma(left, right, sum); }
inline int __float2int_rn(float value) {  // saturates, NaN to 0
  if (std::isnan(value)) return 0;
  return static_cast<int>(std::nearbyint(std::fmin(std::fmax(value, -2147483648.f), 2147483520.f)));
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
unsigned __byte_perm(unsigned, unsigned, unsigned);
template <class T>
T __ldg(const T* place) {
  return *place;
}
inline host::Index gridDim;

#include "element_types.cuh"

namespace paged_trt {

// bfloat16 whose conversions are no machine code.
struct Word {
  uint16_t bits;
};
template <class T>
float2 unpack_pair(uint32_t pair);
template <>
inline float2 unpack_pair<Word>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

}  // namespace paged_trt

#include "append.cu"

namespace paged_trt {

inline uint32_t rounded(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return bits >> 16 | 0x40u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
template <>
inline unsigned pack<Word>(float low, float high) {
  return rounded(low) | rounded(high) << 16;
}

template <class Kv, int head_dim, int value_head_dim, int features>
void run(const AppendArgs& args, const unsigned (&grid)[2]) {
  gridDim = {grid[0], grid[1], 1};
  for (unsigned x = 0; x < grid[0]; x++) {
    for (unsigned y = 0; y < grid[1]; y++) {
      blockIdx = {x, y, 0};
      host::run_block(kAppendThreads,
                      [&] { append<Word, Kv, head_dim, value_head_dim, features>(args); });
    }
  }
}

}  // namespace paged_trt

#define APPEND(name, kv, head_dim, value_head_dim, features)                                  \
  extern "C" void name(const paged_trt::AppendArgs* args, const unsigned (*grid)[2]) {        \
    paged_trt::run<paged_trt::kv, head_dim, value_head_dim, features>(*args, *grid);          \
  }

APPEND(append_bfloat16_128_128_0, Word, 128, 128, 0)
APPEND(append_bfloat16_128_128_4, Word, 128, 128, 4)
APPEND(append_bfloat16_80_64_4, Word, 80, 64, 4)
APPEND(append_float8_128_128_4, Float8, 128, 128, 4)
APPEND(append_float8_96_256_0, Float8, 96, 256, 0)
APPEND(append_int8_80_64_4, Int8, 80, 64, 4)

// x / scale as the kernel has it, where it does not fall back on a division.
extern "C" void quotients(const float* values, const float* scales, float* found, long count) {
  for (long i = 0; i < count; i++) {
    found[i] = paged_trt::quotient(values[i], scales[i], 1.f / scales[i]);
  }
}
