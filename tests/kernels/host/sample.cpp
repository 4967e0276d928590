// The sampling kernel as a function of a shared library; see device.h.
#include "device.h"

#include "sample.cu"

namespace {

template <class Logit, class Token, int kThreads>
void run(const paged_trt::SampleArgs& args) {
  for (int sequence = 0; sequence < args.num_seqs; sequence++) {
    blockIdx = {static_cast<unsigned>(sequence), 0, 0};
    host::run_block(kThreads, [&] { paged_trt::sample<Logit, Token, kThreads>(args); });
  }
}

}  // namespace

extern "C" void sample_float32(const paged_trt::SampleArgs* args) {
  run<float, long long, 64>(*args);
}
extern "C" void sample_float16(const paged_trt::SampleArgs* args) {
  run<__half, long long, 64>(*args);
}
extern "C" void sample_bfloat16(const paged_trt::SampleArgs* args) {
  run<__nv_bfloat16, int, 96>(*args);
}
extern "C" void sample_whole_block(const paged_trt::SampleArgs* args) {
  run<float, long long, 1024>(*args);
}
