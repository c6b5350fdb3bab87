// Backward on mma.sync: dK and dV of one KeyItem and kv head a block, dQ added to the fp32 accumulator.
//
//   P = exp(S - lse), dv = P^T dout, dS = P (dout v^T - D), dk = dS^T q scale, dq = dS k scale (scaled by the post kernel).
// The key tile stays in shared memory; the block walks the G query heads of its kv head and, per head, the row blocks of the item's
// range from the last to the first. They begin at the item's first row (rounded down to the 16 rows of dQ's tiles), so that short
// sequences do not fill more of them than they must. dK and dV live in registers and are written once: no atomics on keys.
#pragma once

#include "../../params.h"
#include "../common/fragments.h"
#include "../common/mask.h"
#include "../common/softmax.h"
#include "bwd_load.h"
#include "extras.h"
#include "schedule.h"
#include "traits.h"

namespace flash_attn::sm80 {

// dq_accum is an array of 16x8 mma tiles, row tile major. Inside a tile the four values of a lane lie together where the
// arch adds them in one instruction, else the lanes do.
template <int kHeadDim>
__device__ __forceinline__ int64_t dq_tile_offset(int64_t row_tile, int column_tile) {
    return (row_tile * (kHeadDim / 8) + column_tile) * 128;
}

__device__ __forceinline__ void add_dq_tile(float* tile, float const (&v)[4]) {
    int const lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(tile + lane * 4), "f"(v[0]), "f"(v[1]),
                 "f"(v[2]), "f"(v[3])
                 : "memory");
#else
#pragma unroll
    for (int j = 0; j < 4; ++j) atomicAdd(tile + j * 32 + lane, v[j]);
#endif
}

// Barrier of the kThreads threads whose warps share a key slab.
template <int kThreads>
__device__ __forceinline__ void slab_barrier(int slab) {
    asm volatile("bar.sync %0, %1;" ::"r"(slab + 1), "n"(kThreads) : "memory");
}

// Spans of a warp's rows applied to its scores; read from global memory, since few tiles of few items need them.
template <typename T, int MT, int NT>
__device__ __forceinline__ void mask_scores(float (&s)[MT][NT][4], FwdParams const& p, RowBlocks<T> const& blocks, int first_row,
                                            int warp_row, int warp_column) {
    int const lane = threadIdx.x % 32, column = blocks.key_begin() + warp_column + lane % 4 * 2;
    int const key_end = blocks.key_begin() + blocks.num_keys(), region = blocks.region();
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const row = first_row + warp_row + mt * 16 + half * 8 + lane / 4;
            int2 span = make_int2(0, 0);
            if (row < p.total_q) span = __ldg(reinterpret_cast<int2 const*>(p.plan.row_span + row) + (region ? 0 : 1));
            mask_row<16 * T::kColsS>(s[mt], half, span.x - column, min(span.y, key_end) - column, -INFINITY);
        }
    }
}

// dK or dV of the item: through shared memory to the tensor, or as fp32 partials of a split.
template <typename T>
__device__ __forceinline__ void store_keys(float (&acc)[T::kTilesN][2 * T::kPairsD][4], float scale, uint32_t stage, void* base,
                                           int64_t row_stride, int64_t head_stride, float* partial, BwdParams const& p,
                                           RowBlocks<T> const& blocks) {
    using Element = typename T::Element;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const warp_n = warp / T::kColsD, warp_d = warp % T::kColsD;
    int const key_begin = blocks.key_begin(), num_keys = blocks.num_keys(), split = blocks.split(), head_k = blocks.head_k();
#pragma unroll
    for (int mt = 0; mt < T::kTilesN; ++mt)
#pragma unroll
        for (int nt = 0; nt < 2 * T::kPairsD; ++nt)
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[mt][nt][j] *= scale;
    if (split >= 0) {
#pragma unroll
        for (int mt = 0; mt < T::kTilesN; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int const key = 16 * (warp_n + T::kWarpsN * mt) + half * 8 + lane / 4;
                int64_t const row = static_cast<int64_t>(split) * p.fwd.total_context + key_begin + key;
                float* const to = partial + (row * p.fwd.num_heads_k + head_k) * T::kHeadDim + lane % 4 * 2;
#pragma unroll
                for (int nt = 0; nt < 2 * T::kPairsD; ++nt) {
                    int const column = 16 * (warp_d + T::kColsD * (nt / 2)) + nt % 2 * 8;
                    if (key < num_keys)
                        *reinterpret_cast<float2*>(to + column) = make_float2(acc[mt][nt][2 * half], acc[mt][nt][2 * half + 1]);
                }
            }
        }
        return;
    }
