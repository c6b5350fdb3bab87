// Forward, consumer warpgroups (64 query rows each): S = Q K^T, online softmax, O += P V with P in registers.
// Inside a warpgroup S of the next tile is issued before P V of this one; between warpgroups a baton (named barriers)
// keeps one in its matrix products while the other does its softmax.
#pragma once

#include "epilogue.h"
#include "fwd_load.h"

namespace flash_attn::sm90 {

constexpr int kBatonBarrier = 1;  // + warpgroup

// Running maximum and sum of the thread's two rows. Sums are the thread's own until finish().
struct OnlineSoftmax {
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};

    // S becomes P; alpha is what earlier sums and outputs have to be scaled by.
    template <int N>
    __device__ __forceinline__ void step(float (&s)[N], float scale_log2, float (&alpha)[2]) {
        float base[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float m = max[half];
#pragma unroll
            for (int i = 0; i < N / 4; ++i) { m = fmaxf(m, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1])); }
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
            base[half] = m == -INFINITY ? 0.f : m * scale_log2;  // a row without keys so far keeps P = 0
            alpha[half] = exp2_approx(max[half] * scale_log2 - base[half]);
            max[half] = m;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float t = 0.f;
#pragma unroll
            for (int i = 0; i < N / 4; ++i) {
                float& x = s[4 * i + 2 * half];
                float& y = s[4 * i + 2 * half + 1];
                x = exp2_approx(x * scale_log2 - base[half]);
                y = exp2_approx(y * scale_log2 - base[half]);
                t += x + y;
            }
            sum[half] = sum[half] * alpha[half] + t;
        }
    }
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] += __shfl_xor_sync(0xffffffff, sum[half], 1);
            sum[half] += __shfl_xor_sync(0xffffffff, sum[half], 2);
        }
    }
};

// Scores of keys that a row does not see become -inf. row: the thread's first row; keys: the stage.
template <int N>
__device__ __forceinline__ void mask_keys(float (&s)[N], RowSpan const* row_span, int row, int total_q, StageKeys const& keys) {
    int const column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int4 const span = __ldg(reinterpret_cast<int4 const*>(row_span) + min(row + 8 * half, total_q - 1));
        int const begin = (keys.region ? span.x : span.z) - keys.key - column;
        int const end = (keys.region ? span.y : span.w) - keys.key - column;
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
            if (8 * i < begin || 8 * i >= end) { s[4 * i + 2 * half] = -INFINITY; }
            if (8 * i + 1 < begin || 8 * i + 1 >= end) { s[4 * i + 2 * half + 1] = -INFINITY; }
        }
    }
}

