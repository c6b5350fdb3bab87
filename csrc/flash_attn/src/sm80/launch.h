// Host side of the mma.sync kernels: picks the tile, sizes the grid, launches. One instantiation per element type and head dim.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "../common/launch.h"
#include "bwd_kept_mainloop.h"
#include "bwd_mainloop.h"
#include "fwd_mainloop.h"
#include "pass_mainloop.h"
#include "tiles.h"
#include "wide_launch.h"

namespace flash_attn::sm80 {

template <typename Element, int kRow>
struct ForwardOf {
    static constexpr ForwardTile kTile = kForwardTiles[kRow];
    using Traits = ForwardTraits<Element, kTile.head_dim, kTile.block_m, kTile.block_n, kTile.num_warps, kTile.paired,
                                 kTile.blocks_per_sm, kTile.ahead>;
    static_assert(Traits::kSharedBytes == kTile.shared_bytes());
};

template <typename Element, int kRow>
struct DqPassOf {
    static constexpr ForwardTile kTile = kDqTiles[kRow];
    using Traits = PassTraits<Element, kTile.head_dim, kTile.block_m, kTile.block_n, kTile.num_warps,
                              kTile.blocks_per_sm>;
    static_assert(kTile.paired && Traits::kSharedBytes == kTile.pass_shared_bytes());
};

template <typename Element, int kRow>
struct BackwardOf {
    static constexpr BackwardTile kTile = kBackwardTiles[kRow];
    using Traits = BackwardTraits<Element, kTile.head_dim, kTile.block_m, kTile.block_n, kTile.num_warps, kTile.warps_m,
                                  kTile.warps_n, kTile.warps_q, kTile.query_stages, kTile.dout_stages, kTile.blocks_per_sm>;
    static_assert(Traits::kSharedBytes == kTile.shared_bytes());
};

// Calls launch_row(integral constant of `row`) for a row of `kTable` of this head dim: only these are compiled; of them only the
// first in a library for GPUs with 227 KB of shared memory alone (FLASH_ATTN_LARGE_TILES).
template <int kHeadDim, auto const& kTable, int kRow = 0, typename LaunchRow>
cudaError_t with_row(int row, LaunchRow launch_row) {
    if constexpr (kRow < static_cast<int>(sizeof(kTable) / sizeof(kTable[0]))) {
        constexpr bool kMine = kTable[kRow].head_dim == kHeadDim;
        if constexpr (kMine)
            if (row == kRow) return launch_row(std::integral_constant<int, kRow>{});
#ifdef FLASH_ATTN_LARGE_TILES
        if constexpr (!kMine)
#endif
            return with_row<kHeadDim, kTable, kRow + 1>(row, launch_row);
    }
    return cudaErrorInvalidValue;
}

// Query heads whose keys and values stay in L2 while every query tile passes over them: a divisor of their number.
inline int section_heads(FwdParams const& p, int num_heads_k) {
    constexpr int64_t kSectionBytes = 32 << 20;
    int64_t const rows = p.total_k + (p.k_context == p.k ? 0 : p.total_context);
    int64_t const head_bytes = rows * p.head_dim * 4 + 1;
    int64_t const fit = kSectionBytes / head_bytes;
    int heads_k = fit < 1 ? 1 : fit > num_heads_k ? num_heads_k : static_cast<int>(fit);
    while (num_heads_k % heads_k != 0) --heads_k;
    return heads_k * (p.num_heads / p.num_heads_k);
}

// Loads address a tile by 32-bit offsets.
inline bool strides_fit(FwdParams const& p, int64_t dout_row_stride = 0) {
    for (int64_t stride : {p.q_row_stride, p.k_row_stride, p.v_row_stride, p.k_context_row_stride, p.v_context_row_stride, dout_row_stride})
        if (stride < 0 || stride >= kMaxRowStride) return false;
    return true;
}

// kExtras, here and below: the kernels that know p.extras.
template <typename Element, int kHeadDim, bool kExtras = false>
cudaError_t run_fwd(FwdParams const& p, cudaStream_t stream) {
    if (!strides_fit(p)) return cudaErrorNotSupported;
    if constexpr (kHeadDim > 256) return run_wide_fwd<Element>(p, section_heads(p, p.num_heads_k), stream);
    int const row = find_tile(kForwardTiles, kHeadDim, shared_memory_limit(), &ForwardTile::shared_bytes);
    return with_row<kHeadDim, kForwardTiles>(row, [&](auto constant) {
        using T = typename ForwardOf<Element, decltype(constant)::value>::Traits;
        int64_t const blocks = static_cast<int64_t>(p.plan.num_query_items) * p.num_heads;
        auto const start = [&](auto kernel, auto extras) {
            return launch(kernel, blocks, 1, T::kThreads, T::kSharedBytes, stream, p,
                          Schedule(p.plan.num_query_items, section_heads(p, p.num_heads_k), p.num_heads / p.num_heads_k), Scales(p), extras);
        };
        if constexpr (kExtras) return start(forward_kernel<T, false, WithExtras>, WithExtras(p));
        else return start(p.softcap > 0.f ? forward_kernel<T, true, NoExtras> : forward_kernel<T, false, NoExtras>, NoExtras());
    });
}

template <typename Element, int kHeadDim>
cudaError_t run_kept_bwd(BwdParams const& p, int64_t blocks, Schedule const& schedule, cudaStream_t stream) {
    using T = KeptTraits<Element, kHeadDim>;
    return launch(backward_kept_kernel<T>, blocks, 1, T::kThreads, T::kSharedBytes, stream,
                  p, schedule, Scales(p.fwd));
}

template <typename Element, int kHeadDim, bool kExtras = false>
cudaError_t run_bwd(BwdParams const& p, cudaStream_t stream) {
    if (!strides_fit(p.fwd, p.dout_row_stride)) return cudaErrorNotSupported;
    if constexpr (kHeadDim > 256) return run_wide_bwd<Element>(p, stream);
    int const row = find_tile(kBackwardTiles, kHeadDim, shared_memory_limit(), &BackwardTile::shared_bytes);
    return with_row<kHeadDim, kBackwardTiles>(row, [&](auto constant) {
        using T = typename BackwardOf<Element, decltype(constant)::value>::Traits;
        // One section: items are long and few, so that the list's order over all heads is what keeps the SMs busy to the end.
        int const heads_k = p.head_k_end - p.head_k_begin;
        int64_t const blocks = static_cast<int64_t>(p.fwd.plan.num_key_items) * heads_k;
        bool const softcap = p.fwd.softcap > 0.f, accumulate = p.dq_accum != nullptr;
        Schedule const schedule(p.fwd.plan.num_key_items, heads_k, p.fwd.num_heads / p.fwd.num_heads_k);
        auto const start = [&](auto kernel, auto extras) {
            return launch(kernel, blocks, 1, T::kThreads, T::kSharedBytes, stream, p, schedule, Scales(p.fwd), extras);
        };
        if constexpr (kHeadDim == 64 && !kExtras) {
            static_assert(KeptTraits<Element, kHeadDim>::kBlockN == T::kBlockN);
            if (accumulate && !softcap && KeptTraits<Element, kHeadDim>::kSharedBytes <= shared_memory_limit())
                return run_kept_bwd<Element, kHeadDim>(p, blocks, schedule, stream);
        }
        if constexpr (kExtras)
            return start(accumulate ? backward_kernel<T, false, true, WithExtras> : backward_kernel<T, false, false, WithExtras>, WithExtras(p.fwd));
        else
            return start(accumulate ? (softcap ? backward_kernel<T, true, true, NoExtras> : backward_kernel<T, false, true, NoExtras>)
                                    : (softcap ? backward_kernel<T, true, false, NoExtras> : backward_kernel<T, false, false, NoExtras>),
                         NoExtras());
    });
}

template <typename Element, int kHeadDim, bool kExtras = false>
cudaError_t run_bwd_dq(BwdParams const& p, cudaStream_t stream) {
    if (!strides_fit(p.fwd, p.dout_row_stride)) return cudaErrorNotSupported;
    if constexpr (kHeadDim > 256) return run_wide_bwd_dq<Element>(p, section_heads(p.fwd, p.head_k_end - p.head_k_begin), stream);
    int const row = find_tile(kDqTiles, kHeadDim, shared_memory_limit(), &ForwardTile::pass_shared_bytes);
    return with_row<kHeadDim, kDqTiles>(row, [&](auto constant) {
        using T = typename DqPassOf<Element, decltype(constant)::value>::Traits;
        int const heads_k = p.head_k_end - p.head_k_begin;
        int const group = p.fwd.num_heads / p.fwd.num_heads_k;
        int64_t const blocks = static_cast<int64_t>(p.fwd.plan.num_query_items) * heads_k * group;
        auto const start = [&](auto kernel, auto extras) {
            return launch(kernel, blocks, 1, T::kThreads, T::kSharedBytes, stream, p,
                          Schedule(p.fwd.plan.num_query_items, section_heads(p.fwd, heads_k), group), Scales(p.fwd), extras);
        };
        if constexpr (kExtras) return start(dq_pass_kernel<T, false, WithExtras>, WithExtras(p.fwd));
        else return start(p.fwd.softcap > 0.f ? dq_pass_kernel<T, true, NoExtras> : dq_pass_kernel<T, false, NoExtras>, NoExtras());
    });
}

template <typename Element, int kHeadDim>
cudaError_t run_fwd_extras(FwdParams const& p, cudaStream_t stream) {
    return run_fwd<Element, kHeadDim, true>(p, stream);
}

template <typename Element, int kHeadDim>
cudaError_t run_bwd_extras(BwdParams const& p, cudaStream_t stream) {
    return run_bwd<Element, kHeadDim, true>(p, stream);
}

template <typename Element, int kHeadDim>
cudaError_t run_bwd_dq_extras(BwdParams const& p, cudaStream_t stream) {
    return run_bwd_dq<Element, kHeadDim, true>(p, stream);
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
