// Merging normalised partial outputs by their base-2 log-sum-exps: of the merge kernel, and of the
// last block of a counter.
#pragma once

#include "attention_output.cuh"

namespace paged_trt {

// Four value elements of one head, weighted but not normalised, in base 2.
struct PartialVector {
  float4 values;
  float maximum, sum;
};

__device__ __forceinline__ PartialVector no_partial() {
  return {make_float4(0.f, 0.f, 0.f, 0.f), kNoScore, 0.f};
}

__device__ __forceinline__ void accumulate(PartialVector& total, float factor, float4 values) {
  total.values.x += factor * values.x, total.values.y += factor * values.y;
  total.values.z += factor * values.z, total.values.w += factor * values.w;
}

// One thread's share: every `stride`-th of `count` partials, from `first`. `place(p)` gives where
// partial p has its vector, `lse(p)` where its log-sum-exp is. The order is fixed, so a merge
// gives the same bits whoever does it. The loads of kPartialsInFlight do not wait for each other.
template <int kPartialsInFlight, class Place, class Lse>
__device__ __forceinline__ PartialVector merge_share(int32_t first, int32_t stride, int32_t count,
                                                     Place place, Lse lse) {
  PartialVector total = no_partial();
  for (int32_t p0 = first; p0 < count; p0 += stride * kPartialsInFlight) {
    float4 values[kPartialsInFlight];
    float lses[kPartialsInFlight], top = total.maximum;
#pragma unroll
    for (int k = 0; k < kPartialsInFlight; k++) {
      const int32_t p = p0 + k * stride;
      values[k] = make_float4(0.f, 0.f, 0.f, 0.f), lses[k] = minus_infinity();
      if (p < count) {
        lses[k] = __ldcg(lse(p));
        values[k] = __ldcg(reinterpret_cast<const float4*>(place(p)));
      }
    }
#pragma unroll
    for (int k = 0; k < kPartialsInFlight; k++) top = fmaxf(top, lses[k]);
    const float factor = exp2_approx(total.maximum - top);
    total.values = scaled(total.values, factor), total.sum *= factor, total.maximum = top;
#pragma unroll
    for (int k = 0; k < kPartialsInFlight; k++) {
      const float weight = exp2_approx(lses[k] - top);
      total.sum += weight;
      accumulate(total, weight, values[k]);
    }
  }
  return total;
}

// Merge of the shares of one vector. `values(s)`, `maximum(s)` and `sum(s)` are in shared memory.
template <int kShares, class Values, class Maximum, class Sum>
__device__ __forceinline__ PartialVector merge_shares(Values values, Maximum maximum, Sum sum) {
  PartialVector total = no_partial();
#pragma unroll
  for (int s = 0; s < kShares; s++) total.maximum = fmaxf(total.maximum, maximum(s));
#pragma unroll
  for (int s = 0; s < kShares; s++) {
    const float factor = exp2_approx(maximum(s) - total.maximum);
    total.sum += factor * sum(s);
    accumulate(total, factor, values(s));
  }
  return total;
}

}  // namespace paged_trt
