// Paged prefill for Hopper (sm_90a): bulk tensor copies, wgmma, one block a multiprocessor.
//
// A block works through query tiles of 128 rows, kTokens tokens times the heads of a group, against
// the key tiles that they see, last to first. One warp copies keys and values, a tile ahead; three
// choose the next query tile and bring its rows; two warpgroups of 64 rows each do the rest. Scores
// come from shared memory, weights go to the value product in registers.
//
// In the loop over full tiles no maximum is computed (see prefill_sm90_softmax.cuh) and the value
// product is never waited for: weights have two sets of registers, and values three stages. Masks,
// the edges of a window and invalid pages are left to the loops around it.
//
// A page id outside of the pool becomes a place outside of the map: zeros arrive and nothing is
// read. Values that no row of a tile sees are made zero, because a weight of 0 does not hide NaN.
//
// `is_split`: the blocks of a cluster share the keys of one tile and merge what they get.
// `is_scaled`: keys and values were gathered out of 8-bit pools as they are (gather.cu); the scales
// of the pool are part of the softmax scale and of the factors that normalise.
#pragma once

#include "dependent_launch.cuh"
#include "prefill_sm90_consumer.cuh"
#include "prefill_sm90_producer.cuh"

namespace paged_trt {

template <class Element, int head_dim, int value_head_dim, int group_size, bool has_window,
          bool has_softcap, bool is_split, bool is_scaled = false>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    prefill_sm90(const __grid_constant__ PrefillSm90Args args) {
  using Layout = PrefillLayout<Element, head_dim, value_head_dim, group_size, has_window,
                               has_softcap, is_split, is_scaled>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned base = (shared_address(shared) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    prefetch_map(&args.key_map);
    prefetch_map(&args.value_map);
    Layout::init_barriers(base);
  }
  __syncthreads();
  wait_for_previous_kernel();
  const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) {
        KeyValueCopier<Layout> copier = {args, base, keep_in_l2()};
        copier.run();
      }
    } else {
      QueryChooser<Layout>::clear_padding(args, threadIdx.x - 32);
      QueryChooser<Layout>::choose_and_load(args, base, threadIdx.x - 32);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    PrefillConsumer<Layout> consumer = {{{args, base, warpgroup - 1}}};
    consumer.softmax.scale = (has_softcap ? args.softcap : args.softmax_scale) * kLog2E;
    consumer.run();
  }
}

}  // namespace paged_trt
