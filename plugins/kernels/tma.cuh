// Bulk tensor copies into shared memory and the barriers that they complete on (sm_90).
#pragma once

#include "element_types.cuh"

namespace paged_trt {

// Barriers are named by their address in shared memory. `count` arrivals complete a phase.
__device__ __forceinline__ void init_barrier(unsigned barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

// Makes initialised barriers visible to bulk copies, and to the other blocks of a cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for so many bytes of bulk copies.
__device__ __forceinline__ void arrive_expecting(unsigned barrier, unsigned num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

// Waits for the phase of this parity.
__device__ __forceinline__ void wait_barrier(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred P;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n"
      "@P bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// threadIdx.x, read here: what follows from it is not kept in registers across the products.
__device__ __forceinline__ int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Ordinary accesses to shared memory of this thread come before what wgmma and bulk copies do
// after the next barrier.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Barrier `id` of `num_threads` threads.
__device__ __forceinline__ void sync_threads(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// For data that many blocks read: it stays in L2 longest.
__device__ __forceinline__ uint64_t keep_in_l2() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies one box of a rank-4 map. What lies outside of the tensor becomes zero and is not read;
// its bytes count all the same.
__device__ __forceinline__ void copy_box(unsigned destination, const TensorMap* map,
                                         unsigned barrier, const int32_t (&place)[4],
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(place[3]),
      "l"(policy)
      : "memory");
}

}  // namespace paged_trt
