// Host side of the kernels for head dims above 256. Called from launch.h, whose functions hand these head dims over.
#pragma once

#include "../common/launch.h"
#include "tiles.h"
#include "wide_passes.h"

namespace flash_attn::sm80 {

template <typename Element, auto const& kTable, int kRow>
using WideShapeOf = WideShape<Element, kTable[kRow].head_dim, kTable[kRow].block_rows, kTable[kRow].block_stream, kTable[kRow].num_warps>;

// Calls launch_row(integral constant of the row) for the first row of kTable that fits the GPU, or the last.
template <auto const& kTable, int kRow = 0, typename LaunchRow>
cudaError_t with_wide_row(int row, LaunchRow launch_row) {
    if constexpr (kRow < static_cast<int>(sizeof(kTable) / sizeof(kTable[0]))) {
        if (row == kRow) return launch_row(std::integral_constant<int, kRow>{});
        return with_wide_row<kTable, kRow + 1>(row, launch_row);
    }
    return cudaErrorInvalidValue;
}

template <typename Element>
cudaError_t run_wide_fwd(FwdParams const& p, int section_heads, cudaStream_t stream) {
    int const row = find_tile(kWideForwardTiles, 512, shared_memory_limit(), &WideTile::forward_bytes);
    return with_wide_row<kWideForwardTiles>(row, [&](auto constant) {
        constexpr int kRow = decltype(constant)::value;
        using T = WideQueryTraits<WideShapeOf<Element, kWideForwardTiles, kRow>, 1>;
        static_assert(T::kSharedBytes == kWideForwardTiles[kRow].forward_bytes());
        auto const kernel = p.softcap > 0.f ? wide_forward_kernel<T, true> : wide_forward_kernel<T, false>;
        int const parts = kWideItemRows / T::kBlockM;
        int64_t const blocks = static_cast<int64_t>(p.plan.num_query_items) * parts * p.num_heads;
        return launch(kernel, blocks, 1, T::kThreads, T::kSharedBytes, stream, p, parts, section_heads);
    });
}

// dv, then dk. Both must fit the GPU before either is started.
template <typename Element>
cudaError_t run_wide_bwd(BwdParams const& p, cudaStream_t stream) {
    int const limit = shared_memory_limit(), group = p.fwd.num_heads / p.fwd.num_heads_k, heads_k = p.head_k_end - p.head_k_begin;
    int const dk_row = find_tile(kWideDkTiles, 512, limit, &WideTile::dk_bytes);
    if (kWideDkTiles[dk_row].dk_bytes() > limit) return cudaErrorInvalidValue;
    int64_t const items = static_cast<int64_t>(p.fwd.plan.num_key_items) * heads_k;
    bool const softcap = p.fwd.softcap > 0.f;
    cudaError_t const error = with_wide_row<kWideDvTiles>(find_tile(kWideDvTiles, 512, limit, &WideTile::dv_bytes), [&](auto constant) {
        constexpr int kRow = decltype(constant)::value;
        using T = WideKeyTraits<WideShapeOf<Element, kWideDvTiles, kRow>, 1>;
        static_assert(T::kSharedBytes == kWideDvTiles[kRow].dv_bytes());
        int const parts = kWideItemRows / T::kBlockN;
        return launch(softcap ? wide_dv_kernel<T, true> : wide_dv_kernel<T, false>, items * parts, 1, T::kThreads, T::kSharedBytes, stream,
                      p, group, parts, heads_k);
    });
    if (error != cudaSuccess) return error;
    return with_wide_row<kWideDkTiles>(dk_row, [&](auto constant) {
        constexpr int kRow = decltype(constant)::value;
        using T = WideKeyTraits<WideShapeOf<Element, kWideDkTiles, kRow>, 2>;
        static_assert(T::kSharedBytes == kWideDkTiles[kRow].dk_bytes());
        int const parts = kWideItemRows / T::kBlockN;
        return launch(softcap ? wide_dk_kernel<T, true> : wide_dk_kernel<T, false>, items * parts, 1, T::kThreads, T::kSharedBytes, stream,
                      p, group, parts, heads_k);
    });
}

template <typename Element>
cudaError_t run_wide_bwd_dq(BwdParams const& p, int section_heads, cudaStream_t stream) {
    int const row = find_tile(kWideDqTiles, 512, shared_memory_limit(), &WideTile::dq_bytes);
    return with_wide_row<kWideDqTiles>(row, [&](auto constant) {
        constexpr int kRow = decltype(constant)::value;
        using T = WideQueryTraits<WideShapeOf<Element, kWideDqTiles, kRow>, 2>;
        static_assert(T::kSharedBytes == kWideDqTiles[kRow].dq_bytes());
        auto const kernel = p.fwd.softcap > 0.f ? wide_dq_kernel<T, true> : wide_dq_kernel<T, false>;
        int const parts = kWideItemRows / T::kBlockM, heads = (p.head_k_end - p.head_k_begin) * (p.fwd.num_heads / p.fwd.num_heads_k);
        int64_t const blocks = static_cast<int64_t>(p.fwd.plan.num_query_items) * parts * heads;
        return launch(kernel, blocks, 1, T::kThreads, T::kSharedBytes, stream, p, parts, section_heads);
    });
}

}  // namespace flash_attn::sm80
