// Argument block of the kernel that takes tokens over from the step before. Mirrored by
// launch/args.py; a test compiles the proof that sizes and offsets agree.
#pragma once

#include "launch_args.cuh"

namespace paged_trt {

// Put what the step before chose where a step's ids say so.
struct TakeTokensArgs {
  int64_t* ids;  // [T], changed in place
  const int64_t* tokens;  // [N] of the step before
  int32_t num_tokens;  // T
  int32_t num_seqs;  // rows that `tokens` has room for
  int32_t vocab_size;
};

}  // namespace paged_trt
