// Forward for head dims above 256: out = softmax(q k^T scale) v and lse, for (a part of) one QueryItem and one query head a
// block. As fwd_mainloop.h, with a slab's rows shared by two warps (wide_fragments.h). Called from wide_launch.h.
#pragma once

#include "fwd_mainloop.h"
#include "wide_fragments.h"

namespace flash_attn::sm80 {

// The rows of an item that a block of T::kBlockM rows takes; num_rows <= 0: none.
template <typename T>
__device__ __forceinline__ QueryItem part_of_item(QueryItem item, int part) {
    item.row_begin += part * T::kBlockM;
    item.num_rows = min(item.num_rows - part * T::kBlockM, T::kBlockM);
    return item;
}

template <typename T>
__device__ __forceinline__ void store_wide_forward(FwdParams const& p, QueryItem const& item, int head, WideWarp<T> const& warp,
                                                   OnlineSoftmax<1>& softmax, float (&o)[1][T::kOutTiles][4]) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float const l = quad_sum(softmax.l[0][half]), inverse = l > 0.f ? 1.f / l : l;  // NaN stays NaN
        bool const empty = l == 0.f;
        int const row = warp.first_row() + half * 8 + lane / 4;
        if (warp.part == 0 && lane % 4 == 0 && row < item.num_rows)
            p.lse[head * p.lse_head_stride + item.row_begin + row] = empty ? -INFINITY : (softmax.m[0][half] + log2f(l)) * kLn2;
#pragma unroll
        for (int no = 0; no < T::kOutTiles; ++no) {
#pragma unroll
            for (int j = 2 * half; j < 2 * half + 2; ++j) o[0][no][j] = empty ? 0.f : o[0][no][j] * inverse;
        }
    }
    auto* out = static_cast<typename T::Element*>(p.out) + item.row_begin * p.out_row_stride + head * p.out_head_stride;
    warp.store(o, out, p.out_row_stride, 0, item.num_rows, p.head_dim);
}

template <typename T, bool kSoftcap>
__global__ void __launch_bounds__(T::kThreads, 1) wide_forward_kernel(FwdParams const __grid_constant__ p, int const num_parts,
                                                                     int const section_heads) {
    extern __shared__ __align__(1024) char shared_bytes[];
    uint32_t const shared = shared_address(shared_bytes);
    int index, head;
    decode_block(p.plan.num_query_items * num_parts, p.num_heads, section_heads, index, head);
    QueryItem const item = part_of_item<T>(load_item(p.plan.query_items + index / num_parts), index % num_parts);
    if (item.num_rows <= 0) return;
    KeyTiles<T::kBlockN> const tiles(p.plan, index / num_parts, item);
    ForwardLoader<T> const load{p, tiles, shared, head, head / (p.num_heads / p.num_heads_k)};
    if (tiles.num_tiles > 0) {
        load.rows(shared, p.q, p.q_row_stride, p.q_head_stride, item);
        load.keys(tiles.tile(0), false, 0);
    }
    copy_async_commit();

    WideWarp<T> const warp(shared);
    float const scale_log2 = (kSoftcap ? p.softcap : p.softmax_scale) * kLog2E;
    float o[1][T::kOutTiles][4];
    clear(o);
    OnlineSoftmax<1> softmax;
    for (int i = 0; i < tiles.num_tiles; ++i) {
        copy_async_wait<0>();
        __syncthreads();  // K_i is there, V_(i-1) done with
        load.keys(tiles.tile(i), true, 1);
        copy_async_commit();
        float s[1][T::kTiles][4];
        warp.template scores<false>(s, 0, T::kRing);
        warp.add_all(s);
        if constexpr (kSoftcap) apply_softcap(s, p.softmax_scale / p.softcap);
        mask_unseen<T>(s, tiles, i, index % num_parts * T::kBlockM + warp.first_row(), -INFINITY);
        uint32_t prob[T::kTiles / 2][1][4];
        SoftmaxTile<typename T::Element, 1, T::kTiles> tile(softmax, s, prob, scale_log2);
        tile.maxima(0, tile.kUnits);
        tile.update();
        tile.rescale(o);
        tile.exponentials(0, tile.kUnits);
        copy_async_wait<0>();
        __syncthreads();  // V_i is there, K_i done with
        if (i + 1 < tiles.num_tiles) load.keys(tiles.tile(i + 1), false, 0);
        copy_async_commit();
        uint32_t operand[T::kTiles / 2][4];
#pragma unroll
        for (int kk = 0; kk < T::kTiles / 2; ++kk)
#pragma unroll
            for (int j = 0; j < 4; ++j) operand[kk][j] = prob[kk][0][j];
        warp.template accumulate<false>(o, operand, T::kRing + T::kSlotBytes);
    }
    store_wide_forward<T>(p, item, head, warp, softmax, o);
}

}  // namespace flash_attn::sm80
