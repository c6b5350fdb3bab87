// Backward for head dims over 128, consumer warpgroups, for 64 keys and all query rows that see them. One accumulator of
// 64 x head_dim is all that a warpgroup can hold, so they take roles instead of halves:
//   warpgroup 0:  S^T = K Q^T, P^T = exp2(S^T - lse), dV += P^T dO          P^T (fp32) goes to warpgroup 1
//   warpgroup 1:  dP^T = V dO^T, dS^T = P^T (dP^T - D), dK += dS^T Q        dS^T goes to both
//   both:         dQ tile = dS K, added to the accumulator from registers
// Every product has the full width: each operand tile is read once. Barrier order: probabilities, then scores, per block.
#pragma once

#include "bwd_mma.h"

namespace flash_attn::sm90 {

constexpr int kProbBarrier = kDqFullBarrier;

// A warpgroup's dQ tile (or its share of the columns) added in the order of its registers.
template <int N>
__device__ __forceinline__ void reduce_add(float* tile, float const (&x)[N]) {
    tile += threadIdx.x % 128 * 4;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(tile + 512 * i), "f"(x[4 * i]),
                     "f"(x[4 * i + 1]), "f"(x[4 * i + 2]), "f"(x[4 * i + 3])
                     : "memory");
    }
}

template <class T>
struct WideRole {
    using Element = typename T::Element;
    using TileK = typename T::TileK;
    using TileQ = typename T::TileQ;
    using TileS = typename T::TileS;
    static constexpr int kD = T::kHeadDim, kM = kBlockRows, kThreads = 256;

    BwdArgs const& args;
    BwdStorage<T>& s;
    int const thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    bool const signals = thread == 0;
    Ring<T::kStages> ring = {};
    int turn = 0;

    // keys x rows scores of the stage: S^T (operand 0) or dP^T (operand 1).
    template <int kOperand>
    __device__ __forceinline__ void issue_scores(float (&scores)[kM / 2]) {
        wgmma_fence();
        gemm_ss<Element, kM, kD / 16, TileK, Major::K, TileQ, Major::K, true>(
            scores, TileK::template descriptor<Major::K>(smem_address(s.keys[kOperand])),
            TileQ::template descriptor<Major::K>(smem_address(s.rows[kOperand][ring.stage])));
        wgmma_commit();
    }
    // acc += packed (keys x rows) times the stage's rows.
    template <int kOperand>
    __device__ __forceinline__ void issue_gradient(float (&acc)[kD / 2], uint32_t (&packed)[kM / 4]) {
        pin(packed);
        wgmma_fence();
        gemm_rs<Element, kD, kM / 16, TileQ, Major::MN, false>(
            acc, packed, TileQ::template descriptor<Major::MN>(smem_address(s.rows[kOperand][ring.stage])));
        wgmma_commit();
    }
    // This block's dQ in turn, or the warpgroup's half of its columns, added to the accumulator. `other` issues other products.
    template <class Other>
    __device__ __forceinline__ void add_dq(int warpgroup, StageRows const& rows, Other const& other) {
        if (!T::kWithDq || T::kDqTurns) { other(); }
        if (T::kWithDq && (!T::kDqTurns || turn == warpgroup)) {
            float dq[T::kDqColumns / 2];
            int const half = T::kDqTurns ? 0 : warpgroup;
            wgmma_fence();
            gemm_ss<Element, T::kDqColumns, T::kBlockN / 16, TileS, Major::MN, TileK, Major::MN, true>(
                dq, TileS::template descriptor<Major::MN>(smem_address(s.ds[0])),
                TileK::template descriptor<Major::MN>(smem_address(s.keys[0]) +
                                                      T::kDqColumns / TileK::kChunk * TileK::kChunkBytes * half));
            wgmma_commit();
            if constexpr (!T::kDqTurns) { other(); }
            wgmma_wait<T::kDqTurns ? 0 : 1>();
            pin(dq);
            reduce_add(args.params.dq_accum + int64_t(rows.dq_tile) * kBlockRows * kD + half * T::kDqFloats, dq);
        }
        turn ^= 1;
    }

