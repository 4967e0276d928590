// Page ids of one sequence, 32 at a time in the lanes of a warp.
#pragma once

#include "page_table.cuh"
#include "softmax_math.cuh"

namespace paged_trt {

struct PageCursor {
  const int32_t* row;
  int32_t width, first, lane_page;

  PageCursor() = default;

  // From page ids that were read ahead.
  __device__ __forceinline__ PageCursor(const int32_t* row, int32_t width, int32_t first,
                                        int32_t lane_page)
      : row(row), width(width), first(first), lane_page(lane_page) {}

  // Reads ahead from page index `first`: a guess costs nothing while the length is still on its way.
  __device__ __forceinline__ PageCursor(const int32_t* row, int32_t width, int32_t first)
      : row(row), width(width), first(first) {
    lane_page = table_entry(row, width, first + (threadIdx.x & 31));
  }

  // Page of a page index, the same for the whole warp.
  __device__ __forceinline__ int32_t at(int32_t index) {
    if (static_cast<uint32_t>(index - first) >= 32u) {
      first = index;
      lane_page = table_entry(row, width, first + (threadIdx.x & 31));
    }
    return __shfl_sync(kAllLanes, lane_page, index - first);
  }
};

}  // namespace paged_trt
