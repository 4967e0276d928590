// Thread block clusters (sm_90): stores into another block's shared memory that count their bytes
// on its mbarrier. No fence and no second cluster barrier, and the sender may leave at once.
#pragma once

#include "element_types.cuh"

namespace paged_trt {

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ int32_t cluster_blocks() {
  uint32_t count;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(count));
  return static_cast<int32_t>(count);
}

__device__ __forceinline__ uint32_t shared_address(const void* place) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(place));
}

// One thread makes the barrier ready for `bytes` before anybody of the cluster may send.
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  const uint32_t address = shared_address(barrier);
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait_for_bytes(uint64_t* barrier) {
  uint32_t is_done;
  do {
    asm volatile(
        "{.reg .pred done; "
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], 0; "
        "selp.u32 %0, 1, 0, done;}"
        : "=r"(is_done)
        : "r"(shared_address(barrier))
        : "memory");
  } while (is_done == 0);
}

__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Until every block of the cluster has arrived: from then on its shared memory exists.
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t address_in(const void* place, int32_t block) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(place)), "r"(block));
  return address;
}

__device__ __forceinline__ void send(const float4* place, uint64_t* barrier, int32_t block,
                                     float4 values) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address_in(place, block)),
      "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w), "r"(address_in(barrier, block))
      : "memory");
}

__device__ __forceinline__ void send(const float2* place, uint64_t* barrier, int32_t block,
                                     float2 values) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          address_in(place, block)),
      "f"(values.x), "f"(values.y), "r"(address_in(barrier, block))
      : "memory");
}

#endif

}  // namespace paged_trt
