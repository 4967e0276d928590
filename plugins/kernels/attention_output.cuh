// Output rows, four elements at a time.
#pragma once

#include "mma.cuh"
#include "softmax_math.cuh"

namespace paged_trt {

template <class Activation>
__device__ __forceinline__ void store_output(void* output, int64_t element, float4 values) {
  auto* place = reinterpret_cast<uint2*>(static_cast<Activation*>(output) + element);
  *place = make_uint2(pack<Activation>(values.x, values.y), pack<Activation>(values.z, values.w));
}

__device__ __forceinline__ float4 scaled(float4 values, float factor) {
  return make_float4(values.x * factor, values.y * factor, values.z * factor, values.w * factor);
}

// Factor that normalises. No weight at all gives 0, not NaN; a NaN sum stays NaN.
__device__ __forceinline__ float normaliser(float sum, float value_scale) {
  return sum == 0.f ? 0.f : __fdividef(value_scale, sum);
}

// A softmax's maximum and sum with the sink as one more logit of value zero.
struct SinkFactors {
  float factor;  // of weights so far
  float sum;
};

__device__ __forceinline__ SinkFactors add_sink(float maximum, float sum, float sink) {
  const float logit = sink * kLog2E;
  const float top = fmaxf(maximum, logit);
  const float factor = exp2_approx(maximum - top);
  return {factor, sum * factor + exp2_approx(logit - top)};
}

}  // namespace paged_trt
