// Argument block and parameter rows of the sampling kernel. Mirrored by launch/args.py and
// launch/sampling.py; a test compiles the proof that sizes and offsets agree.
#pragma once

#include "launch_args.cuh"

namespace paged_trt {

// How one row chooses its token.
struct SampleRow {
  unsigned long long seed;  // of the request
  unsigned int step;  // index of the token, from 0
  int32_t top_k;  // most likely tokens to choose from, 0 for all
  unsigned int top_p;  // share of the weight to choose from, in units of 2^-32; 0 for all
  float scale;  // log2(e) / temperature; 0 for the largest logit
};

// Choose a token for each row of logits.
struct SampleArgs {
  const void* logits;  // [N, vocab_size]
  const SampleRow* rows;  // [N]
  void* tokens;  // [N]; -1 where a logit is NaN, vocab_size where all are minus infinity
  float* logprobs;  // [N] natural logarithms at temperature 1 among all tokens, or null
  int64_t row_stride;  // elements
  int32_t num_seqs;  // N
  int32_t vocab_size;
};

}  // namespace paged_trt