#pragma unroll
    for (int mt = 0; mt < T::kTilesN; ++mt)
#pragma unroll
        for (int np = 0; np < T::kPairsD; ++np)
            store_pair<Element, T::kHeadDim>(stage, 16 * (warp_n + T::kWarpsN * mt), 2 * (warp_d + T::kColsD * np), acc[mt][2 * np],
                                             acc[mt][2 * np + 1]);
    __syncthreads();
    auto* to = static_cast<Element*>(base) + key_begin * row_stride + head_k * head_stride;
    store_rows<T::kBlockN, T::kHeadDim, T::kThreads>(to, row_stride, stage, 0, threadIdx.x, num_keys, p.fwd.head_dim);
}

// With extras a softcap is looked for at run time, and a score keeps its factor of dS, signed (extras.h).
template <typename T, bool kSoftcap, bool kAccumulateDq, typename X>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSm)
    backward_kernel(BwdParams const __grid_constant__ p, Schedule const __grid_constant__ schedule, Scales const __grid_constant__ scales,
                    X const __grid_constant__ extras) {
    using Element = typename T::Element;
    constexpr int kD = T::kHeadDim, kN = T::kBlockN, MT = T::kTilesM, NS = T::kPairsS;
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
    if constexpr (T::kQueryStages == 2) {
        load.query(1, 1, T::kDoutStages == 2);
        copy_async_commit();
    }
    if constexpr (T::kQueryStages == 2) {
        copy_async_wait<1>();
        __syncthreads();
    }

    int const lane = threadIdx.x % 32;
    // Lane addresses serve two tiles of the same shape, a constant apart: q and dout, K and V, P and dS. Where these kernels would
    // spill, they and a round's stage are computed anew at each use.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    constexpr bool kAnew = T::kDoutStages == 1 || !kAccumulateDq || (X::kOn && kD > 64);
#else
    constexpr bool kAnew = X::kOn && kD > 64;
#endif
    constexpr int kQueryToDout = T::kDout - T::kQuery, kKeyToValue = T::kValue - T::kKey, kPToDs = T::kDs - T::kP;
    auto const first_row = [](int warp) { return 16 * MT * (warp % T::kWarpsM); };
    auto const query_rows = [&](int warp) { return lane_a<kD>(shared + T::kQuery, first_row(warp)); };
    auto const key_rows = [&](int warp) { return lane_b<kD>(shared + T::kKey, 16 * (warp / T::kWarpsM)); };
    auto const query_columns = [&](int warp) { return lane_b_transposed<kD>(shared + T::kQuery, 2 * (warp % T::kColsD)); };
    int const warp = threadIdx.x / 32;
    auto const q_kept = query_rows(warp);
    auto const k_kept = key_rows(warp);
    auto const q_t_kept = query_columns(warp);
    auto const this_warp = [] { return opaque(threadIdx.x) / 32; };

    float dk[T::kTilesN][2 * T::kPairsD][4], dv[T::kTilesN][2 * T::kPairsD][4];
    clear(dk);
    clear(dv);
    for (int i = 0; blocks.head(i) >= 0; ++i) {
        auto const stage = [&] { return (kAnew ? opaque(i) : i) & 1; };
        auto const q_stage = [&] { return T::kQueryStages == 2 ? stage() * T::kRowBytes : 0; };
        auto const dout_stage = [&] { return T::kDoutStages == 2 ? stage() * T::kRowBytes : 0; };
        auto const ds_stage = [&] { return T::kDsStages == 2 ? stage() * T::kScoreBytes : 0; };
        if constexpr (T::kQueryStages == 1) {
            copy_async_wait<0>();
            __syncthreads();
        }
        if (i > 0 && i % RowBlocks<T>::kPeriod == 0 && threadIdx.x < 32) blocks.refill(i);

        int const slab = warp / T::kWarpsM, row_s = first_row(warp), column_s = 16 * slab;
        float s[MT][2 * NS][4];
        clear(s);
        auto const q_now = (kAnew ? query_rows(this_warp()) : q_kept).moved(q_stage());
        auto const k_now = (kAnew ? key_rows(this_warp()) : k_kept).moved(0);
        gemm<Element, kD / 16>(
            s,
            [&](int kk, uint32_t(&a)[MT][4]) {
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) load_matrix(a[mt], q_now.at(16 * mt, 2 * kk));
            },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix(b, k_now.at(16 * T::kColsS * np, 2 * kk)); });
        if constexpr (kSoftcap) apply_softcap(s, scales.over_softcap);
        bool softcap = false;
        if constexpr (X::kOn) {
            softcap = scales.over_softcap > 0.f;
            if (softcap) apply_softcap(s, scales.over_softcap);
        }
        if (!blocks.clean(i)) mask_scores<T>(s, f, blocks, blocks.row(i), row_s, column_s);

        uint32_t const stats = shared + T::kStats + stage() * T::kStatBytes + (row_s + lane / 4) * 4;
        auto const exponent = [&](float x, float lse) { return exp2_fast(fmaf(x, scales.log2, -lse)); };
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
            float const lse[2] = {load_shared(stats + mt * 64), load_shared(stats + mt * 64 + 32)};
            float slope = 0.f;
            int distance = 0;
            uint32_t dropped[1][2][NS];
            if constexpr (X::kOn) {
                ItemExtras const options(extras, -1 - blocks.split(), blocks.head(i));
                int const row = blocks.row(i) + row_s + 16 * mt, key = blocks.key_begin() + column_s;
                slope = options.slope(scales.log2), distance = options.distance(row, key);
                options.template draw<16 * T::kColsS>(dropped, row, key);
            }
