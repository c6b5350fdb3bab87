// Passes around the backward: the separate dQ pass, and what finishes a backward that used fp32 scratch.
//
// dQ pass (deterministic; no scratch): dq = sum over key tiles of dS k, scaled, with the rows stationary as in the forward;
// dS = P (dout v^T - D) goes from accumulator to operand in registers. Post kernels: dq_accum -> dq, split partials -> dk, dv.
#pragma once

#include "bwd_mainloop.h"
#include "fwd_mainloop.h"

namespace flash_attn::sm80 {

template <typename T, bool kSoftcap, typename X>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSm)
    dq_pass_kernel(BwdParams const __grid_constant__ p, Schedule const __grid_constant__ schedule, Scales const __grid_constant__ scales,
                   X const __grid_constant__ extras) {
    using Element = typename T::Element;
    constexpr int kD = T::kHeadDim, MT = T::kRowTiles, NT = T::kBlockN / 8;
    extern __shared__ __align__(1024) char shared_bytes[];
    uint32_t const shared = shared_address(shared_bytes);

    FwdParams const& f = p.fwd;
    int index, head;
    schedule.decode(index, head);
    head += p.head_k_begin * static_cast<int>(schedule.group.value);
    QueryItem const item = load_item(f.plan.query_items + index);
    if (item.num_rows <= 0) return;
    KeyTiles<T::kBlockN> const tiles(f.plan, index, item);
    ForwardLoader<T> const load{f, tiles, shared, head, schedule.group.quotient(head)};
    if (tiles.num_tiles > 0) {
        load.rows(shared, f.q, f.q_row_stride, f.q_head_stride, item);
        load.rows(shared + T::kDout, p.dout, p.dout_row_stride, p.dout_head_stride, item);
        load.keys(tiles.tile(0), false, 0);
        load.keys(tiles.tile(0), true, 1);
    }
    for (int i = threadIdx.x; i < 2 * T::kBlockM; i += T::kThreads) {
        int const row = i % T::kBlockM;
        float const* source = (i < T::kBlockM ? p.lse_log2 : p.dout_dot_out) + head * p.rows_padded + item.row_begin + row;
        copy_async_4(shared + T::kStats + i * 4, source, row < item.num_rows);  // zeros behind: those rows are not stored
    }
    copy_async_commit();

    int const warp_row = threadIdx.x / 32 * 16 * MT;
    uint32_t const stats = shared + T::kStats + (warp_row + threadIdx.x % 32 / 4) * 4;
    auto const exponent = [&](float x, float lse) { return exp2_fast(fmaf(x, scales.log2, -lse)); };
    auto const q_lane = lane_a<kD>(shared, warp_row);
    auto const k_lane = lane_b<kD>(shared + T::kRing, 0);
    auto const k_columns = lane_b_transposed<kD>(shared + T::kRing, 0);
    float dq[MT][kD / 8][4];
    clear(dq);
    for (int i = 0; i < tiles.num_tiles; ++i) {
        copy_async_wait<0>();
        __syncthreads();
        int const pair = 2 * (i & 1);
        if (i + 1 < tiles.num_tiles) {
            auto const next = tiles.tile(i + 1);
            load.keys(next, false, 2 - pair);
            load.keys(next, true, 3 - pair);
        }
        copy_async_commit();

        float s[MT][NT][4], dp[MT][NT][4];
        auto const scores = [&](float(&acc)[MT][NT][4], uint32_t rows, uint32_t keys) {
            clear(acc);
            auto const a_lane = q_lane.moved(rows);
            auto const b_lane = k_lane.moved(keys);
            gemm<Element, kD / 16>(
                acc,
                [&](int kk, uint32_t(&a)[MT][4]) {
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) load_matrix(a[mt], a_lane.at(16 * mt, 2 * kk));
                },
                [&](int kk, int np, uint32_t(&b)[4]) { load_matrix(b, b_lane.at(16 * np, 2 * kk)); });
        };
        scores(s, 0, pair * T::kSlotBytes);
        if constexpr (kSoftcap) apply_softcap(s, scales.over_softcap);
        [[maybe_unused]] bool softcap = false;
        if constexpr (X::kOn) {
            softcap = scales.over_softcap > 0.f;
            if (softcap) apply_softcap(s, scales.over_softcap);
        }
        mask_unseen<T>(s, tiles, i, warp_row, -INFINITY);
        if constexpr (X::kOn) {
            QueryItem const rows = tiles.item();
            ItemExtras const options(extras, rows.segment, head);
            float const slope = options.slope(scales.log2);
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                int const row = rows.row_begin + warp_row + 16 * mt, key = tiles.tile(i).first, distance = options.distance(row, key);
                uint32_t dropped[1][2][NT / 2];
                options.template draw<16>(dropped, row, key);
                float const lse[2] = {load_shared(stats + mt * 64), load_shared(stats + mt * 64 + 32)};
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float& x = s[mt][nt][j];
                        float kept;
                        x = signed_factor(exponent(with_alibi<16>(x, slope, distance, nt, j), lse[j / 2]), x, softcap,
                                          dropped[0][j / 2][nt / 2], nt % 2 * 2 + j % 2, kept);
                    }
            }
        } else if constexpr (!kSoftcap) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                float const lse[2] = {load_shared(stats + mt * 64), load_shared(stats + mt * 64 + 32)};
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int j = 0; j < 4; ++j) s[mt][nt][j] = exponent(s[mt][nt][j], lse[j / 2]);
            }
        }
        scores(dp, T::kDout, (pair + 1) * T::kSlotBytes);
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
            uint32_t const at = stats + T::kBlockM * 4 + mt * 64;
            float const delta[2] = {load_shared(at), load_shared(at + 32)};
            float lse[2];
            if constexpr (kSoftcap) lse[0] = load_shared(stats + mt * 64), lse[1] = load_shared(stats + mt * 64 + 32);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float x = s[mt][nt][j];
                    if constexpr (kSoftcap) x = x == -INFINITY ? 0.f : exponent(x, lse[j / 2]) * (1.f - x * x);
                    if constexpr (X::kOn) dp[mt][nt][j] = score_gradient(x, dp[mt][nt][j], extras.keep_scale, delta[j / 2]);
                    else dp[mt][nt][j] = x * (dp[mt][nt][j] - delta[j / 2]);
                }
        }
        auto const k_now = k_columns.moved(pair * T::kSlotBytes);
        gemm<Element, T::kBlockN / 16>(
            dq, [&](int kk, uint32_t(&a)[MT][4]) { pack_a<Element>(a, dp, kk); },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix_transposed(b, k_now.at(16 * kk, 2 * np)); });
    }
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < kD / 8; ++nt)
#pragma unroll
            for (int j = 0; j < 4; ++j) dq[mt][nt][j] *= f.softmax_scale;
    QueryItem const rows = tiles.item();
    auto* out = static_cast<Element*>(p.dq) + (rows.row_begin + warp_row) * p.dq_row_stride + head * p.dq_head_stride;
    store_warp_rows<T>(dq, out, p.dq_row_stride, shared, warp_row, rows.num_rows - warp_row, f.head_dim);
}

