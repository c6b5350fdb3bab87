// Stages: mbarriers, the ring position of a pipeline, bulk tensor copies (TMA) and named barriers.
// A producer waits for `empty`, announces the bytes on `full` and copies; a consumer waits for `full`, reads, arrives on `empty`.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace flash_attn::sm90 {

__device__ __forceinline__ uint32_t smem_address(void const* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The same for all threads of a warp, and known to be so: addresses that follow from it live in uniform registers.
__device__ __forceinline__ int uniform_warpgroup() { return __shfl_sync(0xffffffff, threadIdx.x / 128, 0); }

struct Barrier {
    uint64_t word;

    __device__ __forceinline__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(this)), "r"(arrivals));
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(this)) : "memory");
    }
    __device__ __forceinline__ void arrive_and_expect(uint32_t bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(this)), "r"(bytes)
                     : "memory");
    }
    __device__ __forceinline__ void wait(uint32_t phase) {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "again:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
            "@done bra.uni over;\n"
            "bra.uni again;\n"
            "over:\n"
            "}" ::"r"(smem_address(this)),
            "r"(phase)
            : "memory");
    }
};

// Position in a ring of kStages. The phase of a full barrier's k-th use is k & 1; a producer waits for the opposite
// phase on `empty`, which a fresh barrier reports as done.
template <int kStages>
struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ int before() const { return stage == 0 ? kStages - 1 : stage - 1; }
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders this thread's ordinary shared-memory stores before later reads by wgmma and bulk copies.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Programmatic dependent launch: the kernel before lets this one start early; what it has written may be read, and written over,
// from here on.
__device__ __forceinline__ void wait_for_last_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// L2 policies as createpolicy encodes them: K and V are read by many CTAs, Q and dO once or a few times.
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

// Box (columns, rows) of one head into shared memory; elements outside the tensor arrive as zeros.
__device__ __forceinline__ void tma_load(void* dst, CUtensorMap const& map, int column, int row, int head, Barrier& bar,
                                         uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
        "%4, %5}], [%2], %6;" ::"r"(smem_address(dst)),
        "l"(&map), "r"(smem_address(&bar)), "r"(column), "r"(row), "r"(head), "l"(policy)
        : "memory");
}

// A contiguous run of bytes (multiple of 16).
__device__ __forceinline__ void bulk_load(void* dst, void const* src, uint32_t bytes, Barrier& bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(dst)),
                 "l"(src), "r"(bytes), "r"(smem_address(&bar))
                 : "memory");
}

// dst[i] += src[i] on fp32 in global memory; the thread's bulk group.
__device__ __forceinline__ void bulk_reduce_add(float* dst, void const* src, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
                 "r"(smem_address(src)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace flash_attn::sm90