#pragma unroll
            for (int np = 0; np < NS; ++np) {
                float prob[2][4];
#pragma unroll
                for (int nt = 0; nt < 2; ++nt)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float& x = s[mt][2 * np + nt][j];
                        if constexpr (X::kOn) {
                            float const biased = with_alibi<16 * T::kColsS>(x, slope, distance, 2 * np + nt, j);
                            x = signed_factor(exponent(biased, lse[j / 2]), x, softcap, dropped[0][j / 2][np], 2 * nt + j % 2, prob[nt][j]);
                            continue;
                        }
                        prob[nt][j] = exponent(x, lse[j / 2]);
                        if constexpr (!kSoftcap) x = prob[nt][j];
                    }
                store_pair<Element, kN>(shared + T::kP, row_s + 16 * mt, column_s / 8 + 2 * T::kColsS * np, prob[0], prob[1]);
            }
        }

        if constexpr (T::kQueryStages == 2 && T::kDoutStages == 1) {
            copy_async_wait<1>();
            __syncthreads();
        }
        float dp[MT][2 * NS][4];
        clear(dp);
        auto const dout_now = (kAnew ? query_rows(this_warp()) : q_kept).moved(kQueryToDout + dout_stage());
        auto const v_now = (kAnew ? key_rows(this_warp()) : k_kept).moved(kKeyToValue);
        gemm<Element, kD / 16>(
            dp,
            [&](int kk, uint32_t(&a)[MT][4]) {
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) load_matrix(a[mt], dout_now.at(16 * mt, 2 * kk));
            },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix(b, v_now.at(16 * T::kColsS * np, 2 * kk)); });
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
            uint32_t const delta_at = stats + T::kBlockM * 4 + mt * 64;
            float const delta[2] = {load_shared(delta_at), load_shared(delta_at + 32)};
            float lse[2];
            if constexpr (kSoftcap) lse[0] = load_shared(stats + mt * 64), lse[1] = load_shared(stats + mt * 64 + 32);
