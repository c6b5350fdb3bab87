// What the kernels for head dims above 256 share: two warps per 16 stationary rows, each with half of the head dim.
//
// A warp's score product runs over its half of the head dim, so a slab's scores are the sum of its two warps' products; its
// output product runs over all scores of the slab and yields its half of the columns. What the warps exchange passes from
// thread to thread: lane l of one warp holds the same rows and columns of a fragment as lane l of the other.
#pragma once

#include "../common/fragments.h"
#include "wide_traits.h"

namespace flash_attn::sm80 {

__device__ __forceinline__ void store_shared_16(uint32_t address, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

template <typename T>
struct WideWarp {
    static constexpr int kD = T::kHeadDim, kNT = T::kTiles, kNO = T::kOutTiles;
    using Element = typename T::Element;
    uint32_t const shared;
    int const slab, part;  // which 16 rows, which half of the head dim (and, where they are shared out, of the columns)

    __device__ explicit WideWarp(uint32_t shared_) : shared(shared_), slab(threadIdx.x / 64), part(threadIdx.x / 32 % 2) {}
    __device__ int first_row() const { return 16 * slab; }
    __device__ int first_column() const { return part * (T::kStream / 2); }
    __device__ void slab_barrier() const { asm volatile("bar.sync %0, 64;" ::"r"(slab + 1) : "memory"); }
    __device__ uint32_t mine(uint32_t area, int i) const { return shared + area + (i * T::kThreads + threadIdx.x) * 16; }
    __device__ uint32_t partners(uint32_t area, int i) const { return shared + area + (i * T::kThreads + (threadIdx.x ^ 32)) * 16; }

    // acc = rows of `stays` times rows of `stream` (offsets of tiles), over this warp's half of the head dim. kShared: tiles
    // [0, kNT / 2) are the warp's own columns, the others its partner's; else tiles are in the order of the columns.
    template <bool kShared>
    __device__ __forceinline__ void scores(float (&acc)[1][kNT][4], uint32_t stays, uint32_t stream) const {
        constexpr int kHalf = kShared ? kNT / 4 : kNT / 2;  // pairs of tiles
        uint32_t const half = part * (2 * T::kHalfDim);     // flips no swizzled bit
        auto const a_lane = lane_a<kD>(shared + stays + half, first_row());
        auto const own = lane_b<kD>(shared + stream + half, kShared ? first_column() : 0);
        auto const other = lane_b<kD>(shared + stream + half, kShared ? T::kStream / 2 - first_column() : 0);
        clear(acc);
        gemm<Element, T::kHalfDim / 16>(
            acc, [&](int kk, uint32_t(&a)[1][4]) { load_matrix(a[0], a_lane.at(0, 2 * kk)); },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix(b, (np < kHalf ? own : other).at(16 * (np % kHalf), 2 * kk)); });
    }

    // Sums over both warps, all tiles in both of them.
    __device__ __forceinline__ void add_all(float (&acc)[1][kNT][4]) const {
#pragma unroll
        for (int i = 0; i < kNT; ++i) put(T::kExchange, i, acc[0][i]);
        slab_barrier();
#pragma unroll
        for (int i = 0; i < kNT; ++i) add(acc[0][i], T::kExchange, i);
    }
    // Sums of a warp's own columns: send, slab_barrier, add. `which` numbers the products that are under way.
    __device__ __forceinline__ void send_half(float const (&acc)[1][kNT][4], int which) const {
#pragma unroll
        for (int i = 0; i < kNT / 2; ++i) put(T::kExchange, which * (kNT / 2) + i, acc[0][kNT / 2 + i]);
    }
    __device__ __forceinline__ void add_half(float (&own)[1][kNT / 2][4], float const (&acc)[1][kNT][4], int which) const {
#pragma unroll
        for (int i = 0; i < kNT / 2; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) own[0][i][j] = acc[0][i][j];
            add(own[0][i], T::kExchange, which * (kNT / 2) + i);
        }
    }
    // A warp's own columns as an operand; after a barrier the partner's are there too.
    __device__ __forceinline__ void send_operand(uint32_t (&p)[kNT / 2][4], float const (&own)[1][kNT / 2][4]) const {
#pragma unroll
        for (int kk = 0; kk < kNT / 4; ++kk) {
            uint32_t a[1][4];
            pack_a<Element>(a, own, kk);
#pragma unroll
            for (int j = 0; j < 4; ++j) p[kk][j] = a[0][j];
            store_shared_16(mine(T::kPacked, kk), p[kk][0], p[kk][1], p[kk][2], p[kk][3]);
        }
    }
    __device__ __forceinline__ void receive_operand(uint32_t (&p)[kNT / 2][4]) const {
#pragma unroll
        for (int kk = 0; kk < kNT / 4; ++kk) {
            uint4 const v = load_shared_16(partners(T::kPacked, kk));
            p[kNT / 4 + kk][0] = v.x, p[kNT / 4 + kk][1] = v.y, p[kNT / 4 + kk][2] = v.z, p[kNT / 4 + kk][3] = v.w;
        }
    }

