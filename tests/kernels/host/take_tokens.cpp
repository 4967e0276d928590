// The kernel that takes tokens over as a function of a shared library; see device.h.
#include "device.h"

#include "take_tokens.cu"

extern "C" void take_tokens(const paged_trt::TakeTokensArgs* args) {
  constexpr int kThreads = 32;
  for (int first = 0; first < args->num_tokens; first += kThreads) {
    blockIdx = {static_cast<unsigned>(first / kThreads), 0, 0};
    host::run_block(kThreads, [&] { paged_trt::take_tokens<kThreads>(*args); });
  }
}
