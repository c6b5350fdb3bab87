// After the backward, in one launch: dQ tiles of the fp32 accumulator to rows, times softmax_scale; partial dK, dV of row splits
// summed in a fixed order. The accumulator keeps each tile in the order of the consumers' registers, so that it is written, read
// and converted without a transpose: float4 number 128 i + t of a warpgroup's part holds registers 4 i .. 4 i + 3 of thread t.
#pragma once

#include "bwd_mma.h"

namespace flash_attn::sm90 {

// One warpgroup's share of the columns of a 64-row block. index: block, then share, then query head of the chunk.
template <class T>
__device__ __forceinline__ void convert_dq(BwdParams const& p, int index) {
    using Element = typename T::Element;
    constexpr int kColumns = T::kDqColumns, kParts = T::kHeadDim / kColumns;
    int const blocks = (p.fwd.total_q + kBlockRows - 1) / kBlockRows;
    int const row = index % blocks * kBlockRows, part = index / blocks % kParts, chunk_head = index / blocks / kParts;
    int const head = p.head_k_begin * (p.fwd.num_heads / p.fwd.num_heads_k) + chunk_head;
    float4 const* const tile =
        reinterpret_cast<float4 const*>(p.dq_accum + (chunk_head * p.rows_padded + row) * T::kHeadDim +
                                        part * T::kDqFloats) +
        threadIdx.x;
    float dq[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) { *reinterpret_cast<float4*>(dq + 4 * i) = __ldcs(tile + 128 * i); }
    Element* const out =
        static_cast<Element*>(p.dq) + row * p.dq_row_stride + head * p.dq_head_stride + part * kColumns;
    store_rows<Element, kColumns>(dq, p.fwd.softmax_scale, p.fwd.softmax_scale, out, p.dq_row_stride,
                                  p.fwd.total_q - row, p.fwd.head_dim - part * kColumns);
}

// dK and dV of a context tile and kv head: of its keys a share for every split's entry in the list. Four columns a thread.
template <class T>
__device__ __forceinline__ void sum_splits(BwdParams const& p, KeyItem const& item, int head) {
    using Element = typename T::Element;
    constexpr int kVectors = T::kHeadDim / 4;
    int64_t const row_stride = int64_t(p.fwd.num_heads_k) * T::kHeadDim, split_stride = p.fwd.total_context * row_stride;
    float const scale = p.fwd.softmax_scale;
    int const last = item.num_keys * (item.split + 1) / p.num_splits * kVectors;
    for (int i = item.num_keys * item.split / p.num_splits * kVectors + threadIdx.x; i < last; i += 128) {
        int const key = item.key_begin + i / kVectors, column = i % kVectors * 4;
        if (column >= p.fwd.head_dim) { continue; }
        int64_t const at = key * row_stride + head * T::kHeadDim + column;
        float4 dk = make_float4(0.f, 0.f, 0.f, 0.f), dv = dk;
#pragma unroll 4
        for (int split = 0; split < p.num_splits; ++split) {
            float4 const x = __ldcs(reinterpret_cast<float4 const*>(p.dk_partial + split * split_stride + at));
            float4 const y = __ldcs(reinterpret_cast<float4 const*>(p.dv_partial + split * split_stride + at));
            dk.x += x.x, dk.y += x.y, dk.z += x.z, dk.w += x.w;
            dv.x += y.x, dv.y += y.y, dv.z += y.z, dv.w += y.w;
        }
        auto const put = [&](void* out, int64_t stride, int64_t head_stride, float4 const& x, float factor) {
            *reinterpret_cast<uint2*>(static_cast<Element*>(out) + key * stride + head * head_stride + column) =
                make_uint2(pack<Element>(x.x * factor, x.y * factor), pack<Element>(x.z * factor, x.w * factor));
        };
        put(p.dk_context, p.dk_context_row_stride, p.dk_context_head_stride, dk, scale);
        put(p.dv_context, p.dv_context_row_stride, p.dv_context_head_stride, dv, 1.f);
    }
}

// 128 threads. The first num_sums blocks: key items of each kv head of the chunk; then pieces of dQ. Not launched early: the first
// blocks, those with most to do, would wait on the few SMs that the main kernel leaves first, and then share them.
template <class T>
__global__ void __launch_bounds__(128) bwd_finish(BwdParams const p, int num_sums) {
    int const index = blockIdx.x;
    if (index >= num_sums) {
        convert_dq<T>(p, index - num_sums);
        return;
    }
    KeyItem const item = p.fwd.plan.key_items[index % p.fwd.plan.num_key_items];
    if (item.num_keys > 0 && item.split >= 0) {
        sum_splits<T>(p, item, p.head_k_begin + index / p.fwd.plan.num_key_items);
    }
}

}  // namespace flash_attn::sm90