#pragma unroll
            for (int np = 0; np < NS; ++np) {
#pragma unroll
                for (int nt = 2 * np; nt < 2 * np + 2; ++nt)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float x = s[mt][nt][j];
                        if constexpr (kSoftcap) x = x == -INFINITY ? 0.f : exponent(x, lse[j / 2]) * (1.f - x * x);
                        if constexpr (X::kOn) dp[mt][nt][j] = score_gradient(x, dp[mt][nt][j], extras.keep_scale, delta[j / 2]);
                        else dp[mt][nt][j] = x * (dp[mt][nt][j] - delta[j / 2]);
                    }
                store_pair<Element, kN>(shared + T::kDs + ds_stage(), row_s + 16 * mt, column_s / 8 + 2 * T::kColsS * np, dp[mt][2 * np],
                                        dp[mt][2 * np + 1]);
            }
        }
        slab_barrier<32 * T::kWarpsM>(slab);

        // Computed anew in every round, since a register for each would not fit.
        int const late_warp = this_warp();
        auto const p_now = lane_a_transposed<kN>(shared + T::kP, 2 * (late_warp / T::kColsD));
        auto const q_t = kAnew ? query_columns(late_warp) : q_t_kept;
        auto const dout_t = q_t.moved(kQueryToDout + dout_stage());
        gemm<Element, T::kBlockM / 16>(
            dv,
            [&](int kk, uint32_t(&a)[T::kTilesN][4]) {
#pragma unroll
                for (int mt = 0; mt < T::kTilesN; ++mt) load_matrix_transposed(a[mt], p_now.at(16 * kk, 2 * T::kWarpsN * mt));
            },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix_transposed(b, dout_t.at(16 * kk, 2 * T::kColsD * np)); });
        auto const ds_now = p_now.moved(kPToDs + ds_stage());
        auto const q_t_now = q_t.moved(q_stage());
        gemm<Element, T::kBlockM / 16>(
            dk,
            [&](int kk, uint32_t(&a)[T::kTilesN][4]) {
#pragma unroll
                for (int mt = 0; mt < T::kTilesN; ++mt) load_matrix_transposed(a[mt], ds_now.at(16 * kk, 2 * T::kWarpsN * mt));
            },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix_transposed(b, q_t_now.at(16 * kk, 2 * T::kColsD * np)); });
        // Everyone is done with the rows of block i, dS is whole, and with two stages the rows of block i + 1 are there.
        copy_async_wait<0>();
        __syncthreads();
        if constexpr (T::kDoutStages == 1) {
            load.dout(0, i + 1);
            if constexpr (T::kQueryStages == 2) copy_async_commit();
        }
        load.query(T::kQueryStages == 2 ? stage() : 0, i + T::kQueryStages, T::kDoutStages == 2);
        copy_async_commit();
        if constexpr (kAccumulateDq) {
            float dq[T::kTilesQ][2 * T::kPairsQ][4];
            clear(dq);
            int const warp_q = late_warp / T::kColsQ, warp_e = late_warp % T::kColsQ;
            auto const ds_q_now = lane_a<kN>(shared + T::kDs + ds_stage(), 16 * T::kTilesQ * warp_q);
            auto const k_q_now = lane_b_transposed<kD>(shared + T::kKey, 2 * warp_e);
            gemm<Element, kN / 16>(
                dq,
                [&](int kk, uint32_t(&a)[T::kTilesQ][4]) {
#pragma unroll
                    for (int mt = 0; mt < T::kTilesQ; ++mt) load_matrix(a[mt], ds_q_now.at(16 * mt, 2 * kk));
                },
                [&](int kk, int np, uint32_t(&b)[4]) { load_matrix_transposed(b, k_q_now.at(16 * kk, 2 * T::kColsQ * np)); });
            int const head_of_chunk = blocks.head(i) - p.head_k_begin * group;
            float* const accum = p.dq_accum + head_of_chunk * p.rows_padded * kD;
#pragma unroll
            for (int mt = 0; mt < T::kTilesQ; ++mt) {
                int const first = blocks.row(i) + 16 * (warp_q * T::kTilesQ + mt);
                if (first >= blocks.row_end()) break;
                float* const row = accum + dq_tile_offset<kD>(first / 16, 0);
#pragma unroll
                for (int nt = 0; nt < 2 * T::kPairsQ; ++nt)
                    add_dq_tile(row + (2 * (warp_e + T::kColsQ * (nt / 2)) + nt % 2) * 128, dq[mt][nt]);
            }
        }
    }
    __syncthreads();  // the key tiles become staging
    bool const context = blocks.region() != 0;
    float dv_scale = 1.f;
    if constexpr (X::kOn) dv_scale = extras.keep_scale;
    store_keys<T>(dv, dv_scale, shared + T::kValue, context ? p.dv_context : p.dv, context ? p.dv_context_row_stride : p.dv_row_stride,
                  context ? p.dv_context_head_stride : p.dv_head_stride, p.dv_partial, p, blocks);
    store_keys<T>(dk, f.softmax_scale, shared + T::kKey, context ? p.dk_context : p.dk,
                  context ? p.dk_context_row_stride : p.dk_row_stride, context ? p.dk_context_head_stride : p.dk_head_stride,
                  p.dk_partial, p, blocks);
}

}  // namespace flash_attn::sm80
