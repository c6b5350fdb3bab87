// After the backward: dQ tiles of the fp32 accumulator to rows, times softmax_scale. The accumulator keeps each tile in the order of
// the consumers' registers, so that it is written, read and converted without a transpose: float4 number 128 i + t of a warpgroup's
// part holds registers 4 i .. 4 i + 3 of thread t.
#pragma once

#include "bwd_mma.h"

namespace flash_attn::sm90 {

// One warpgroup's share of the columns of a 64-row block. Blocks of the grid: block, then share, then query head of the chunk.
template <class T>
__global__ void __launch_bounds__(128) bwd_finish(BwdParams const p) {
    using Element = typename T::Element;
    constexpr int kColumns = T::kDqColumns, kParts = T::kHeadDim / kColumns;
    int const blocks = (p.fwd.total_q + kBlockRows - 1) / kBlockRows;
    int const index = blockIdx.x, row = index % blocks * kBlockRows, part = index / blocks % kParts,
              chunk_head = index / blocks / kParts;
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

}  // namespace flash_attn::sm90
