// Take tokens: ids of a step that the step before it chose, from where it left them.
#include "take_tokens_args.cuh"

namespace paged_trt {

// A negative id, -1 - row, stands for the token of that row. A token outside the vocabulary says
// that its row had no largest logit: the sequence ends, and its row runs token 0 to no effect.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) take_tokens(
    const __grid_constant__ TakeTokensArgs args) {
  const int32_t index = static_cast<int32_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= args.num_tokens) return;
  const int64_t id = args.ids[index];
  if (id >= 0) return;
  const int64_t row = -1 - id;
  const int64_t token = row < args.num_seqs ? args.tokens[row] : 0;
  args.ids[index] = token >= 0 && token < args.vocab_size ? token : 0;
}

}  // namespace paged_trt