constexpr int kPostThreads = 128;  // a warp for each 16-row tile of a block

// dq = dq_accum * softmax_scale: one 64-row block and head a thread block.
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kPostThreads) dq_post_kernel(BwdParams const __grid_constant__ p) {
    extern __shared__ __align__(1024) char shared_bytes[];
    uint32_t const shared = shared_address(shared_bytes);
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = blockIdx.x * kBlockRows + warp * 16;
    int const head = p.head_k_begin * (p.fwd.num_heads / p.fwd.num_heads_k) + blockIdx.y;
    float const* accum = p.dq_accum + blockIdx.y * p.rows_padded * kHeadDim + dq_tile_offset<kHeadDim>(first_row / 16, 0);
#pragma unroll
    for (int np = 0; np < kHeadDim / 16; ++np) {
        float v[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float const* tile = accum + (2 * np + half) * 128;
#if __CUDA_ARCH__ >= 900
            float4 const x = *reinterpret_cast<float4 const*>(tile + lane * 4);
            v[half][0] = x.x, v[half][1] = x.y, v[half][2] = x.z, v[half][3] = x.w;
#else
#pragma unroll
            for (int j = 0; j < 4; ++j) v[half][j] = tile[j * 32 + lane];
#endif
#pragma unroll
            for (int j = 0; j < 4; ++j) v[half][j] *= p.fwd.softmax_scale;
        }
        store_pair<Element, kHeadDim>(shared, warp * 16, 2 * np, v[0], v[1]);
    }
    __syncwarp();
    auto* out = static_cast<Element*>(p.dq) + first_row * p.dq_row_stride + head * p.dq_head_stride;
    store_rows<16, kHeadDim, 32>(out, p.dq_row_stride, shared, warp * 16, lane, p.fwd.total_q - first_row, p.fwd.head_dim);
}

// dk, dv of a split context item: its partials (scaled already) summed in the order of the splits.
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kPostThreads) split_post_kernel(BwdParams const __grid_constant__ p) {
    FwdParams const& f = p.fwd;
    int4 const low = __ldg(reinterpret_cast<int4 const*>(f.plan.key_items + blockIdx.x));
    int4 const high = __ldg(reinterpret_cast<int4 const*>(f.plan.key_items + blockIdx.x) + 1);
    int const key_begin = low.y, num_keys = low.z, split = high.z, head_k = p.head_k_begin + blockIdx.y;
    if (num_keys <= 0 || split != 0) return;
    int64_t const split_stride = static_cast<int64_t>(f.total_context) * f.num_heads_k * kHeadDim;
    for (int i = threadIdx.x; i < num_keys * (kHeadDim / 4); i += kPostThreads) {
        int const key = key_begin + i / (kHeadDim / 4), column = i % (kHeadDim / 4) * 4;
        if (column >= f.head_dim) continue;
        int64_t const at = (static_cast<int64_t>(key) * f.num_heads_k + head_k) * kHeadDim + column;
        auto const sum = [&](float const* partial, void* base, int64_t row_stride, int64_t head_stride) {
            float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
            for (int s = 0; s < p.num_splits; ++s) {
                float4 const x = *reinterpret_cast<float4 const*>(partial + at + s * split_stride);
                total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
            }
            auto* to = static_cast<Element*>(base) + key * row_stride + head_k * head_stride + column;
            *reinterpret_cast<uint2*>(to) = make_uint2(pack<Element>(total.x, total.y), pack<Element>(total.z, total.w));
        };
        sum(p.dk_partial, p.dk_context, p.dk_context_row_stride, p.dk_context_head_stride);
        sum(p.dv_partial, p.dv_context, p.dv_context_row_stride, p.dv_context_head_stride);
    }
}

}  // namespace flash_attn::sm80
