// Building blocks on mma.sync fragments: C[16 MT, 16 NP] += A[16 MT, 16 KK] B[16 KK, 16 NP] for one warp.
//
// Shared tiles are rows of 2-byte elements in 16-byte chunks, XOR-swizzled by row so that every access below (ldmatrix
// plain and transposed, stmatrix, cp.async, 16-byte reads) touches all 32 banks. Called by the mainloops of every arch
// that uses mma.sync; no tensor algebra here, only addresses that fold to constants.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cute/arch/mma_sm80.hpp>
#include <cutlass/numeric_types.h>

namespace flash_attn {

template <typename Element>
struct MmaAtom;  // one 16x8x16 product with fp32 accumulation
template <>
struct MmaAtom<cutlass::half_t> : cute::SM80_16x8x16_F32F16F16F32_TN {};
template <>
struct MmaAtom<cutlass::bfloat16_t> : cute::SM80_16x8x16_F32BF16BF16F32_TN {};

// Two floats to one register of two elements, round to nearest even; `low` has the lower address.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t packed;
    if constexpr (std::is_same_v<Element, cutlass::half_t>)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A 16-byte copy to shared memory; zeros where `valid` is false (the source is then not read).
__device__ __forceinline__ void copy_async_16(uint32_t destination, void const* source, bool valid) {
    int const bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_async_4(uint32_t destination, void const* source, bool valid) {
    int const bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>  // waits until at most kPending groups of this thread are in flight
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Rows of kCols elements; chunk c of row r lies at position c ^ swizzle(r).
template <int kCols>
struct SharedTile {
    static_assert(kCols % 32 == 0);
    static constexpr int kPitch = 2 * kCols;                       // bytes
    static constexpr int kSwizzled = kCols % 64 == 0 ? 8 : 4;      // chunks that trade places
    __device__ static int swizzle(int row) { return kSwizzled == 8 ? row & 7 : (row >> 1) & 3; }
    __device__ static uint32_t offset(int row, int chunk) {
        return row * kPitch + ((chunk ^ swizzle(row)) << 4);
    }
};

// One lane's ldmatrix address, moved by compile-time steps. Row steps are multiples of 8, so the swizzle stays; chunk
// steps flip address bits. Right because first chunks are below, and steps multiples of, the same power of two.
template <int kCols>
struct LaneAddress {
    uint32_t address;
    __device__ LaneAddress(uint32_t base, int row, int chunk) : address(base + SharedTile<kCols>::offset(row, chunk)) {}
    __device__ uint32_t at(int row_step, int chunk_step) const {
        int const low = chunk_step & (SharedTile<kCols>::kSwizzled - 1);
        return (address ^ (low << 4)) + ((chunk_step - low) << 4) + row_step * SharedTile<kCols>::kPitch;
    }
    // The same address plus a run-time offset (a multiple of the tile's swizzle period), in a register of its own: keeps the
    // compiler from holding every flipped variant of an address alive across a whole loop.
    __device__ LaneAddress moved(uint32_t offset) const {
        LaneAddress copy = *this;
        copy.address += offset;
        asm volatile("" : "+r"(copy.address));
        return copy;
    }
};

// A value the compiler must not remember across this point: what is derived from it is computed again, not kept in registers.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// The four ways an operand lies in shared memory. `first` is the warp's first row or column of the operand.
template <int kCols>  // A stored [m][k]
__device__ __forceinline__ LaneAddress<kCols> lane_a(uint32_t base, int first_row) {
    int const lane = opaque(threadIdx.x) % 32;
    return {base, first_row + lane % 16, lane / 16};
}
template <int kCols>  // A stored [k][m]
__device__ __forceinline__ LaneAddress<kCols> lane_a_transposed(uint32_t base, int first_chunk) {
    int const lane = opaque(threadIdx.x) % 32;
    return {base, lane % 8 + lane / 16 * 8, first_chunk + lane / 8 % 2};
}
template <int kCols>  // B stored [n][k]
__device__ __forceinline__ LaneAddress<kCols> lane_b(uint32_t base, int first_row) {
    int const lane = opaque(threadIdx.x) % 32;
    return {base, first_row + lane % 8 + lane / 16 * 8, lane / 8 % 2};
}
template <int kCols>  // B stored [k][n]
__device__ __forceinline__ LaneAddress<kCols> lane_b_transposed(uint32_t base, int first_chunk) {
    int const lane = opaque(threadIdx.x) % 32;
    return {base, lane % 16, first_chunk + lane / 16};
}

struct NoWork {
    __device__ void operator()(int) const {}
};

// acc += A B. load_a(kk, registers of all MT row tiles), load_b(kk, np, registers of two 8-column tiles); both are
// called one step ahead of their use (the compiler moves them further). A step is one B read and its 2 MT products.
// meanwhile(step), called once in each of the KK NT / 2 steps, is work of the other pipes to be mixed in.
template <typename Element, int KK, int MT, int NT, typename LoadA, typename LoadB, typename Meanwhile = NoWork>
__device__ __forceinline__ void gemm(float (&acc)[MT][NT][4], LoadA load_a, LoadB load_b, Meanwhile meanwhile = {}) {
    static_assert(NT % 2 == 0);
    constexpr int NP = NT / 2, kSteps = KK * NP;
    uint32_t a[2][MT][4], b[2][4];
    load_a(0, a[0]);
    load_b(0, 0, b[0]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        int const kk = step / NP, np = step % NP;
        if (np == 0 && kk + 1 < KK) load_a(kk + 1, a[(kk + 1) % 2]);
        if (step + 1 < kSteps) load_b((step + 1) / NP, (step + 1) % NP, b[(step + 1) % 2]);
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float(&c)[4] = acc[mt][2 * np + half];
                uint32_t(&x)[4] = a[kk % 2][mt];
                uint32_t(&y)[4] = b[step % 2];
                MmaAtom<Element>::fma(c[0], c[1], c[2], c[3], x[0], x[1], x[2], x[3], y[2 * half], y[2 * half + 1], c[0], c[1],
                                      c[2], c[3]);
            }
        }
        meanwhile(step);
    }
}

template <int MT, int NT>
__device__ __forceinline__ void clear(float (&acc)[MT][NT][4]) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[mt][nt][j] = 0.f;
}

