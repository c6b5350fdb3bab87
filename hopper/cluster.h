// Thread block clusters: who am I, barriers and stores in another block's shared memory, loads that reach several blocks.
#pragma once

#include "stage.h"

namespace flash_attn::sm90 {

__device__ __forceinline__ int cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
}
__device__ __forceinline__ int cluster_size() {
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return int(size);
}

// All threads of all blocks. Behind the initialisation of barriers, and before a block ends to which others still write.
__device__ __forceinline__ void cluster_sync() {
    __syncwarp();  // the aligned barrier takes whole warps, of which some come out of a branch of one lane
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// An address for matrix descriptors: inside the block. In clusters, the bits from 24 on say whose shared memory it is, and in
// a descriptor they would land in the strides.
__device__ __forceinline__ uint32_t operand_address(void const* p) { return smem_address(p) & 0xffffff; }

// The same place in the shared memory of block `rank`.
__device__ __forceinline__ uint32_t peer_address(uint32_t address, int rank) {
    uint32_t peer;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
    return peer;
}

// Says that this thread's warpgroup has read something; orders no stores of its own before (that takes a fence of the whole
// GPU's memory: send data with store_async).
__device__ __forceinline__ void arrive_at(Barrier& barrier, int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer_address(smem_address(&barrier), rank))
                 : "memory");
}

// 16 bytes to another block; its barrier (an address there) counts them.
__device__ __forceinline__ void store_async(uint32_t address, uint4 x, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            address),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(barrier)
        : "memory");
}

// Shared memory of this block to addresses in another; its barrier (an address there) counts the bytes.
__device__ __forceinline__ void copy_to_peer(uint32_t dst, void const* src, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "r"(smem_address(src)), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Orders stores that this thread has seen before later reads by wgmma.
__device__ __forceinline__ void fence_async_proxy_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// tma_load to the same place of all blocks in `mask`, completing on the barrier at the same place.
__device__ __forceinline__ void tma_load_multicast(void* dst, CUtensorMap const& map, int column, int row, int head,
                                                   Barrier& bar, int mask, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(smem_address(dst)),
        "l"(&map), "r"(smem_address(&bar)), "r"(column), "r"(row), "r"(head), "h"(uint16_t(mask)), "l"(policy)
        : "memory");
}

}  // namespace flash_attn::sm90
