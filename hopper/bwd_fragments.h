// Backward, what consumer warpgroups do with accumulator fragments whose rows are keys and whose columns are query rows: mask,
// begin with a scalar a column, write to a tile or to the gradients.
#pragma once

#include "bwd_load.h"
#include "epilogue.h"

namespace flash_attn::sm90 {

// Scores of pairs that are not visible become -inf. The thread's keys are key and key + 8, its columns rows of the block. Each lane
// reads what two of 64 rows see, as keys of the item; the others get it by shuffles (reads in a chain would take longer than
// the block's products).
template <int N>
__device__ __forceinline__ void mask_rows(float (&scores)[N], BwdParams const& p, KeyItem const& item, int block,
                                          int key) {
    static_assert(N % 32 == 0);
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < N / 32; ++part) {
        uint32_t seen[2];  // first key, number of keys
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int const row = block * 2 * N + 64 * part + 2 * lane + i;
            int const inside = min(max(row, item.row_begin), item.row_end - 1);
            int2 const span =
                __ldg(reinterpret_cast<int2 const*>(p.fwd.plan.row_span + inside) + (item.region ? 0 : 1));
            int const begin = min(max(span.x - item.key_begin, 0), item.num_keys);
            int const end = min(max(span.y - item.key_begin, begin), item.num_keys);
            seen[i] = inside == row ? begin << 16 | (end - begin) : 0;
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t const of_row = __shfl_sync(0xffffffff, seen[i], 4 * j + lane % 4);
                uint32_t const first = key - (of_row >> 16), count = of_row & 0xffff;
                if (first >= count) { scores[(8 * part + j) * 4 + i] = -INFINITY; }
                if (first + 8 >= count) { scores[(8 * part + j) * 4 + 2 + i] = -INFINITY; }
            }
        }
    }
}

// A packed accumulator of dS^T to its tile, 8 x 8 matrices four at a time.
template <class Tile, int N>
__device__ __forceinline__ void store_packed(uint32_t tile, uint32_t const (&x)[N], int warpgroup) {
    int const lane = threadIdx.x % 32;
    int const row = 64 * warpgroup + threadIdx.x % 128 / 32 * 16 + lane % 16;
    uint32_t const first = tile + row * Tile::kRowBytes + ((lane / 16 ^ row % 8) << 4);
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        uint32_t const address = (first ^ (j % 4 << 5)) + j / 4 * Tile::kChunkBytes;  // aligned to the swizzle's period
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[4 * j]),
                     "r"(x[4 * j + 1]), "r"(x[4 * j + 2]), "r"(x[4 * j + 3])
                     : "memory");
    }
}

// dK (scaled) or dV of 64 keys from `first` of the item on: rows of its region's tensor, or fp32 partials of a row
// split (not scaled).
template <class T, bool kDk>
__device__ __forceinline__ void bwd_store_gradient(BwdParams const& p, KeyItem const& item, int head_k, int first,
                                                   float const (&acc)[T::kHeadDim / 2]) {
    using Element = typename T::Element;
    int const key = item.key_begin + first, num_keys = item.num_keys - first;
    if (item.split >= 0) {
        int64_t const stride = int64_t(p.fwd.num_heads_k) * T::kHeadDim;
        int64_t const offset =
            (int64_t(item.split) * p.fwd.total_context + key) * stride + int64_t(head_k) * T::kHeadDim;
        store_rows_fp32<T::kHeadDim>(acc, (kDk ? p.dk_partial : p.dv_partial) + offset, stride, num_keys);
        return;
    }
    void* out = kDk ? p.dk : p.dv;
    int64_t row_stride = kDk ? p.dk_row_stride : p.dv_row_stride,
            head_stride = kDk ? p.dk_head_stride : p.dv_head_stride;
    if (item.region != 0) {
        out = kDk ? p.dk_context : p.dv_context;
        row_stride = kDk ? p.dk_context_row_stride : p.dv_context_row_stride;
        head_stride = kDk ? p.dk_context_head_stride : p.dv_context_head_stride;
    }
    float const scale = kDk ? p.fwd.softmax_scale : 1.f;
    store_rows<Element, T::kHeadDim>(acc, scale, scale,
                                     static_cast<Element*>(out) + key * row_stride + head_k * head_stride, row_stride,
                                     num_keys, p.fwd.head_dim);
}

// The two scalars of the thread's j-th pair of columns, from a stage's row scalars.
__device__ __forceinline__ float2 column_pair(float const* scalars, int j) {
    return *reinterpret_cast<float2 const*>(scalars + 8 * j + 2 * (threadIdx.x % 4));
}

// The scalars of the columns, times `factor`, as what accumulators begin with (bwd_wide_mma.h):
// lse and D enter without a load behind the products, P = exp2(scale (S - lse / scale)), dS = P (dP - D).
template <int N>
__device__ __forceinline__ void fill_columns(float (&x)[N], float const* scalars, float factor) {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        float2 const pair = column_pair(scalars, j);
        x[4 * j] = x[4 * j + 2] = pair.x * factor;
        x[4 * j + 1] = x[4 * j + 3] = pair.y * factor;
    }
}

}  // namespace flash_attn::sm90
