// Launches: tensor maps from the parameters, grid, shared memory. The only file that the rest of the library includes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "bwd_post.h"
#include "bwd_wide_mma.h"
#include "maps.h"
#include "pair_launch.h"
#include "pass_mma.h"

namespace flash_attn::sm90 {

// The forward, or the dQ pass over the same items.
template <class T, class Args>
__global__ void __launch_bounds__(T::kThreads, 1) fwd_kernel(__grid_constant__ Args const args) {
    extern __shared__ __align__(1024) char memory[];
    FwdStorage<T>& s = *reinterpret_cast<FwdStorage<T>*>(memory);
    if (threadIdx.x == 0) {
        s.init();
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        shrink_registers<T::kLoadRegisters>();
        int const warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // uniform: else the loops want more registers
        if (warp == 0) {
            fwd_load_rows<T>(args, s);
        } else if (warp == 1) {
            fwd_load_keys<T>(args, s);
        }
    } else {
        grow_registers<T::kMmaRegisters>();
        if constexpr (T::kDqPass) {
            dq_mma<T>(args, s);
        } else {
            fwd_mma<T>(args, s);
        }
    }
}

// The other CTA's item, where the two of a cluster work as a pair: whole neighbouring tiles of one context, which see the
// same rows but for a few blocks at the diagonal. They share the loads of Q and dO.
template <class T>
__device__ __forceinline__ bool find_pair(Plan const& plan, int index, KeyItem const& item, KeyItem& other) {
    if ((index ^ 1) >= plan.num_key_items) { return false; }
    other = plan.key_items[index ^ 1];
    return item.region == 1 && other.region == 1 && item.num_keys == T::kBlockN && other.num_keys == T::kBlockN &&
           item.split == other.split && item.row_end == other.row_end &&
           max(item.row_begin, other.row_begin) < item.row_end &&
           abs(item.row_begin - other.row_begin) <= 4 * kBlockRows;
}

template <class T>
__global__ void __cluster_dims__(T::kCluster, 1, 1) __launch_bounds__(T::kThreads, 1)
    bwd_kernel(__grid_constant__ BwdArgs const args) {
    extern __shared__ __align__(1024) char memory[];
    BwdStorage<T>& s = *reinterpret_cast<BwdStorage<T>*>(memory);
    Plan const& plan = args.params.fwd.plan;
    int item_index, head;
    args.order.decode_keys(plan, T::kCluster, blockIdx.x / T::kCluster, item_index, head);
    item_index = item_index * T::kCluster + blockIdx.x % T::kCluster;
    if (item_index >= plan.num_key_items) { return; }
    KeyItem const item = plan.key_items[item_index];
    if (item.num_keys == 0) { return; }
    KeyItem other;
    bool const paired = find_pair<T>(plan, item_index, item, other);
    if (threadIdx.x == 0) {
        s.init();
        s.item = item;
        s.head_k = head;
        s.set_pair(paired, paired ? other : item);
        fence_barrier_init();
    }
    __syncthreads();
    wait_for_last_kernel();
    if (paired) { cluster_sync(); }
    if (threadIdx.x < 128) {
        shrink_registers<T::kLoadRegisters>();
        int const warp = threadIdx.x / 32;
        if (warp == 0) {
            bwd_load<T, 0>(args, s);
        } else if (warp == 1) {
            bwd_load<T, 1>(args, s);
        } else if (T::kWithDq) {
            bwd_store_dq<T>(args, s, warp - 2);
        }
    } else {
        grow_registers<T::kMmaRegisters>();
        bwd_mma<T>(args, s);
    }
    if (s.paired) { cluster_sync(); }  // nobody leaves while the other may still write here
}

// Head dims over 128: two CTAs an item.
template <class T>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(T::kThreads, 1)
    bwd_wide_kernel(__grid_constant__ BwdArgs const args) {
    extern __shared__ __align__(1024) char memory[];
    BwdWideStorage<T>& s = *reinterpret_cast<BwdWideStorage<T>*>(memory);
    int item_index, head;
    args.order.decode_keys(args.params.fwd.plan, 1, blockIdx.x / 2, item_index, head);
    KeyItem const item = args.params.fwd.plan.key_items[item_index];
    if (item.num_keys == 0) { return; }
    if (threadIdx.x == 0) {
        s.init();
        s.item = item;
        s.head_k = head;
        fence_barrier_init();
    }
    wait_for_last_kernel();
    cluster_sync();
    int const warpgroup = uniform_warpgroup();
    if (warpgroup == 0) {
        shrink_registers<T::kLoadRegisters>();
        int const warp = threadIdx.x / 32;
        if (warp == 0) {
            bwd_wide_load<T, 0>(args, s);
        } else if (warp == 1) {
            bwd_wide_load<T, 1>(args, s);
        }
    } else if (warpgroup == 1) {
        grow_registers<T::kAccRegisters>();
        WideRole<T>(args, s).probabilities();
    } else if (warpgroup == 2) {
        grow_registers<T::kAccRegisters>();
        WideRole<T>(args, s).scores();
    } else {
        shrink_registers<T::kDqRegisters>();
        if constexpr (T::kWithDq) { WideRole<T>(args, s).query_gradients(); }
    }
    cluster_sync();  // the other CTA may still arrive on barriers of this one
}

inline cudaError_t num_multiprocessors(int& count) {
    int device;
    FLASH_ATTN_TRY(cudaGetDevice(&device));
    return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

// Fills what the forward and the dQ pass share and launches a persistent grid over the heads [first_head, + num_heads).
template <class T, class Args>
cudaError_t launch_over_queries(Args& args, int first_head, int num_heads, cudaStream_t stream) {
    FwdParams const& p = args.params;
    FLASH_ATTN_TRY((make_map<typename T::Element, typename T::PartQ>(args.maps.q, p.q, p.total_q, p.num_heads,
                                                                     p.head_dim, p.q_row_stride, p.q_head_stride)));
    FLASH_ATTN_TRY((make_key_maps<typename T::Element, typename T::TileK>(p, args.maps.k, args.maps.v)));
    int64_t const keys = int64_t(p.total_k) + (p.k_context == p.k ? 0 : p.total_context);
    args.order = {p.plan.num_query_items, num_heads,
                  section_heads(num_heads, p.num_heads / p.num_heads_k, keys * p.head_dim * 4, int64_t(32) << 20),
                  first_head};

    int processors;
    FLASH_ATTN_TRY(num_multiprocessors(processors));
    int const grid = args.order.size() < processors ? args.order.size() : processors;
    if (grid == 0) { return cudaSuccess; }
    constexpr int kBytes = sizeof(FwdStorage<T>);
    FLASH_ATTN_TRY(cudaFuncSetAttribute(fwd_kernel<T, Args>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    fwd_kernel<T, Args><<<grid, T::kThreads, kBytes, stream>>>(args);
    return cudaGetLastError();
}

template <class T>
cudaError_t launch_fwd(FwdParams const& p, cudaStream_t stream) {
    FwdArgs args;
    args.params = p;
    return launch_over_queries<T>(args, 0, p.num_heads, stream);
}

template <class T>
cudaError_t launch_dq(BwdParams const& p, cudaStream_t stream) {
    FwdParams const& f = p.fwd;
    DqArgs args;
    args.params = f;
    args.bwd = p;
    FLASH_ATTN_TRY((make_map<typename T::Element, typename T::PartQ>(
        args.dout, p.dout, f.total_q, f.num_heads, f.head_dim, p.dout_row_stride, p.dout_head_stride)));
    int const group = f.num_heads / f.num_heads_k;
    return launch_over_queries<T>(args, p.head_k_begin * group, (p.head_k_end - p.head_k_begin) * group, stream);
}

template <typename Element, int kHeadDim>
cudaError_t run_fwd(FwdParams const& p, cudaStream_t stream) {
    if (p.total_q == 0) { return cudaSuccess; }
    if constexpr (kHeadDim > 256) {
        return p.softcap > 0.f ? launch_pair_fwd<Element, true>(p, stream) : launch_pair_fwd<Element, false>(p, stream);
    } else {
        return p.softcap > 0.f ? launch_fwd<FwdTraits<Element, kHeadDim, true>>(p, stream)
                               : launch_fwd<FwdTraits<Element, kHeadDim, false>>(p, stream);
    }
}

// Traits of the backward at a head dim, the kernel, items of a cluster of two CTAs.
template <class T>
struct BwdKernel {
    using Storage = BwdStorage<T>;
    using RowTile = typename T::TileQ;
    static constexpr int kItems = 2;
    static constexpr auto kKernel = bwd_kernel<T>;
};
template <class Element, int kHeadDim, bool kSoftcap, bool kWithDq>
struct BwdKernel<BwdWideTraits<Element, kHeadDim, kSoftcap, kWithDq>> {
    using T = BwdWideTraits<Element, kHeadDim, kSoftcap, kWithDq>;
    using Storage = BwdWideStorage<T>;
    using RowTile = typename T::HalfQ;
    static constexpr int kItems = 1;
    static constexpr auto kKernel = bwd_wide_kernel<T>;
};
template <class Element, int kHeadDim, bool kSoftcap, bool kWithDq>
using BwdTraitsOf = std::conditional_t<(kHeadDim > 128), BwdWideTraits<Element, kHeadDim, kSoftcap, kWithDq>,
                                       BwdTraits<Element, kHeadDim, kSoftcap, kWithDq>>;

// A launch that need not wait for the end of the kernel before it: `kernel` calls wait_for_last_kernel.
template <class... Args>
cudaError_t launch_behind(void (*kernel)(Args...), dim3 grid, int threads, int bytes, cudaStream_t stream,
                          std::remove_const_t<Args> const&... args) {
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

template <class T>
cudaError_t launch_bwd(BwdParams const& p, cudaStream_t stream) {
    using Element = typename T::Element;
    using Kernel = BwdKernel<T>;
    FwdParams const& f = p.fwd;
    BwdArgs args;
    args.params = p;
    FLASH_ATTN_TRY((make_map<Element, typename Kernel::RowTile>(args.maps.rows[0], f.q, f.total_q, f.num_heads,
                                                                f.head_dim, f.q_row_stride, f.q_head_stride)));
    FLASH_ATTN_TRY((make_map<Element, typename Kernel::RowTile>(args.maps.rows[1], p.dout, f.total_q, f.num_heads,
                                                                f.head_dim, p.dout_row_stride, p.dout_head_stride)));
    FLASH_ATTN_TRY((make_key_maps<Element, typename T::TileK>(f, args.maps.keys[0], args.maps.keys[1])));
    int const heads = p.head_k_end - p.head_k_begin;
    int const items = (f.plan.num_key_items + Kernel::kItems - 1) / Kernel::kItems;
    int processors;
    FLASH_ATTN_TRY(num_multiprocessors(processors));
    args.order = {items, heads, 1, p.head_k_begin};
    // Else the last two heads together (up to head dim 128; not measured over it): the long items of one may leave half of the GPU
    // without work at the end.
    bool const few = few_key_items(f.plan.num_key_items, heads, processors);
    args.order.last_heads = few ? heads : std::min(heads, T::kHeadDim <= 128 ? 2 : 1);
    if (args.order.size() == 0) { return cudaSuccess; }
    constexpr int kBytes = sizeof(typename Kernel::Storage);
    static_assert(kBytes <= 227 * 1024);
    FLASH_ATTN_TRY(cudaFuncSetAttribute(Kernel::kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return launch_behind(Kernel::kKernel, dim3(args.order.size() * 2), T::kThreads, kBytes, stream, args);
}

template <typename Element, int kHeadDim>
cudaError_t run_bwd(BwdParams const& p, cudaStream_t stream) {
    bool const softcap = p.fwd.softcap > 0.f;
    if constexpr (kHeadDim > 256) {
        if (p.dq_accum != nullptr || p.num_splits > 1) { return cudaErrorNotSupported; }  // dQ is a pass of its own
        return softcap ? launch_pair_dkv<Element, true>(p, stream) : launch_pair_dkv<Element, false>(p, stream);
    } else if (p.dq_accum == nullptr) {
        return softcap ? launch_bwd<BwdTraitsOf<Element, kHeadDim, true, false>>(p, stream)
                       : launch_bwd<BwdTraitsOf<Element, kHeadDim, false, false>>(p, stream);
    } else {
        return softcap ? launch_bwd<BwdTraitsOf<Element, kHeadDim, true, true>>(p, stream)
                       : launch_bwd<BwdTraitsOf<Element, kHeadDim, false, true>>(p, stream);
    }
}

// dq without atomics, straight to p.dq; p.fwd.tile_counter is zero at launch, or null.
template <typename Element, int kHeadDim>
cudaError_t run_bwd_dq(BwdParams const& p, cudaStream_t stream) {
    if (p.fwd.total_q == 0) { return cudaSuccess; }
    bool const softcap = p.fwd.softcap > 0.f;
    if constexpr (kHeadDim > 256) {
        return softcap ? launch_pair_dq<Element, true>(p, stream) : launch_pair_dq<Element, false>(p, stream);
    } else {
        return softcap ? launch_dq<FwdTraits<Element, kHeadDim, true, true>>(p, stream)
                       : launch_dq<FwdTraits<Element, kHeadDim, false, true>>(p, stream);
    }
}

// dq_accum (all rows of the chunk's heads) to dq.
template <typename Element, int kHeadDim>
cudaError_t run_bwd_post(BwdParams const& p, cudaStream_t stream) {
    if constexpr (kHeadDim <= 256) {  // else there is no accumulator
        using T = BwdTraitsOf<Element, kHeadDim, false, true>;
        FwdParams const& f = p.fwd;
        int const blocks = (f.total_q + kBlockRows - 1) / kBlockRows, heads = p.head_k_end - p.head_k_begin;
        if (p.dq_accum == nullptr || blocks * heads == 0) { return cudaSuccess; }
        int const grid = blocks * (T::kHeadDim / T::kDqColumns) * heads * (f.num_heads / f.num_heads_k);
        bwd_finish<T><<<grid, 128, 0, stream>>>(p);
        return cudaGetLastError();
    }
    return cudaSuccess;
}

}  // namespace flash_attn::sm90