template <class T>
__device__ __forceinline__ void fwd_mma(FwdArgs const& args, FwdStorage<T>& s) {
    using Element = typename T::Element;
    using TileQ = typename T::TileQ;
    using TileK = typename T::TileK;
    constexpr int kN = T::kBlockN, kD = T::kHeadDim;
    FwdParams const& p = args.params;
    int const warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
    int const thread_row = 64 * warpgroup + threadIdx.x % 128 / 32 * 16 + lane / 4;
    bool const signals = threadIdx.x % 128 == 0;
    // softcap: S = c tanh(q k scale / c), so the exponent's scale is c and tanh's argument carries scale / c.
    float const scale_log2 = (T::kSoftcap ? p.softcap : p.softmax_scale) * kLog2e;
    float const tanh_scale = T::kSoftcap ? p.softmax_scale / p.softcap : 0.f;

    Ring<T::kQStages> q;
    Ring<T::kStages> k, v;
    if (warpgroup == T::kConsumers - 1) { named_arrive(kBatonBarrier, 128 * 2); }

    auto const take_baton = [&] { named_sync(kBatonBarrier + warpgroup, 128 * 2); };
    auto const pass_baton = [&] { named_arrive(kBatonBarrier + (warpgroup + 1) % T::kConsumers, 128 * 2); };

#pragma unroll 1
    while (true) {
        s.q_full[q.stage].wait(q.phase);
        ItemRows const item = s.item_rows[q.stage];
        if (item.num_rows == 0) { break; }
        uint32_t const desc_q = TileQ::template descriptor<Major::K>(smem_address(s.q[q.stage]) + 64 * TileQ::kRowBytes * warpgroup);

        float o[kD / 2];
#pragma unroll
        for (float& x : o) { x = 0.f; }
        OnlineSoftmax softmax;

        if (item.num_tiles > 0) {
            float scores[kN / 2], alpha[2];
            uint32_t probs[kN / 4];
            auto const issue_scores = [&] {
                wgmma_fence();
                gemm_ss<Element, kN, kD / 16, TileQ, Major::K, TileK, Major::K, true>(
                    scores, desc_q, TileK::template descriptor<Major::K>(smem_address(s.k[k.stage])));
                wgmma_commit();
            };
            auto const issue_output = [&] {
                pin(probs);
                wgmma_fence();
                gemm_rs<Element, kD, kN / 16, TileK, Major::MN, false>(
                    o, probs, TileK::template descriptor<Major::MN>(smem_address(s.v[v.stage])));
                wgmma_commit();
            };
            StageKeys keys;
            // The baton's barrier lies between this read and the arrival that lets the producer overwrite it.
            auto const wait_keys = [&] {
                s.k_full[k.stage].wait(k.phase);
                keys = s.stage_keys[k.stage];
            };
            // Scores of stage k have arrived: free the stage, then softmax.
            auto const take_scores = [&] {
                pin(scores);
                if (signals) { s.k_empty[k.stage].arrive(); }
                k.advance();
                if constexpr (T::kSoftcap) {
#pragma unroll
                    for (float& x : scores) { x = tanh_approx(x * tanh_scale); }
                }
                if (keys.masked) { mask_keys(scores, p.plan.row_span, item.row_begin + thread_row, p.total_q, keys); }
                softmax.step(scores, scale_log2, alpha);
                settle(softmax.sum, smem_address(&s.scratch));
            };

            wait_keys();
            take_baton();
            issue_scores();
            pass_baton();
            wgmma_wait<0>();
            take_scores();
            pack<Element>(probs, scores);

#pragma unroll 1
            for (int i = 1; i < item.num_tiles; ++i) {
                wait_keys();
                take_baton();
                issue_scores();
                s.v_full[v.stage].wait(v.phase);
                issue_output();
                pass_baton();
                wgmma_wait<1>();
                take_scores();
                wgmma_wait<0>();
                pin(o);
                if (signals) { s.v_empty[v.stage].arrive(); }
                v.advance();
#pragma unroll
                for (int j = 0; j < kD / 2; ++j) { o[j] *= alpha[j / 2 % 2]; }
                pack<Element>(probs, scores);
            }

            if (lane == 0) { s.q_empty[q.stage].arrive(); }
            s.v_full[v.stage].wait(v.phase);
            issue_output();
            wgmma_wait<0>();
            pin(o);
            if (signals) { s.v_empty[v.stage].arrive(); }
            v.advance();
        } else {
            __syncwarp();
            if (lane == 0) { s.q_empty[q.stage].arrive(); }
        }
        q.advance();

        softmax.finish();
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float const sum = softmax.sum[half];
            inverse[half] = sum == 0.f ? 0.f : 1.f / sum;
            int const row = thread_row + 8 * half;
            if (lane % 4 == 0 && row < item.num_rows) {
                p.lse[item.head * p.lse_head_stride + item.row_begin + row] =
                    sum == 0.f ? -INFINITY : (softmax.max[half] * scale_log2 + __log2f(sum)) * kLn2;
            }
        }
        Element* const out = static_cast<Element*>(p.out) + (item.row_begin + 64 * warpgroup) * p.out_row_stride + item.head * p.out_head_stride;
        store_rows<Element, kD>(o, inverse[0], inverse[1], out, p.out_row_stride, item.num_rows - 64 * warpgroup, p.head_dim);
    }
    if (warpgroup == 0) { take_baton(); }  // the last one passed: no barrier is left half full
}

}  // namespace flash_attn::sm90