// An accumulator as the A operand of the next product: the columns of tile pair kk are its k index.
template <typename Element, int MT, int NT>
__device__ __forceinline__ void pack_a(uint32_t (&a)[MT][4], float const (&acc)[MT][NT][4], int kk) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
        a[mt][0] = pack<Element>(acc[mt][2 * kk][0], acc[mt][2 * kk][1]);
        a[mt][1] = pack<Element>(acc[mt][2 * kk][2], acc[mt][2 * kk][3]);
        a[mt][2] = pack<Element>(acc[mt][2 * kk + 1][0], acc[mt][2 * kk + 1][1]);
        a[mt][3] = pack<Element>(acc[mt][2 * kk + 1][2], acc[mt][2 * kk + 1][3]);
    }
}

// Two neighbouring 16x8 accumulator tiles, rounded, to rows [row, row + 16) and chunks [chunk, chunk + 2) of a tile.
template <typename Element, int kCols>
__device__ __forceinline__ void store_pair(uint32_t base, int row, int chunk, float const (&left)[4],
                                           float const (&right)[4]) {
    int const lane = threadIdx.x % 32;
    uint32_t const r0 = pack<Element>(left[0], left[1]), r1 = pack<Element>(left[2], left[3]);
    uint32_t const r2 = pack<Element>(right[0], right[1]), r3 = pack<Element>(right[2], right[3]);
#if __CUDA_ARCH__ >= 900
    uint32_t const address = base + SharedTile<kCols>::offset(row + lane % 16, chunk + lane / 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
#else
    // The next chunk is one address bit away, the next eight rows a constant: their swizzle is the same.
    uint32_t const left_at = base + SharedTile<kCols>::offset(row + lane / 4, chunk) + lane % 4 * 4, right_at = left_at ^ 16;
    auto const put = [](uint32_t address, uint32_t value) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
    };
    put(left_at, r0);
    put(left_at + 8 * SharedTile<kCols>::kPitch, r1);
    put(right_at, r2);
    put(right_at + 8 * SharedTile<kCols>::kPitch, r3);
#endif
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// Rows of a tensor into a shared tile; rows outside [first, last) and columns from `num_cols` on become zero. `source`
// points at row 0 of the tile (it may lie outside the tensor when that row is not copied). Uniform over the block except for
// a 32-bit offset inside the tile (kMaxRowStride of params.h).
template <int kRows, int kCols, int kThreads>
__device__ __forceinline__ void load_rows(uint32_t tile, void const* source, int64_t row_stride, int first, int last,
                                          int num_cols) {
    constexpr int kLanes = SharedTile<kCols>::kSwizzled;  // threads that share a row
    constexpr int kStep = kThreads / kLanes;
    static_assert(kRows % kStep == 0 && kStep % 8 == 0 && kCols / 8 % kLanes == 0 && kRows <= 128);
    int const thread = opaque(threadIdx.x), row = thread / kLanes, chunk = thread % kLanes;
    uint32_t const to = tile + SharedTile<kCols>::offset(row, chunk);
    int const row_bytes = static_cast<int>(row_stride) * 2;
    unsigned const offset = row * row_bytes + chunk * 16;
    unsigned const count = last > first ? last - first : 0;
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
        char const* from = static_cast<char const*>(source) + static_cast<int64_t>(i * kStep * row_bytes) + offset;
        bool const valid = static_cast<unsigned>(row + i * kStep - first) < count;
#pragma unroll
        for (int j = 0; j < kCols / 8 / kLanes; ++j)
            copy_async_16(to + i * kStep * SharedTile<kCols>::kPitch + j * kLanes * 16, from + j * kLanes * 16,
                          valid && (chunk + j * kLanes) * 8 < num_cols);
    }
}

// The way back: rows [0, num_rows) of a shared tile to a tensor, 16 bytes a store, by kThreads threads numbered `thread`.
template <int kRows, int kCols, int kThreads>
__device__ __forceinline__ void store_rows(void* destination, int64_t row_stride, uint32_t tile, int tile_row, int thread,
                                           int num_rows, int num_cols) {
    constexpr int kLanes = SharedTile<kCols>::kSwizzled;
    constexpr int kStep = kThreads / kLanes;
    int const row = thread / kLanes, chunk = thread % kLanes;
    char* to = static_cast<char*>(destination) + (row * row_stride + chunk * 8) * 2;
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
#pragma unroll
        for (int j = 0; j < kCols / 8 / kLanes; ++j) {
            int const c = chunk + j * kLanes;
            uint4 const v = load_shared_16(tile + SharedTile<kCols>::offset(tile_row + row + i * kStep, c));
            if (row + i * kStep < num_rows && c * 8 < num_cols) *reinterpret_cast<uint4*>(to + j * kLanes * 16) = v;
        }
        to += kStep * row_stride * 2;
    }
}

}  // namespace flash_attn
