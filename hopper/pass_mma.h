// Deterministic dQ, consumer warpgroups (64 query rows each): the forward's walk over keys with lse known.
//   S = Q K^T, P = exp2(S - lse), dP = dO V^T, dS = P (dP - D), dQ += dS K with dS in registers.
// No atomics, no fp32 accumulator in memory; costs two products more than dQ inside the key-stationary backward.
#pragma once

#include "fwd_mma.h"

namespace flash_attn::sm90 {

template <class T>
__device__ __forceinline__ void dq_mma(DqArgs const& args, FwdStorage<T>& s) {
    using Element = typename T::Element;
    using TileQ = typename T::PartQ;
    using TileK = typename T::TileK;
    constexpr int kN = T::kBlockN, kD = T::kHeadDim;
    FwdParams const& p = args.params;
    BwdParams const& b = args.bwd;
    int const warpgroup = uniform_warpgroup() - 1, lane = threadIdx.x % 32;
    int const thread_row = 64 * warpgroup + threadIdx.x % 128 / 32 * 16 + lane / 4;
    bool const signals = threadIdx.x % 128 == 0;
    float const scale_log2 = (T::kSoftcap ? p.softcap : p.softmax_scale) * kLog2e;
    float const tanh_scale = T::kSoftcap ? p.softmax_scale / p.softcap : 0.f;

    Ring<T::kQStages> q;
    Ring<T::kStages> ring;  // K and V advance together; K is held longer
    auto const take_baton = [&] { named_sync(kBatonBarrier + warpgroup, 128 * 2); };
    auto const pass_baton = [&] { named_arrive(kBatonBarrier + (warpgroup + 1) % T::kConsumers, 128 * 2); };
    if (warpgroup == T::kConsumers - 1) { named_arrive(kBatonBarrier, 128 * 2); }

#pragma unroll 1
    while (true) {
        s.q_full[q.stage][0].wait(q.phase);
        ItemRows const item = s.item_rows[q.stage][0];
        if (item.num_rows == 0) { break; }
        uint32_t const desc_q =
            TileQ::template descriptor<Major::K>(smem_address(s.q[q.stage][0]) + 64 * TileQ::kRowBytes * warpgroup);
        uint32_t const desc_dout =
            TileQ::template descriptor<Major::K>(smem_address(s.dout[q.stage][0]) + 64 * TileQ::kRowBytes * warpgroup);
        float lse[2], delta[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int64_t const at = item.head * b.rows_padded + min(item.row_begin + thread_row + 8 * half, p.total_q - 1);
            lse[half] = __ldg(b.lse_log2 + at);
            delta[half] = __ldg(b.dout_dot_out + at);
        }

        float dq[kD / 2];
#pragma unroll
        for (float& x : dq) { x = 0.f; }
        pin(dq);
#pragma unroll 1
        for (int i = 0; i < item.num_tiles; ++i) {
            float scores[kN / 2], dprobs[kN / 2];
            uint32_t packed[kN / 4];
            s.k_full[ring.stage].wait(ring.phase);
            s.v_full[ring.stage].wait(ring.phase);
            StageKeys const keys = s.stage_keys[ring.stage];
            take_baton();
            wgmma_fence();
            gemm_ss<Element, kN, kD / 16, TileQ, Major::K, TileK, Major::K, true>(
                scores, desc_q, TileK::template descriptor<Major::K>(smem_address(s.k[ring.stage])));
            wgmma_commit();
            wgmma_fence();
            gemm_ss<Element, kN, kD / 16, TileQ, Major::K, TileK, Major::K, true>(
                dprobs, desc_dout, TileK::template descriptor<Major::K>(smem_address(s.v[ring.stage])));
            wgmma_commit();
            pass_baton();
            wgmma_wait<2>();  // dQ of the previous tile: its K is free
            if (signals && i > 0) { s.k_empty[ring.before()].arrive(); }
            wgmma_wait<1>();
            pin(scores);
            if constexpr (T::kSoftcap) {
#pragma unroll
                for (float& x : scores) { x = tanh_approx(x * tanh_scale); }
            }
            if (keys.masked) { mask_keys(scores, p.plan.row_span, item.row_begin + thread_row, p.total_q, keys); }
#pragma unroll
            for (int j = 0; j < kN / 2; ++j) {
                float const x = scores[j];
                scores[j] = exp2_approx(x * scale_log2 - lse[j / 2 % 2]);
                if constexpr (T::kSoftcap) { scores[j] *= fmaxf(1.f - x * x, 0.f); }
            }
            settle(scores, smem_address(&s.scratch));
            wgmma_wait<0>();
            pin(dprobs);
            if (signals) { s.v_empty[ring.stage].arrive(); }
#pragma unroll
            for (int j = 0; j < kN / 2; ++j) { dprobs[j] = scores[j] * (dprobs[j] - delta[j / 2 % 2]); }
            pack<Element>(packed, dprobs);
            pin(packed);
            wgmma_fence();
            gemm_rs<Element, kD, kN / 16, TileK, Major::MN, false>(
                dq, packed, TileK::template descriptor<Major::MN>(smem_address(s.k[ring.stage])));
            wgmma_commit();
            ring.advance();
        }
        wgmma_wait<0>();
        pin(dq);
        if (signals && item.num_tiles > 0) { s.k_empty[ring.before()].arrive(); }
        __syncwarp();
        if (lane == 0) { s.q_empty[q.stage][0].arrive(); }
        q.advance();

        Element* const out = static_cast<Element*>(b.dq) + (item.row_begin + 64 * warpgroup) * b.dq_row_stride +
                             item.head * b.dq_head_stride;
        store_rows<Element, kD>(dq, p.softmax_scale, p.softmax_scale, out, b.dq_row_stride,
                                item.num_rows - 64 * warpgroup, p.head_dim);
    }
    if (warpgroup == 0) { take_baton(); }
}

}  // namespace flash_attn::sm90
