// Head dim 512: kernels and launches of the passes in pair_traits.h. A pair of blocks per query item and two heads (forward)
// or one (dQ), or per key item and kv head (dK, dV), in the plan's order, longest first.
#pragma once

#include "maps.h"
#include "pair_output.h"
#include "pair_scores.h"

namespace flash_attn::sm90 {

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) pair_kernel(__grid_constant__ PairArgs const args) {
    extern __shared__ __align__(1024) char memory[];
    PairStorage<T>& s = *reinterpret_cast<PairStorage<T>*>(memory);
    int const rank = cluster_rank(), blocks = cluster_size();
    int item_index, head;
    if constexpr (T::kDkv) {
        args.order.decode_keys(args.params.fwd.plan, 1, blockIdx.x / blocks, item_index, head);
    } else {
        args.order.decode(blockIdx.x / blocks, item_index, head);
    }
    if constexpr (T::kForward) { head = head * blocks + rank; }
    auto const item = [&] {
        if constexpr (T::kDkv) {
            return args.params.fwd.plan.key_items[item_index];
        } else {
            return args.params.fwd.plan.query_items[item_index];
        }
    }();
    if constexpr (T::kDkv) {
        if (item.num_keys == 0) { return; }
    } else {
        if (item.num_rows == 0) { return; }
    }
    if (threadIdx.x == 0) {
        s.init(rank, blocks);
        fence_barrier_init();
    }
    cluster_sync();
    int const warpgroup = uniform_warpgroup();
    if (warpgroup == 0) {
        shrink_registers<T::kLoadRegisters>();
        if constexpr (T::kDkv) {
            pair_load_rows<T>(args, s, item, head, rank, blocks);
        } else {
            pair_load_keys<T>(args, s, item, head, rank, blocks);
        }
        cluster_sync();
    } else if (warpgroup == 1) {
        grow_registers<T::kScoreRegisters>();
        PairScores<T> scores{args, s, rank, blocks};
        if constexpr (T::kForward) {
            scores.softmax(item, head);
        } else {
            scores.gradients(item, head);
        }
        cluster_sync();
    } else {
        if constexpr (T::kOutputRegisters > 128) {
            grow_registers<T::kOutputRegisters>();
        } else {
            shrink_registers<T::kOutputRegisters>();
        }
        PairOutput<T> output{args, s, rank, blocks, warpgroup - 2};
        int num_tiles = 0;
        if constexpr (T::kDq) {
            KeyWalk walk;
            walk.template init<T::kTile>(item);
            num_tiles = walk.size();
        }
        output.accumulate(num_tiles);
        if constexpr (T::kDkv) {
            output.store_gradient(item, head);
        } else {
            output.store_output(item, head);
        }
        cluster_sync();
    }
}

template <class T>
cudaError_t launch_pairs(PairArgs& args, int blocks, cudaStream_t stream) {
    using Element = typename T::Element;
    BwdParams const& p = args.params;
    FwdParams const& f = p.fwd;
    FLASH_ATTN_TRY((make_map<Element, typename T::Half>(args.maps.rows[0], f.q, f.total_q, f.num_heads, f.head_dim,
                                                        f.q_row_stride, f.q_head_stride)));
    if constexpr (!T::kForward) {
        FLASH_ATTN_TRY((make_map<Element, typename T::Half>(args.maps.rows[1], p.dout, f.total_q, f.num_heads,
                                                            f.head_dim, p.dout_row_stride, p.dout_head_stride)));
    }
    FLASH_ATTN_TRY((make_key_maps<Element, typename T::Half>(f, args.maps.keys[0], args.maps.keys[1])));
    int const grid = args.order.size() * blocks;
    if (grid == 0) { return cudaSuccess; }
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {unsigned(blocks), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(T::kThreads);
    config.dynamicSmemBytes = sizeof(PairStorage<T>);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    static_assert(sizeof(PairStorage<T>) <= 227 * 1024);
    FLASH_ATTN_TRY(cudaFuncSetAttribute(pair_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        sizeof(PairStorage<T>)));
    return cudaLaunchKernelEx(&config, pair_kernel<T>, args);
}

// Query items for `units` units from `first` on; a unit, `unit_heads` query heads, is what a pair of blocks computes.
inline WorkOrder query_order(FwdParams const& p, int units, int unit_heads, int first) {
    int64_t const keys = int64_t(p.total_k) + (p.k_context == p.k ? 0 : p.total_context);
    return {p.plan.num_query_items, units,
            section_heads(units, p.num_heads / p.num_heads_k / unit_heads, keys * p.head_dim * 4, int64_t(32) << 20),
            first};
}

template <class Element, bool kSoftcap>
cudaError_t launch_pair_fwd(FwdParams const& p, cudaStream_t stream) {
    PairArgs args{};
    args.params.fwd = p;
    int const blocks = p.num_heads / p.num_heads_k % 2 == 0 ? 2 : 1;
    args.order = query_order(p, p.num_heads / blocks, blocks, 0);
    return launch_pairs<PairTraits<Element, PairPass::kForward, kSoftcap>>(args, blocks, stream);
}

template <class Element, bool kSoftcap>
cudaError_t launch_pair_dkv(BwdParams const& p, cudaStream_t stream) {
    PairArgs args{};
    args.params = p;
    int const heads = p.head_k_end - p.head_k_begin;
    // One kv head after the other: the pairs under way then stream the same rows, and find them in L2.
    args.order = {p.fwd.plan.num_key_items, heads, 1, p.head_k_begin};
    return launch_pairs<PairTraits<Element, PairPass::kDkv, kSoftcap>>(args, 2, stream);
}

template <class Element, bool kSoftcap>
cudaError_t launch_pair_dq(BwdParams const& p, cudaStream_t stream) {
    PairArgs args{};
    args.params = p;
    int const group = p.fwd.num_heads / p.fwd.num_heads_k;
    args.order = query_order(p.fwd, (p.head_k_end - p.head_k_begin) * group, 1, p.head_k_begin * group);
    return launch_pairs<PairTraits<Element, PairPass::kDq, kSoftcap>>(args, 2, stream);
}

}  // namespace flash_attn::sm90
