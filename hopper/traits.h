// Shared-memory tiles as TMA writes them and wgmma reads them, and the four matrix products over them.
//
// A tile of `rows x head_dim` lies as chunks of kChunk columns, [chunk][row][kChunk], swizzled over the chunk's row of 128
// (or 64) bytes. The same bytes serve as a K-major operand (head dim contracted: Q K^T) and an MN-major one (rows
// contracted: P V). Accumulator of a warpgroup: thread t holds rows 16 (t / 32) + (t % 32) / 4 + {0, 8}, columns
// 8 j + 2 (t % 4) + {0, 1} in d[4 j + 2 * (row half) + {0, 1}]; packed to 16 bits that is also the layout of a register A operand.
#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cutlass/numeric_types.h>

#include <utility>

#include "stage.h"
#include "tiles.h"

namespace flash_attn::sm90 {

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;

// The products use only the N that every toolkit's base set has; CuTe would silently fall back to a small divisor.
constexpr bool is_base_n(int n) {
    return n == 8 || n == 16 || n == 32 || n == 64 || n == 96 || n == 128 || n == 192 || n == 256;
}

constexpr int chunk_columns(int columns) { return columns % 64 == 0 ? 64 : 32; }

template <int kRows_, int kColumns_>
struct SmemTile {
    static constexpr int kRows = kRows_, kColumns = kColumns_;
    static constexpr int kChunk = chunk_columns(kColumns);
    static constexpr int kChunks = kColumns / kChunk;
    static constexpr int kRowBytes = kChunk * 2;
    static constexpr int kChunkBytes = kRows * kRowBytes;
    static constexpr int kElements = kRows * kColumns;
    static constexpr int kBytes = kElements * 2;

    // Matrix descriptor (addresses and strides in 16-byte units). Stride: between groups of 8 rows; leading: between
    // chunks, used by the MN-major form only.
    template <Major kMajor>
    static __device__ __forceinline__ uint32_t descriptor(uint32_t address) {  // the low word; kHigh is the other
        constexpr uint32_t kLeading = kMajor == Major::K ? 1 : kChunkBytes / 16;
        return (kLeading << 16) | (address >> 4);
    }
    static constexpr uint32_t kHigh = (kRowBytes == 128 ? 1u << 30 : 2u << 30) | 8 * kRowBytes / 16;
    template <Major kMajor>
    static __device__ __forceinline__ uint64_t operand(uint32_t descriptor, int k) {
        return (uint64_t(kHigh) << 32) | (descriptor + step<kMajor>(k));
    }
    // Offset of the k-th step of 16 along the contracted axis.
    template <Major kMajor>
    static constexpr uint32_t step(int k) {
        return kMajor == Major::K ? (16 * k / kChunk * kChunkBytes + 16 * k % kChunk * 2) / 16
                                  : 16 * k * kRowBytes / 16;
    }
};

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The i-th kPart elements of a register array.
template <int kPart, class X, int N>
__device__ __forceinline__ X (&part(X (&x)[N], int i))[kPart] {
    static_assert(N % kPart == 0);
    return reinterpret_cast<X(&)[kPart]>(x[kPart * i]);
}

// Keeps the compiler from moving uses of registers across the points where wgmma reads or writes them.
template <int N>
__device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) { asm volatile("" : "+f"(r[i])::"memory"); }
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) { asm volatile("" : "+r"(r[i])::"memory"); }
}

template <class Op, int N, int... I, class... Operands>
__device__ __forceinline__ void wgmma(float (&d)[N], std::integer_sequence<int, I...>, ScaleOut scale,
                                      Operands const&... operands) {
    Op::fma(operands..., d[I]..., scale);
}

// d (64 x kN) = or += A B over kSteps * 16, A and B from shared memory. Asynchronous: the caller fences, commits, waits.
template <class Element, int kN, int kSteps, class TileA, Major kMajorA, class TileB, Major kMajorB, bool kZero>
__device__ __forceinline__ void gemm_ss(float (&d)[kN / 2], uint32_t a, uint32_t b) {
    static_assert(is_base_n(kN));
    using Op = decltype(cute::SM90::GMMA::ss_op_selector<Element, Element, float,
                                                         cute::Shape<cute::Int<64>, cute::Int<kN>, cute::Int<16>>,
                                                         kMajorA, kMajorB>());
    static_assert(sizeof(typename Op::CRegisters) == sizeof(float) * kN / 2);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        wgmma<Op>(d, std::make_integer_sequence<int, kN / 2>{}, kZero && k == 0 ? ScaleOut::Zero : ScaleOut::One,
                  TileA::template operand<kMajorA>(a, k), TileB::template operand<kMajorB>(b, k));
    }
}

