// The gather kernel as a function of a shared library; see device.h. An element of the stand-in
// types tells after its conversion what it was, so that every byte's way can be followed.
#include "device.h"
#include "vectors.h"

#define asm(...)  // what needs machine code is not called here

inline int max(int left, int right) { return left < right ? right : left; }
inline float __fdividef(float left, float right) { return left / right; }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
unsigned __byte_perm(unsigned, unsigned, unsigned);

#include "gather.cu"

namespace paged_trt {

struct Byte {
  unsigned char bits;
};
struct Word {
  unsigned short bits;
};

// Element b becomes 0x0100 + b.
template <>
uint4 widen<Word, Byte>(uint2 raw) {
  const auto pair = [](unsigned word, int shift) {
    return 0x01000100u | (word >> shift & 0xffu) | (word >> (shift + 8) & 0xffu) << 16;
  };
  return make_uint4(pair(raw.x, 0), pair(raw.x, 16), pair(raw.y, 0), pair(raw.y, 16));
}

template <int head_dim, int value_head_dim>
void run(const GatherArgs& args, int num_blocks) {
  for (int block = 0; block < num_blocks; block++) {
    blockIdx = {static_cast<unsigned>(block), 0, 0};
    host::run_block(kGatherThreads, [&] { gather<Word, Byte, head_dim, value_head_dim>(args); });
  }
}

}  // namespace paged_trt

extern "C" void gather_64_128(const paged_trt::GatherArgs* args, int num_blocks) {
  paged_trt::run<64, 128>(*args, num_blocks);
}
extern "C" void gather_256_64(const paged_trt::GatherArgs* args, int num_blocks) {
  paged_trt::run<256, 64>(*args, num_blocks);
}
