// Backward for small head dims, where dK and dV of 32 keys fit in a warp's registers: P and dS are made transposed, keys by rows,
// and go from accumulator to operand of dV and dK without shared memory. Only dS passes through it, for dQ.
//
//   P^T = exp(K Q^T - lse), dv = P^T dout, dS^T = P^T (V dout^T - D), dk = dS^T q scale, dq = dS k scale
// Eight warps: four key slabs of 32 by two halves of the 128 rows of a block; what the halves have summed is added once, at the
// item's end. The walk over heads and blocks, loads and dQ's accumulator are bwd_mainloop.h's.
#pragma once

#include "bwd_mainloop.h"

namespace flash_attn::sm80 {

template <typename Element_, int kHeadDim_>
struct KeptTraits {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kBlockM = 128, kBlockN = 128, kThreads = 256;
    static constexpr int kQueryStages = 2, kDoutStages = 2, kSlabKeys = 32, kHalfRows = 64, kStepRows = 32;
    static constexpr int kKeyBytes = kBlockN * kHeadDim * 2, kRowBytes = kBlockM * kHeadDim * 2;
    static constexpr int kScoreBytes = kBlockM * kBlockN * 2, kStatBytes = 2 * kBlockM * 4;
    static constexpr int kKey = 0, kValue = kKeyBytes, kQuery = 2 * kKeyBytes, kDout = kQuery + 2 * kRowBytes;
    static constexpr int kDs = kDout + 2 * kRowBytes, kStats = kDs + 2 * kScoreBytes;
    static constexpr int kItem = kStats + 2 * kStatBytes, kList = kItem + 64, kListEntries = 64;
    static constexpr int kSharedBytes = kList + 8 * kListEntries;  // of 163 KB GPUs: all
};

// Rows' spans applied to transposed scores: 16 MT keys from `key` on, 8 NT rows from `row` on.
template <int MT, int NT>
__device__ __forceinline__ void mask_transposed(float (&s)[MT][NT][4], FwdParams const& p, int region, int key_end, int key, int row) {
    int const lane = threadIdx.x % 32, own = key + lane / 4;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int const at = row + 8 * nt + lane % 4 * 2 + j;
            int2 span = make_int2(0, 0);
            if (at < p.total_q) span = __ldg(reinterpret_cast<int2 const*>(p.plan.row_span + at) + (region ? 0 : 1));
            int const begin = span.x - own, end = min(span.y, key_end) - own;
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int const k = 16 * mt + 8 * half;
                    if (k < begin || k >= end) s[mt][nt][2 * half + j] = -INFINITY;
                }
            }
        }
    }
}

__device__ __forceinline__ float2 load_shared_float2(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

// Accumulators of a warp to shared memory and back, 16 bytes a lane; added to what the other warp has.
template <int MT, int NT>
__device__ __forceinline__ void put_sums(uint32_t at, float const (&acc)[MT][NT][4]) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at + (mt * NT + nt) * 512), "f"(acc[mt][nt][0]),
                         "f"(acc[mt][nt][1]), "f"(acc[mt][nt][2]), "f"(acc[mt][nt][3])
                         : "memory");
}
template <int MT, int NT>
__device__ __forceinline__ void add_sums(float (&acc)[MT][NT][4], uint32_t at, float scale) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            uint4 const v = load_shared_16(at + (mt * NT + nt) * 512);
            uint32_t const other[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[mt][nt][j] = (acc[mt][nt][j] + __uint_as_float(other[j])) * scale;
        }
}