    // acc += P times rows of `stream`, this warp's half of the head dim. kShared: the order of scores<true>.
    template <bool kShared>
    __device__ __forceinline__ void accumulate(float (&acc)[1][kNO][4], uint32_t const (&p)[kNT / 2][4], uint32_t stream) const {
        constexpr int kHalf = kShared ? kNT / 4 : kNT / 2;
        uint32_t const half = part * (2 * T::kHalfDim), own_rows = first_column() * (2 * kD);
        uint32_t const other_rows = T::kStream / 2 * (2 * kD) - own_rows;
        auto const own = lane_b_transposed<kD>(shared + stream + half + (kShared ? own_rows : 0), 0);
        auto const other = lane_b_transposed<kD>(shared + stream + half + (kShared ? other_rows : 0), 0);
        gemm<Element, kNT / 2>(
            acc,
            [&](int kk, uint32_t(&a)[1][4]) {
#pragma unroll
                for (int j = 0; j < 4; ++j) a[0][j] = p[kk][j];
            },
            [&](int kk, int np, uint32_t(&b)[4]) {
                load_matrix_transposed(b, (kk < kHalf ? own : other).at(16 * (kk % kHalf), 2 * np));
            });
    }

    // acc, rounded, to the rows of the tensor at `to` (row 0 of the block), through the slab's rows of the tile at `stage`,
    // which no other slab reads.
    __device__ __forceinline__ void store(float const (&acc)[1][kNO][4], Element* to, int64_t row_stride, uint32_t stage, int num_rows,
                                          int num_cols) const {
#pragma unroll
        for (int np = 0; np < kNO / 2; ++np)
            store_pair<Element, kD>(shared + stage + part * (2 * T::kHalfDim), first_row(), 2 * np, acc[0][2 * np], acc[0][2 * np + 1]);
        slab_barrier();
        int const row = first_row() + 8 * part;
        store_rows<8, kD, 32>(to + row * row_stride, row_stride, shared + stage, row, threadIdx.x % 32, num_rows - row, num_cols);
    }

private:
    __device__ __forceinline__ void put(uint32_t area, int i, float const (&x)[4]) const {
        store_shared_16(mine(area, i), __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    }
    __device__ __forceinline__ void add(float (&x)[4], uint32_t area, int i) const {
        uint4 const v = load_shared_16(partners(area, i));
        x[0] += __uint_as_float(v.x), x[1] += __uint_as_float(v.y), x[2] += __uint_as_float(v.z), x[3] += __uint_as_float(v.w);
    }
};

template <int NT>
__device__ __forceinline__ void scale_by(float (&acc)[1][NT][4], float factor) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[0][nt][j] *= factor;
}

}  // namespace flash_attn::sm80
