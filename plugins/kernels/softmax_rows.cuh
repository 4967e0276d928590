// Online softmax of the query rows that one warp holds as accumulators of m16n8k16.
#pragma once

#include "mma.cuh"
#include "softmax_math.cuh"

namespace paged_trt {

__device__ __forceinline__ float maximum_of_quad(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}

__device__ __forceinline__ float sum_of_quad(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

// Factor of the scores of each row that a lane holds: one for all, times one of its own for
// queries that were scaled row by row. Those stay in shared memory.
template <bool by_row>
struct ScoreScale {
  float common;
  const float* of_rows;  // of the lane's first row

  __device__ __forceinline__ float operator()(int block, int half) const {
    // Not 0, which would turn a masked score into NaN.
    return by_row ? fmaxf(common * of_rows[block * 16 + half * 8], 1e-35f) : common;
  }
};

// Rows {row, row + 8} of each of `num_blocks` blocks of 16 rows.
template <int num_blocks>
struct SoftmaxRows {
  // Exponents are taken relative to `reference`, in base 2. It follows the maximum only when
  // that has grown by more than kSlack: any reference gives the same quotient, and rescaling
  // the outputs is rare then. Weights stay below 2^8, far from the end of float16.
  static constexpr float kSlack = 8.f;
  float reference[num_blocks][2];
  float sum[num_blocks][2];  // of this lane's columns

  __device__ __forceinline__ SoftmaxRows() {
#pragma unroll
    for (int block = 0; block < num_blocks; ++block) {
      reference[block][0] = reference[block][1] = kNoScore;
      sum[block][0] = sum[block][1] = 0.f;
    }
  }

  // Takes up the scores of a tile and moves the references; outputs are rescaled to match.
  template <bool by_row, int num_columns, int num_outputs>
  __device__ __forceinline__ void follow(const float (&scores)[num_blocks][num_columns][4],
                                         float (&outputs)[num_blocks][num_outputs][4],
                                         const ScoreScale<by_row>& scale) {
#pragma unroll
    for (int block = 0; block < num_blocks; ++block) {
      float factors[2];
      bool grows = false;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = scores[block][0][half * 2];
#pragma unroll
        for (int column = 0; column < num_columns; ++column) {
          largest = fmaxf(largest, fmaxf(scores[block][column][half * 2],
                                         scores[block][column][half * 2 + 1]));
        }
        const float current = maximum_of_quad(largest) * scale(block, half);
        const bool row_grows = current > reference[block][half] + kSlack;
        factors[half] = row_grows ? exp2_approx(reference[block][half] - current) : 1.f;
        if (row_grows) reference[block][half] = current;
        grows |= row_grows;
      }
      if (!__any_sync(kAllLanes, grows)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[block][half] *= factors[half];
#pragma unroll
        for (int output = 0; output < num_outputs; ++output) {
          outputs[block][output][half * 2] *= factors[half];
          outputs[block][output][half * 2 + 1] *= factors[half];
        }
      }
    }
  }

  // Weights of a tile's scores, packed as A operands: [block][column][half].
  template <class Product, bool by_row, int num_columns>
  __device__ __forceinline__ void weigh(uint32_t (&weights)[num_blocks][num_columns][2],
                                        const float (&scores)[num_blocks][num_columns][4],
                                        const ScoreScale<by_row>& scale) {
#pragma unroll
    for (int block = 0; block < num_blocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float from = -reference[block][half], factor = scale(block, half);
#pragma unroll
        for (int column = 0; column < num_columns; ++column) {
          const float low = exp2_approx(fmaf(scores[block][column][half * 2], factor, from));
          const float high = exp2_approx(fmaf(scores[block][column][half * 2 + 1], factor, from));
          sum[block][half] += low + high;
          weights[block][column][half] = pack<Product>(low, high);
        }
      }
    }
  }

  // Factor that turns a row's outputs into its result: the sink, in base 2, is one more logit
  // of value zero, and a row that saw nothing gives 0.
  __device__ __forceinline__ float final_factor(int block, int half, float sink) const {
    const float peak = fmaxf(reference[block][half], sink);
    const float weight = exp2_approx(reference[block][half] - peak);
    const float total = sum_of_quad(sum[block][half]) * weight + exp2_approx(sink - peak);
    return total == 0.f ? 0.f : __fdividef(weight, total);
  }
};

}  // namespace paged_trt