// The same with A in registers, a[4 k .. 4 k + 3] per step.
template <class Element, int kN, int kSteps, class TileB, Major kMajorB, bool kZero>
__device__ __forceinline__ void gemm_rs(float (&d)[kN / 2], uint32_t const (&a)[4 * kSteps], uint32_t b) {
    static_assert(is_base_n(kN));
    using Op = decltype(cute::SM90::GMMA::rs_op_selector<Element, Element, float,
                                                         cute::Shape<cute::Int<64>, cute::Int<kN>, cute::Int<16>>,
                                                         Major::K, kMajorB>());
    static_assert(sizeof(typename Op::CRegisters) == sizeof(float) * kN / 2);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        wgmma<Op>(d, std::make_integer_sequence<int, kN / 2>{}, kZero && k == 0 ? ScaleOut::Zero : ScaleOut::One,
                  a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3], TileB::template operand<kMajorB>(b, k));
    }
}

template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t r;
    if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    }
    return r;
}
template <class Element, int N>
__device__ __forceinline__ void pack(uint32_t (&out)[N / 2], float const (&in)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) { out[i] = pack<Element>(in[2 * i], in[2 * i + 1]); }
}

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Absolute error near 1e-7 (the instruction tanh.approx has 5e-4, which a softcap of 50 would turn into 0.025 of a score).
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(exp2_approx(2.f * kLog2e * x) + 1.f));
    return 1.f - 2.f * y;
}

// Holds the computation of non-negative `x` in front of the next wait. ptxas sinks arithmetic below waits for products and with
// it loses the overlap, but keeps instructions with side effects in order: here a store to `scratch` that hangs on x's signs.
template <int N>
__device__ __forceinline__ void settle(float const (&x)[N], uint32_t scratch) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) { bits |= __float_as_uint(x[i]); }
    asm volatile("{\n.reg .pred never;\nsetp.lt.s32 never, %0, 0;\n@never st.shared.b32 [%1], %0;\n}" ::"r"(bits),
                 "r"(scratch)
                 : "memory");
}

// The forward, and the dQ pass, which holds dO beside Q and streams the same key tiles.
template <class Element_, int kHeadDim_, bool kSoftcap_, bool kDqPass_ = false>
struct FwdTraits {
    using Element = Element_;
    static constexpr Tiles kTile = tiles(kHeadDim_);
    static constexpr bool kSoftcap = kSoftcap_, kDqPass = kDqPass_;
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kTile.fwd_block_m,
                         kBlockN = kDqPass ? kTile.pass_block_n : kTile.fwd_block_n;
    static constexpr int kConsumers = kBlockM / 64;
    static_assert(kConsumers == 2 || kConsumers == 3);
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr int kLoadRegisters = kConsumers == 2 ? 24 : 32, kMmaRegisters = kConsumers == 2 ? 240 : 160;
    using TileQ = SmemTile<kBlockM, kHeadDim>;
    using TileK = SmemTile<kBlockN, kHeadDim>;
    // Of K and V. The dQ pass has a third one where it fits: K of a tile is read until dQ is done, under the next tile's scores.
    static constexpr int kStages = kDqPass && TileQ::kBytes * 2 + TileK::kBytes * 2 * 3 <= 224 * 1024 ? 3 : 2;
    static constexpr int kQStages = TileQ::kBytes * 2 + TileK::kBytes * 2 * kStages <= 220 * 1024 && !kDqPass ? 2 : 1;
    // Of a single buffer, the forward loads the rows of each warpgroup when it has done with the last ones, not when all have.
    static constexpr int kQParts = kQStages == 1 && !kDqPass ? kConsumers : 1;
    using PartQ = SmemTile<kBlockM / kQParts, kHeadDim>;
    // A warpgroup leaves out the item's first or last keys where only rows of the other one see them.
    static constexpr bool kSkips = kQParts > 1;
    static __device__ __forceinline__ int part(int warpgroup) { return kQParts == 1 ? 0 : warpgroup; }
    static __device__ __forceinline__ int rows_ahead(int warpgroup) { return kQParts == 1 ? 64 * warpgroup : 0; }
};

}  // namespace flash_attn::sm90
