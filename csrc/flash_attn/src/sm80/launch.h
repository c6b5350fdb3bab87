// Host side of the mma.sync kernels: picks the tile, sizes the grid, launches. One instantiation per element type and head dim.
#pragma once

#include "../common/launch.h"
#include "bwd_mainloop.h"
#include "fwd_mainloop.h"
#include "pass_mainloop.h"
#include "tiles.h"

namespace flash_attn::sm80 {

template <typename Element, int kHeadDim>
struct Kernels {
    static constexpr ForwardTile kF = find_tile(kForwardTiles, kHeadDim), kQ = find_tile(kDqTiles, kHeadDim);
    static constexpr BackwardTile kB = find_tile(kBackwardTiles, kHeadDim);
    static_assert(kF.head_dim == kHeadDim && kQ.head_dim == kHeadDim && kB.head_dim == kHeadDim, "no tile for this head dim");
    static_assert(kF.block_m == kQ.block_m, "the forward and the dQ pass share their query items");
    using Forward = ForwardTraits<Element, kHeadDim, kF.block_m, kF.block_n, kF.num_warps, kF.num_slots, kF.blocks_per_sm>;
    using DqPass = PassTraits<Element, kHeadDim, kQ.block_m, kQ.block_n, kQ.num_warps, kQ.num_slots, kQ.blocks_per_sm>;
    using Backward = BackwardTraits<Element, kHeadDim, kB.block_m, kB.block_n, kB.num_warps, kB.warps_m, kB.warps_n, kB.warps_q,
                                    kB.query_stages, kB.dout_stages, kB.blocks_per_sm>;
};

// Query heads whose keys and values stay in L2 while every query tile passes over them.
inline int section_heads(FwdParams const& p, int num_heads_k) {
    constexpr int64_t kSectionBytes = 32 << 20;
    int64_t const rows = p.total_k + (p.k_context == p.k ? 0 : p.total_context);
    int64_t const head_bytes = rows * p.head_dim * 4 + 1;
    int64_t const fit = kSectionBytes / head_bytes;
    int const heads_k = fit < 1 ? 1 : fit > num_heads_k ? num_heads_k : static_cast<int>(fit);
    return heads_k * (p.num_heads / p.num_heads_k);
}

template <typename Element, int kHeadDim>
cudaError_t run_fwd(FwdParams const& p, cudaStream_t stream) {
    using T = typename Kernels<Element, kHeadDim>::Forward;
    auto const kernel = p.softcap > 0.f ? forward_kernel<T, true> : forward_kernel<T, false>;
    int64_t const blocks = static_cast<int64_t>(p.plan.num_query_items) * p.num_heads;
    return launch(kernel, blocks, 1, T::kThreads, T::kSharedBytes, stream, p, section_heads(p, p.num_heads_k));
}

template <typename Element, int kHeadDim>
cudaError_t run_bwd(BwdParams const& p, cudaStream_t stream) {
    using T = typename Kernels<Element, kHeadDim>::Backward;
    auto const kernel = p.dq_accum == nullptr
                            ? (p.fwd.softcap > 0.f ? backward_kernel<T, true, false> : backward_kernel<T, false, false>)
                            : (p.fwd.softcap > 0.f ? backward_kernel<T, true, true> : backward_kernel<T, false, true>);
    int const heads_k = p.head_k_end - p.head_k_begin;
    return launch(kernel, static_cast<int64_t>(p.fwd.plan.num_key_items) * heads_k, 1, T::kThreads, T::kSharedBytes, stream, p,
                  p.fwd.num_heads / p.fwd.num_heads_k, heads_k);
}

template <typename Element, int kHeadDim>
cudaError_t run_bwd_dq(BwdParams const& p, cudaStream_t stream) {
    using T = typename Kernels<Element, kHeadDim>::DqPass;
    auto const kernel = p.fwd.softcap > 0.f ? dq_pass_kernel<T, true> : dq_pass_kernel<T, false>;
    int const heads_k = p.head_k_end - p.head_k_begin;
    int64_t const blocks = static_cast<int64_t>(p.fwd.plan.num_query_items) * heads_k * (p.fwd.num_heads / p.fwd.num_heads_k);
    return launch(kernel, blocks, 1, T::kThreads, T::kSharedBytes, stream, p, section_heads(p.fwd, heads_k));
}

template <typename Element, int kHeadDim>
cudaError_t run_bwd_post(BwdParams const& p, cudaStream_t stream) {
    int const heads_k = p.head_k_end - p.head_k_begin;
    if (p.dq_accum != nullptr) {
        cudaError_t const error = launch(dq_post_kernel<Element, kHeadDim>, ceil_div(p.fwd.total_q, kBlockRows),
                                         heads_k * (p.fwd.num_heads / p.fwd.num_heads_k), kPostThreads, kBlockRows * kHeadDim * 2, stream, p);
        if (error != cudaSuccess) return error;
    }
    if (p.dk_partial == nullptr) return cudaSuccess;
    return launch(split_post_kernel<Element, kHeadDim>, p.fwd.plan.num_key_items, heads_k, kPostThreads, 0, stream, p);
}

}  // namespace flash_attn::sm80
