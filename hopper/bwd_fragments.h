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

// fp32 partials of dK or dV that a row split has for 64 keys from `first` of the item on.
template <class T, bool kDk>
__device__ __forceinline__ float* partial_rows(BwdParams const& p, KeyItem const& item, int split, int head_k, int first) {
    int64_t const row = int64_t(split) * p.fwd.total_context + item.key_begin + first;
    return (kDk ? p.dk_partial : p.dv_partial) + (row * p.fwd.num_heads_k + head_k) * T::kHeadDim;
}

// Counts a warp that has stored its part of a split; whether it is the last of all splits, to which all parts are visible.
__device__ __forceinline__ bool is_last_split(int* count, int num_splits) {
    __threadfence();
    __syncwarp();
    int before = 0;
    if (threadIdx.x % 32 == 0) { before = atomicAdd(count, 1); }
    before = __shfl_sync(0xffffffff, before, 0);
    __threadfence();
    return before == num_splits - 1;
}

// Rows of dK or dV of the item's region from its key `first` on, and what lies between two of them.
template <class T, bool kDk>
__device__ __forceinline__ typename T::Element* gradient_rows(BwdParams const& p, KeyItem const& item, int head_k, int first,
                                                              int64_t& row_stride) {
    bool const context = item.region != 0;
    void* const out = kDk ? (context ? p.dk_context : p.dk) : (context ? p.dv_context : p.dv);
    row_stride = kDk ? (context ? p.dk_context_row_stride : p.dk_row_stride) : (context ? p.dv_context_row_stride : p.dv_row_stride);
    int64_t const head_stride =
        kDk ? (context ? p.dk_context_head_stride : p.dk_head_stride) : (context ? p.dv_context_head_stride : p.dv_head_stride);
    return static_cast<typename T::Element*>(out) + (item.key_begin + first) * row_stride + head_k * head_stride;
}

// dK (scaled) or dV of the warp's 16 keys from `first` on: its partials summed in the order of the splits. Four columns a lane.
template <class T, bool kDk>
__device__ __forceinline__ void sum_splits(BwdParams const& p, KeyItem const& item, int head_k, int first) {
    using Element = typename T::Element;
    constexpr int kVectors = T::kHeadDim / 4, kEach = kVectors / 2;         // float4 of a key; of 16 keys, for each lane
    constexpr int kBatch = kEach <= 16 ? kEach : kEach / 2;                 // loads under way
    int64_t const partial_stride = int64_t(p.fwd.num_heads_k) * T::kHeadDim;
    float const scale = kDk ? p.fwd.softmax_scale : 1.f;
    int64_t row_stride;
    Element* const out = gradient_rows<T, kDk>(p, item, head_k, first, row_stride);
    int const num_keys = item.num_keys - first;
#pragma unroll 1
    for (int begin = threadIdx.x % 32; begin < 32 * kEach; begin += 32 * kBatch) {
        float4 sum[kBatch];
#pragma unroll 1
        for (int split = 0; split < p.num_splits; ++split) {
            float const* const part = partial_rows<T, kDk>(p, item, split, head_k, first);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                int const key = (begin + 32 * i) / kVectors, column = (begin + 32 * i) % kVectors * 4;
                if (split == 0) { sum[i] = make_float4(0.f, 0.f, 0.f, 0.f); }
                if (key >= num_keys) { continue; }
                float4 const x = __ldcg(reinterpret_cast<float4 const*>(part + key * partial_stride + column));
                sum[i].x += x.x, sum[i].y += x.y, sum[i].z += x.z, sum[i].w += x.w;
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            int const key = (begin + 32 * i) / kVectors, column = (begin + 32 * i) % kVectors * 4;
            if (key >= num_keys || column >= p.fwd.head_dim) { continue; }
            *reinterpret_cast<uint2*>(out + key * row_stride + column) =
                make_uint2(pack<Element>(sum[i].x * scale, sum[i].y * scale), pack<Element>(sum[i].z * scale, sum[i].w * scale));
        }
    }
}

// dK (scaled) or dV of 64 keys from `first` of the item on.
template <class T, bool kDk>
__device__ __forceinline__ void store_gradient(BwdParams const& p, KeyItem const& item, int head_k, int first,
                                               float const (&acc)[T::kHeadDim / 2]) {
    float const scale = kDk ? p.fwd.softmax_scale : 1.f;
    int64_t row_stride;
    auto* const out = gradient_rows<T, kDk>(p, item, head_k, first, row_stride);
    store_rows<typename T::Element, T::kHeadDim>(acc, scale, scale, out, row_stride, item.num_keys - first, p.fwd.head_dim);
}

// The gradients kDk... (true: dK) of 64 keys from `first` of the item on. Of a row split they are fp32 partials; the warp that
// is the last of all splits with the same keys sums them, in the splits' order, so that the bits do not depend on who is last.
template <class T, bool... kDk, class... Acc>
__device__ __forceinline__ void bwd_store_gradients(BwdParams const& p, KeyItem const& item, int head_k, int first,
                                                    Acc const&... acc) {
    if (item.split < 0) {
        (store_gradient<T, kDk>(p, item, head_k, first, acc), ...);
        return;
    }
    int const num_keys = item.num_keys - first, warp_first = first + threadIdx.x % 128 / 32 * 16;
    if (warp_first >= item.num_keys) { return; }
    (store_rows_fp32<T::kHeadDim>(acc, partial_rows<T, kDk>(p, item, item.split, head_k, first),
                                  int64_t(p.fwd.num_heads_k) * T::kHeadDim, num_keys),
     ...);
    constexpr bool kGradients[] = {kDk...};
    int64_t const row = item.key_begin + warp_first + (kGradients[0] ? p.fwd.total_context : 0);
    if (is_last_split(p.split_counts + row * p.fwd.num_heads_k + head_k, p.num_splits)) {
        (sum_splits<T, kDk>(p, item, head_k, warp_first), ...);
    }
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