// Sums of a slab's keys, of one warp: rounded into a shared tile, or fp32 partials of a split.
template <typename T>
__device__ __forceinline__ void put_keys(float const (&acc)[2][T::kHeadDim / 8][4], uint32_t tile, int slab, float* partial,
                                         BwdParams const& p, RowBlocks<T> const& blocks) {
    int const lane = threadIdx.x % 32, split = blocks.split(), first = T::kSlabKeys * slab;
#pragma unroll
    for (int mt = 0; mt < 2; ++mt) {
        if (split < 0) {
#pragma unroll
            for (int np = 0; np < T::kHeadDim / 16; ++np)
                store_pair<typename T::Element, T::kHeadDim>(tile, first + 16 * mt, 2 * np, acc[mt][2 * np], acc[mt][2 * np + 1]);
            continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const key = first + 16 * mt + half * 8 + lane / 4;
            int64_t const row = static_cast<int64_t>(split) * p.fwd.total_context + blocks.key_begin() + key;
            float* const to = partial + (row * p.fwd.num_heads_k + blocks.head_k()) * T::kHeadDim + lane % 4 * 2;
#pragma unroll
            for (int nt = 0; nt < T::kHeadDim / 8; ++nt)
                if (key < blocks.num_keys())
                    *reinterpret_cast<float2*>(to + 8 * nt) = make_float2(acc[mt][nt][2 * half], acc[mt][nt][2 * half + 1]);
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    backward_kept_kernel(BwdParams const __grid_constant__ p, Schedule const __grid_constant__ schedule, Scales const __grid_constant__ scales) {
    using Element = typename T::Element;
    constexpr int kD = T::kHeadDim, NT = T::kStepRows / 8, kDTiles = kD / 8;
    extern __shared__ __align__(1024) char shared_bytes[];
    uint32_t const shared = shared_address(shared_bytes);

    FwdParams const& f = p.fwd;
    int index, head_k;
    schedule.decode(index, head_k);
    head_k += p.head_k_begin;
    KeyItem const item = load_key_item(f.plan.key_items, index);
    if (item.num_keys <= 0) return;

    int const group = schedule.group.value;
    RowBlocks<T> const blocks{shared, f.plan.block_span, group};
    BackwardLoader<T> const load{p, blocks, shared};
    load.begin(item, head_k);
    load.query(1, 1, true);
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    constexpr bool kAnew = true;  // lane addresses, in every round: the kernel would spill
#else
    constexpr bool kAnew = false;
#endif
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, slab = warp / 2, first_row = T::kHalfRows * (warp % 2);
    constexpr int kQueryToDout = T::kDout - T::kQuery, kKeyToValue = T::kValue - T::kKey, kPitch = 2 * kD;
    auto const keys = lane_a<kD>(shared + T::kKey, T::kSlabKeys * slab);
    auto const q_rows = [&](int w) { return lane_b<kD>(shared + T::kQuery, T::kHalfRows * (w % 2)); };
    auto const q_columns = [&](int w) { return lane_b_transposed<kD>(shared + T::kQuery + T::kHalfRows * (w % 2) * kPitch, 0); };
    auto const q_rows_kept = q_rows(warp);
    auto const q_columns_kept = q_columns(warp);

    float dk[2][kDTiles][4], dv[2][kDTiles][4];
    clear(dk);
    clear(dv);
    for (int i = 0; blocks.head(i) >= 0; ++i) {
        auto const row_stage = [&] { return (i & 1) * T::kRowBytes; };
        auto const ds_tile = [&] { return shared + T::kDs + (i & 1) * T::kScoreBytes; };
        auto const stat = [](int thread) { return (thread / 32 % 2 * T::kHalfRows + thread % 4 * 2) * 4; };
        uint32_t const stats =
            shared + T::kStats + (i & 1) * T::kStatBytes + (kAnew ? stat(opaque(threadIdx.x)) : (first_row + lane % 4 * 2) * 4);
        int const anew = kAnew ? opaque(threadIdx.x) / 32 : 0;
        auto const q_now = (kAnew ? q_rows(anew) : q_rows_kept).moved(row_stage()), dout_now = q_now.moved(kQueryToDout);
        auto const q_t = (kAnew ? q_columns(anew) : q_columns_kept).moved(row_stage()), dout_t = q_t.moved(kQueryToDout);
#pragma unroll
        for (int row = 0; row < T::kHalfRows; row += T::kStepRows) {
            auto const transposed = [&](float(&acc)[2][NT][4], LaneAddress<kD> const& a_lane, LaneAddress<kD> const& b_lane) {
                clear(acc);
                gemm<Element, kD / 16>(
                    acc,
                    [&](int kk, uint32_t(&a)[2][4]) {
#pragma unroll
                        for (int mt = 0; mt < 2; ++mt) load_matrix(a[mt], a_lane.at(16 * mt, 2 * kk));
                    },
                    [&](int kk, int np, uint32_t(&b)[4]) { load_matrix(b, b_lane.at(row + 16 * np, 2 * kk)); });
            };
            auto const sum = [&](float(&acc)[2][kDTiles][4], float const(&scores)[2][NT][4], LaneAddress<kD> const& b_lane) {
                gemm<Element, T::kStepRows / 16>(
                    acc, [&](int kk, uint32_t(&a)[2][4]) { pack_a<Element>(a, scores, kk); },
                    [&](int kk, int np, uint32_t(&b)[4]) { load_matrix_transposed(b, b_lane.at(row + 16 * kk, 2 * np)); });
            };
            float s[2][NT][4], dp[2][NT][4];
            transposed(s, keys, q_now);
            if (!blocks.clean(i))
                mask_transposed(s, f, blocks.region(), blocks.key_begin() + blocks.num_keys(), blocks.key_begin() + T::kSlabKeys * slab,
                                blocks.row(i) + first_row + row);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
                float2 const lse = load_shared_float2(stats + (row + 8 * nt) * 4);
#pragma unroll
                for (int mt = 0; mt < 2; ++mt)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        s[mt][nt][j] = exp2_fast(fmaf(s[mt][nt][j], scales.log2, -(j % 2 ? lse.y : lse.x)));
            }
            transposed(dp, keys.moved(kKeyToValue), dout_now);
            sum(dv, s, dout_t);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
                float2 const delta = load_shared_float2(stats + (T::kBlockM + row + 8 * nt) * 4);
#pragma unroll
                for (int mt = 0; mt < 2; ++mt)
#pragma unroll
                    for (int j = 0; j < 4; ++j) dp[mt][nt][j] = s[mt][nt][j] * (dp[mt][nt][j] - (j % 2 ? delta.y : delta.x));
            }
#pragma unroll
            for (int mt = 0; mt < 2; ++mt)
#pragma unroll
                for (int np = 0; np < NT / 2; ++np)
                    store_pair<Element, T::kBlockM>(ds_tile(), T::kSlabKeys * slab + 16 * mt, (first_row + row) / 8 + 2 * np, dp[mt][2 * np],
                                                    dp[mt][2 * np + 1]);
            sum(dk, dp, q_t);
        }
        // Everyone is done with the rows of block i, dS is whole, and the rows of block i + 1 are there.
        copy_async_wait<0>();
        __syncthreads();
        load.query(i & 1, i + 2, true);
        copy_async_commit();
        float dq[2][4][4];  // 32 rows by half of the head dim
        clear(dq);
        int const late_warp = opaque(threadIdx.x) / 32, warp_q = late_warp / 2, warp_d = late_warp % 2;
        auto const ds_now = lane_a_transposed<T::kBlockM>(ds_tile(), 4 * warp_q);
        auto const k_now = lane_b_transposed<kD>(shared + T::kKey, 2 * warp_d);
        gemm<Element, T::kBlockN / 16>(
            dq,
            [&](int kk, uint32_t(&a)[2][4]) {
#pragma unroll
                for (int mt = 0; mt < 2; ++mt) load_matrix_transposed(a[mt], ds_now.at(16 * kk, 2 * mt));
            },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix_transposed(b, k_now.at(16 * kk, 4 * np)); });
        int const head_of_chunk = blocks.head(i) - p.head_k_begin * group;
        float* const accum = p.dq_accum + head_of_chunk * p.rows_padded * kD;
#pragma unroll
        for (int mt = 0; mt < 2; ++mt) {
            int const first = blocks.row(i) + 16 * (warp_q * 2 + mt);
            if (first >= blocks.row_end()) break;
            float* const row = accum + dq_tile_offset<kD>(first / 16, 0);
#pragma unroll
            for (int nt = 0; nt < 4; ++nt) add_dq_tile(row + (2 * (warp_d + 2 * (nt / 2)) + nt % 2) * 128, dq[mt][nt]);
        }
        if ((i + 1) % RowBlocks<T>::kPeriod == 0 && threadIdx.x < 32) blocks.refill(i + 1);
    }
    copy_async_wait<0>();
    __syncthreads();  // K, V and the rows become staging
    uint32_t const exchange = shared + T::kQuery + slab * 2 * 8192 + lane * 16;
    bool const context = blocks.region() != 0;
    if (warp % 2 == 0) put_sums(exchange, dk);
    else put_sums(exchange + 8192, dv);
    __syncthreads();
    if (warp % 2 == 0) {
        add_sums(dv, exchange + 8192, 1.f);
        put_keys<T>(dv, shared + T::kValue, slab, p.dv_partial, p, blocks);
    } else {
        add_sums(dk, exchange, f.softmax_scale);
        put_keys<T>(dk, shared + T::kKey, slab, p.dk_partial, p, blocks);
    }
    if (blocks.split() >= 0) return;
    __syncthreads();
    auto const store = [&](void* base, int64_t row_stride, int64_t head_stride, uint32_t tile) {
        auto* to = static_cast<Element*>(base) + blocks.key_begin() * row_stride + blocks.head_k() * head_stride;
        store_rows<T::kBlockN, kD, T::kThreads>(to, row_stride, tile, 0, threadIdx.x, blocks.num_keys(), f.head_dim);
    };
    store(context ? p.dv_context : p.dv, context ? p.dv_context_row_stride : p.dv_row_stride,
          context ? p.dv_context_head_stride : p.dv_head_stride, shared + T::kValue);
    store(context ? p.dk_context : p.dk, context ? p.dk_context_row_stride : p.dk_row_stride,
          context ? p.dk_context_head_stride : p.dk_head_stride, shared + T::kKey);
}

}  // namespace flash_attn::sm80
