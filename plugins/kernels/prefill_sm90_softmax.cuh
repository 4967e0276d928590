// Softmax of the score tile of a warpgroup, in base 2, in the accumulator layout of wgmma.
//
// A reference, not the maximum, is subtracted from the scores of a row: any reference gives the
// same quotient as long as nothing overflows. Masked tiles set it. A full tile computes no maximum
// at all: its sums tell when the reference was too small, and then the tile is done again.
#pragma once

#include "softmax_rows.cuh"

namespace paged_trt {

// A sum of weights that a tile may have: no weight overflows its 16-bit type below it.
template <class Element>
constexpr float kMostWeight = kSameType<Element, Float16> ? 32768.f : 1.0995e12f;  // 2^15, 2^40

// Rows `r` and `r + 8` of a lane.
struct SoftmaxPair {
  // The reference follows a maximum only when that has grown by more than 2^kSlack.
  static constexpr float kSlack = 8.f;
  float reference[2];  // as the scores are, before `scale`; minus infinity: nothing was seen
  float sum[2];  // of this lane's columns
  float scale;  // of the exponent of 2; positive

  __device__ __forceinline__ void begin() {
    reference[0] = reference[1] = minus_infinity();
    sum[0] = sum[1] = 0.f;
  }

  // Moves the references if a score needs it, and gives the factors of what was summed so far.
  template <int count>
  __device__ __forceinline__ bool follow(const float (&scores)[count], float (&factors)[2]) {
    float largest[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float a = fmaxf(scores[2 * half], scores[2 * half + 1]);
      float b = fmaxf(scores[2 * half + 4], scores[2 * half + 5]);
#pragma unroll
      for (int i = 8; i < count; i += 8) {
        a = fmaxf(a, fmaxf(scores[i + 2 * half], scores[i + 2 * half + 1]));
        b = fmaxf(b, fmaxf(scores[i + 2 * half + 4], scores[i + 2 * half + 5]));
      }
      largest[half] = maximum_of_quad(fmaxf(a, b));
    }
    factors[0] = factors[1] = 1.f;
    const bool grows = __any_sync(kAllLanes, (largest[0] - reference[0]) * scale > kSlack ||
                                                 (largest[1] - reference[1]) * scale > kSlack);
    if (grows) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(reference[half], largest[half]);
        // Both are minus infinity for a row that has seen nothing yet.
        const float base = next == minus_infinity() ? 0.f : next;
        factors[half] = exp2_approx((reference[half] - base) * scale);
        reference[half] = next;
        sum[half] *= factors[half];
      }
    }
    return grows;
  }

  // Scores become weights, in place.
  template <int count>
  __device__ __forceinline__ void weigh(float (&scores)[count]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float from = (reference[half] == minus_infinity() ? 0.f : reference[half]) * scale;
      float a = 0.f, b = 0.f;
#pragma unroll
      for (int i = 2 * half; i < count; i += 4) {
        scores[i] = exp2_approx(fmaf(scores[i], scale, -from));
        scores[i + 1] = exp2_approx(fmaf(scores[i + 1], scale, -from));
        a += scores[i];
        b += scores[i + 1];
      }
      sum[half] += a + b;
    }
  }

  // Weights of a full tile against the references as they are; scores stay. False: a weight may
  // have overflowed, nothing was summed.
  template <class Element, int steps>
  __device__ __forceinline__ bool try_weigh(uint32_t (&weights)[steps][4],
                                            const float (&scores)[steps * 8]) {
    const float from[2] = {reference[0] * scale, reference[1] * scale};
    float parts[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = exp2_approx(fmaf(scores[8 * step + 2 * i], scale, -from[i & 1]));
        const float high = exp2_approx(fmaf(scores[8 * step + 2 * i + 1], scale, -from[i & 1]));
        parts[i] += low;
        parts[i] += high;
        weights[step][i] = pack<Element>(low, high);
      }
    }
    parts[0] += parts[2];
    parts[1] += parts[3];
    const bool fails = __any_sync(kAllLanes, fmaxf(parts[0], parts[1]) > kMostWeight<Element>);
    if (!fails) {
      sum[0] += parts[0];
      sum[1] += parts[1];
    }
    return !fails;
  }

  // Reference of a row in base 2; finite.
  __device__ __forceinline__ float exponent(int half) const {
    return fmaxf(reference[half] * scale, kNoScore);
  }
};

// The accumulator layout is the layout of the A operand.
template <class Element, int steps>
__device__ __forceinline__ void pack_weights(uint32_t (&weights)[steps][4],
                                             const float (&scores)[steps * 8]) {
#pragma unroll
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[step][i] = pack<Element>(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
    }
  }
}

template <int count>
__device__ __forceinline__ void multiply_rows(float (&outputs)[count], const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < count; ++i) outputs[i] *= factors[(i >> 1) & 1];
}

// First and last column that rows `r` and `r + 8` see, relative to a lane's first column.
struct VisibleColumns {
  int32_t first[2], last[2];
};

template <bool has_window, int count>
__device__ __forceinline__ void hide(float (&scores)[count], const VisibleColumns& visible) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int32_t column = 8 * (i / 4) + (i & 1), half = (i >> 1) & 1;
    if (column > visible.last[half] || (has_window && column < visible.first[half])) {
      scores[i] = minus_infinity();
    }
  }
}

}  // namespace paged_trt