    __device__ __forceinline__ void probabilities() {
        BwdParams const& p = args.params;
        float const scale_log2 = (T::kSoftcap ? p.fwd.softcap : p.fwd.softmax_scale) * kLog2e;
        float const tanh_scale = T::kSoftcap ? p.fwd.softmax_scale / p.fwd.softcap : 0.f;
        float dv[kD / 2], probs[kM / 2];
        uint32_t packed[kM / 4];
#pragma unroll
        for (float& x : dv) { x = 0.f; }
        pin(dv);
        s.full[0][0].wait(0);
        StageRows rows = s.stage_rows[0];
#pragma unroll 1
        while (rows.dq_tile >= 0) {
            issue_scores<0>(probs);
            wgmma_wait<0>();
            pin(probs);
            if constexpr (T::kSoftcap) {
#pragma unroll
                for (float& x : probs) { x = tanh_approx(x * tanh_scale); }
            }
            if (rows.masked()) { mask_rows(probs, p, s.item, rows.block(), thread / 32 * 16 + lane / 4); }
            float4* const exchange = reinterpret_cast<float4*>(s.probs) + thread;
#pragma unroll
            for (int j = 0; j < kM / 8; ++j) {
                float2 const lse = *reinterpret_cast<float2 const*>(&s.scalars[0][ring.stage][8 * j + 2 * (lane % 4)]);
                float4 out;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float const x = probs[4 * j + 2 * half], y = probs[4 * j + 2 * half + 1];
                    float const px = exp2_approx(x * scale_log2 - lse.x), py = exp2_approx(y * scale_log2 - lse.y);
                    packed[2 * j + half] = pack<Element>(px, py);
                    (half ? out.z : out.x) =
                        T::kSoftcap ? px * fmaxf(1.f - x * x, 0.f) : px;  // dS takes tanh's derivative along
                    (half ? out.w : out.y) = T::kSoftcap ? py * fmaxf(1.f - y * y, 0.f) : py;
                }
                exchange[128 * j] = out;
            }
            named_arrive(kProbBarrier, kThreads);
            if (signals) { s.empty[0][ring.stage].arrive(); }
            s.full[1][ring.stage].wait(ring.phase);
            issue_gradient<1>(dv, packed);
            named_sync(kScoreBarrier, kThreads);
            add_dq(0, rows, [] { wgmma_commit(); });
            wgmma_wait<0>();
            pin(dv);
            if (signals) { s.empty[1][ring.stage].arrive(); }
            ring.advance();
            s.full[0][ring.stage].wait(ring.phase);
            rows = s.stage_rows[ring.stage];
        }
        bwd_store_gradient<T, false>(p, s.item, s.head_k, 0, dv);
    }

    __device__ __forceinline__ void scores() {
        BwdParams const& p = args.params;
        float dk[kD / 2], dprobs[kM / 2];
        uint32_t packed[kM / 4];
#pragma unroll
        for (float& x : dk) { x = 0.f; }
        pin(dk);
        s.full[0][0].wait(0);
        StageRows rows = s.stage_rows[0];
#pragma unroll 1
        while (rows.dq_tile >= 0) {
            s.full[1][ring.stage].wait(ring.phase);
            issue_scores<1>(dprobs);
            wgmma_wait<0>();  // the previous block's dK too
            pin(dprobs);
            named_sync(kProbBarrier, kThreads);
            float4 const* const exchange = reinterpret_cast<float4 const*>(s.probs) + thread;
#pragma unroll
            for (int j = 0; j < kM / 8; ++j) {
                float2 const delta =
                    *reinterpret_cast<float2 const*>(&s.scalars[1][ring.stage][8 * j + 2 * (lane % 4)]);
                float4 const probs = exchange[128 * j];
                packed[2 * j] =
                    pack<Element>(probs.x * (dprobs[4 * j] - delta.x), probs.y * (dprobs[4 * j + 1] - delta.y));
                packed[2 * j + 1] =
                    pack<Element>(probs.z * (dprobs[4 * j + 2] - delta.x), probs.w * (dprobs[4 * j + 3] - delta.y));
            }
            if (signals) { s.empty[1][ring.stage].arrive(); }
            if constexpr (T::kWithDq) {
                store_packed<TileS>(smem_address(s.ds[0]), packed, 0);
                fence_async_proxy();
            }
            named_sync(kScoreBarrier, kThreads);
            add_dq(1, rows, [&] { issue_gradient<0>(dk, packed); });
            wgmma_wait<0>();
            pin(dk);
            if (signals) { s.empty[0][ring.stage].arrive(); }
            ring.advance();
            s.full[0][ring.stage].wait(ring.phase);
            rows = s.stage_rows[ring.stage];
        }
        bwd_store_gradient<T, true>(p, s.item, s.head_k, 0, dk);
    }
};

template <class T>
__device__ __forceinline__ void bwd_wide_mma(BwdArgs const& args, BwdStorage<T>& s) {
    WideRole<T> role{args, s};
    s.keys_full.wait(0);
    if (uniform_warpgroup() == 1) {
        role.probabilities();
    } else {
        role.scores();
    }
}

}  // namespace flash_attn::sm90
