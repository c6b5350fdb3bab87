// After the backward: dQ tiles of the fp32 accumulator to rows, times softmax_scale; partial dK, dV of row splits summed in
// a fixed order. The accumulator keeps each tile in the order of the consumers' registers, so that it is written, read
// and converted without a transpose: float4 number 128 i + t of a warpgroup's part holds registers 4 i .. 4 i + 3 of thread t.
#pragma once

#include "bwd_mma.h"

namespace flash_attn::sm90 {

// Grid (64-row blocks, query heads of the chunk, warpgroups' shares of the columns), 128 threads.
template <class T>
__global__ void __launch_bounds__(128) bwd_convert_dq(BwdParams const p) {
    using Element = typename T::Element;
    constexpr int kColumns = T::kDqColumns;
    int const row = blockIdx.x * kBlockRows, part = blockIdx.z;
    int const head = p.head_k_begin * (p.fwd.num_heads / p.fwd.num_heads_k) + blockIdx.y;
    float4 const* const tile =
        reinterpret_cast<float4 const*>(p.dq_accum + (blockIdx.y * p.rows_padded + row) * T::kHeadDim +
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

// Grid (key items, kv heads of the chunk), a thread per two columns of a row. Acts on the first split of each key tile.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(256) bwd_sum_splits(BwdParams const p) {
    KeyItem const item = p.fwd.plan.key_items[blockIdx.x];
    if (item.num_keys == 0 || item.split != 0) { return; }
    int const head = p.head_k_begin + blockIdx.y;
    int64_t const row_stride = int64_t(p.fwd.num_heads_k) * kHeadDim, split_stride = p.fwd.total_context * row_stride;
    for (int i = threadIdx.x; i < item.num_keys * kHeadDim / 2; i += 256) {
        int const key = item.key_begin + i / (kHeadDim / 2), column = i % (kHeadDim / 2) * 2;
        if (column >= p.fwd.head_dim) { continue; }
        int64_t const at = key * row_stride + head * kHeadDim + column;
        float2 dk = make_float2(0.f, 0.f), dv = dk;
        for (int split = 0; split < p.num_splits; ++split) {
            float2 const x = *reinterpret_cast<float2 const*>(p.dk_partial + split * split_stride + at);
            float2 const y = *reinterpret_cast<float2 const*>(p.dv_partial + split * split_stride + at);
            dk.x += x.x, dk.y += x.y, dv.x += y.x, dv.y += y.y;
        }
        float const scale = p.fwd.softmax_scale;
        auto const put = [&](void* out, int64_t stride, int64_t head_stride, uint32_t value) {
            *reinterpret_cast<uint32_t*>(static_cast<Element*>(out) + key * stride + head * head_stride + column) =
                value;
        };
        put(p.dk_context, p.dk_context_row_stride, p.dk_context_head_stride, pack<Element>(dk.x * scale, dk.y * scale));
        put(p.dv_context, p.dv_context_row_stride, p.dv_context_head_stride, pack<Element>(dv.x, dv.y));
    }
}

}  // namespace flash_attn::sm90
