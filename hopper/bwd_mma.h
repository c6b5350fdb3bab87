// Backward, consumer warpgroups (64 keys each), for one key tile and all query rows that see it:
//   S^T = K Q^T, P^T = exp2(S^T - lse), dP^T = V dO^T, dS^T = P^T (dP^T - D), dV += P^T dO, dK += dS^T Q, dQ tile = dS K.
// P^T and dS^T are register operands; dS^T also goes to shared memory, where the warpgroups exchange it for dQ.
#pragma once

#include "bwd_fragments.h"

namespace flash_attn::sm90 {

template <class Element_, int kHeadDim_, bool kSoftcap_, bool kWithDq_>
struct BwdTraits {
    using Element = Element_;
    static constexpr Tiles kTile = tiles(kHeadDim_);
    static constexpr int kHeadDim = kHeadDim_, kBlockN = kTile.bwd_block_n;
    static constexpr int kBlockM = kSoftcap_ ? kBlockRows : kTile.bwd_block_m;  // tanh wants registers
    static constexpr int kRowStages = 3, kDoutStages = kBlockM > kBlockRows ? 2 : 3;  // of Q, of dO: as many as fit
    static constexpr bool kSoftcap = kSoftcap_, kWithDq = kWithDq_;
    static constexpr int kConsumers = 2;
    static constexpr int kCluster = 2;  // CTAs that may share rows: find_pair in launch.h
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr int kLoadRegisters = 24, kMmaRegisters = 240;
    static_assert(kBlockN == 128);
    // dQ: each warpgroup 64 rows of a longer block, or a share of the columns, or, where the share is no good width for
    // wgmma, all of them every other block.
    static constexpr bool kDqTurns = kBlockM == kBlockRows && kHeadDim / kConsumers % 64 != 0;
    static constexpr bool kDqWhole = kDqTurns || kBlockM > kBlockRows;  // all columns of 64 rows in one warpgroup
    static constexpr int kDqColumns = kDqWhole ? kHeadDim : kHeadDim / kConsumers;
    static constexpr int kDqFloats = kBlockRows * kDqColumns;
    // Longer blocks: S of the next block is issued behind dK of this one.
    static constexpr bool kAhead = kBlockM > kBlockRows;
    // Steps of 16 rows in a piece of P^T and dS^T: all of a block's, or of longer ones two.
    static constexpr int kSteps = kAhead ? 2 : kBlockM / 16, kPieces = kBlockM / 16 / kSteps;
    using TileK = SmemTile<kBlockN, kHeadDim>;
    using TileQ = SmemTile<kBlockM, kHeadDim>;
    using TileS = SmemTile<kBlockN, kBlockM>;  // dS^T: keys x rows
};

// One warpgroup's state over the blocks of an item. Order of its products: S_i, dQ_{i-1}, dV_i, dP_i, dK_i. dQ comes one
// block late, so that the exchange of dS never makes one warpgroup wait for the other and the two drift apart: while one
// computes exponentials, the other has the tensor cores.
// Longer blocks (kAhead): dQ_{i-1}, dV_i, dP_i, dK_i, S_{i+1}. dQ is issued in front of the exponentials and stored between them;
// P^T and dS^T are made in pieces, and the products of a piece (dV, dK) run under the arithmetic of the next.
template <class T>
__device__ __forceinline__ void bwd_mma(BwdArgs const& args, BwdStorage<T>& s) {
    using Element = typename T::Element;
    using TileK = typename T::TileK;
    using TileQ = typename T::TileQ;
    using TileS = typename T::TileS;
    constexpr int kD = T::kHeadDim, kM = T::kBlockM;
    BwdParams const& p = args.params;
    int const warpgroup = uniform_warpgroup() - 1, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    bool const signals = thread == 0;
    // A pair's stages are free when both CTAs have read them. Every release counts twice: here and there, or twice here.
    int const other = cluster_rank() ^ s.paired;
    auto const release = [&](Barrier& empty) {
        if (signals) {
            empty.arrive();
            arrive_at(empty, other);
        }
    };
    float const scale_log2 = (T::kSoftcap ? p.fwd.softcap : p.fwd.softmax_scale) * kLog2e;
    float const tanh_scale = T::kSoftcap ? p.fwd.softmax_scale / p.fwd.softcap : 0.f;

    float dk[kD / 2], dv[kD / 2];
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) { dk[i] = dv[i] = 0.f; }
    pin(dk);
    pin(dv);
    float probs[kM / 2];        // S^T, then P^T
    uint32_t packed_p[kM / 4];  // P^T
    float2 scalars[kM / 8];     // of the thread's columns: lse, and behind P^T D

    uint32_t const desc_k =
        TileK::template descriptor<Major::K>(operand_address(s.keys[0]) + 64 * TileK::kRowBytes * warpgroup);
    uint32_t const desc_v =
        TileK::template descriptor<Major::K>(operand_address(s.keys[1]) + 64 * TileK::kRowBytes * warpgroup);
    uint32_t const desc_k_dq = TileK::template descriptor<Major::MN>(
        operand_address(s.keys[0]) + (T::kDqWhole ? 0 : T::kDqColumns / TileK::kChunk * TileK::kChunkBytes * warpgroup));
    constexpr int kSteps = T::kSteps, kPieces = T::kPieces;
    Ring<T::kRowStages> ring;   // the block's stage of Q
    Ring<T::kDoutStages> dout;  // of dO
    Ring<2> ds = {1, 1};        // dS buffer of the block before; before the first one, nobody waits for it, nobody adds its dQ
    StageRows rows;
    int dq_tile = kNoDq;  // of the block before

    // Shared memory is busy with operands and a load from it takes hundreds of cycles: every load below is placed where
    // products of this warpgroup are on their way.
    auto const fetch_block = [&] {
        s.full[0][ring.stage].wait(ring.phase);
        rows = s.stage_rows[ring.stage];
    };
    auto const fetch_lse = [&] {
        if constexpr (!T::kSoftcap) {  // where tanh needs the registers, lse is read behind it
#pragma unroll
            for (int j = 0; j < kM / 8; ++j) { scalars[j] = column_pair(s.scalars[0][ring.stage], j); }
        }
    };
    auto const fetch_d = [&] {
#pragma unroll
        for (int j = 0; j < kM / 8; ++j) { scalars[j] = column_pair(s.scalars[1][dout.stage], j); }
    };
    auto const issue_scores = [&] {
        pin(probs);
        wgmma_fence();
        gemm_ss<Element, kM, kD / 16, TileK, Major::K, TileQ, Major::K, true>(
            probs, desc_k, TileQ::template descriptor<Major::K>(operand_address(s.rows[ring.stage])));
        wgmma_commit();
    };
    // A piece's P^T and its part of dV.
    auto const issue_dv = [&](int piece) {
#pragma unroll
        for (int j = 2 * kSteps * piece; j < 2 * kSteps * (piece + 1); ++j) {
            if constexpr (T::kSoftcap) { scalars[j] = column_pair(s.scalars[0][ring.stage], j); }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& x = probs[4 * j + 2 * half];
                float& y = probs[4 * j + 2 * half + 1];
                float const px = exp2_approx(x * scale_log2 - scalars[j].x),
                            py = exp2_approx(y * scale_log2 - scalars[j].y);
                packed_p[2 * j + half] = pack<Element>(px, py);
                x = T::kSoftcap ? px * fmaxf(1.f - x * x, 0.f) : px;  // dS takes tanh's derivative along
                y = T::kSoftcap ? py * fmaxf(1.f - y * y, 0.f) : py;
            }
        }
        if (!T::kAhead) { s.full[1][dout.stage].wait(dout.phase); }
        auto& operand = part<4 * kSteps>(packed_p, piece);
        pin(operand);
        wgmma_fence();
        gemm_rs<Element, kD, kSteps, TileQ, Major::MN, false>(
            dv, operand,
            TileQ::template descriptor<Major::MN>(operand_address(s.rows[T::kRowStages + dout.stage])) +
                TileQ::template step<Major::MN>(kSteps * piece));
        wgmma_commit();
    };
    // Behind S^T, in front of the pieces of P^T and dV.
    auto const begin_values = [&] {
        pin(probs);
        if constexpr (T::kSoftcap) {
#pragma unroll
            for (float& x : probs) { x = tanh_approx(x * tanh_scale); }
        }
        if (rows.masked()) { mask_rows(probs, p, s.item, rows.block(), 64 * warpgroup + thread / 32 * 16 + lane / 4); }
        if (T::kAhead) { s.full[1][dout.stage].wait(dout.phase); }
    };
    auto const issue_dprobs = [&](float(&dprobs)[kM / 2]) {
        pin(dprobs);
        wgmma_fence();
        gemm_ss<Element, kM, kD / 16, TileK, Major::K, TileQ, Major::K, true>(
            dprobs, desc_v, TileQ::template descriptor<Major::K>(operand_address(s.rows[T::kRowStages + dout.stage])));
        wgmma_commit();
    };
    // dS^T, a register operand, and dK, piece by piece.
    auto const issue_dk = [&](float(&dprobs)[kM / 2], uint32_t(&packed)[kM / 4]) {
        pin(dprobs);
        pin(dv);
        release(s.empty[1][dout.stage]);
        dout.advance();
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            auto& operand = part<4 * kSteps>(packed, piece);
#pragma unroll
            for (int i = 4 * kSteps * piece; i < 4 * kSteps * (piece + 1); ++i) {
                packed[i] = pack<Element>(probs[2 * i] * (dprobs[2 * i] - scalars[i / 2].x),
                                          probs[2 * i + 1] * (dprobs[2 * i + 1] - scalars[i / 2].y));
            }
            pin(operand);
            wgmma_fence();
            gemm_rs<Element, kD, kSteps, TileQ, Major::MN, false>(
                dk, operand,
                TileQ::template descriptor<Major::MN>(operand_address(s.rows[ring.stage])) +
                    TileQ::template step<Major::MN>(kSteps * piece));
        }
        wgmma_commit();
    };
    // dS^T for the other warpgroup. Two buffers suffice: who writes this one has waited for the other's part of the next
    // one, which is written behind that warpgroup's reads of this one.
    auto const share_ds = [&](uint32_t const(&packed)[kM / 4]) {
        store_packed<TileS>(smem_address(s.ds[ds.stage]), packed, warpgroup);
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) { s.ds_full[ds.stage].arrive(); }
    };
    // Blocks of 64 rows: what follows P^T and dV.
    auto const finish_block = [&](float(&dprobs)[kM / 2]) {
        uint32_t packed[kM / 4];
        issue_dprobs(dprobs);
        wgmma_wait<0>();
        issue_dk(dprobs, packed);
        ds.advance();
        if constexpr (T::kWithDq) { share_ds(packed); }
        int const stage = ring.stage;
        dq_tile = rows.dq_tile;
        ring.advance();
        fetch_block();
        fetch_lse();
        wgmma_wait<0>();  // dK: across the loop's end, ptxas would want 16 more registers for dS
        pin(dk);
        release(s.empty[0][stage]);
    };
    auto const issue_dq = [&](float(&dq)[T::kDqColumns / 2]) {
        s.ds_full[ds.stage].wait(ds.phase);
        wgmma_fence();
        gemm_ss<Element, T::kDqColumns, T::kBlockN / 16, TileS, Major::MN, TileK, Major::MN, true>(
            dq,
            TileS::template descriptor<Major::MN>(operand_address(s.ds[ds.stage]) +
                                                  (kM > kBlockRows ? warpgroup * TileS::kChunkBytes : 0)),
            desc_k_dq);
        wgmma_commit();
    };
    auto const store_dq = [&](float(&dq)[T::kDqColumns / 2], int of, auto const& meanwhile) {
        pin(dq);
        named_sync(kDqEmptyBarrier + warpgroup, 128 + 32);
        float4* const tile = reinterpret_cast<float4*>(s.dq[warpgroup]) + thread;
#pragma unroll
        for (int i = 0; i < T::kDqColumns / 8; ++i) {
            tile[128 * i] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
        }
        if (signals) { s.dq_tile[warpgroup] = kM > kBlockRows ? of + warpgroup : of; }
        meanwhile();
        fence_async_proxy();
        named_arrive(kDqFullBarrier + warpgroup, 128 + 32);
    };

    auto const last_dq = [&] {
        if (T::kWithDq && (!T::kDqTurns || ds.stage == warpgroup)) {
            float dq[T::kDqColumns / 2];
            issue_dq(dq);
            wgmma_wait<0>();
            store_dq(dq, dq_tile, [] {});
        }
    };

    s.keys_full.wait(0);
    fetch_block();
    fetch_lse();
    if constexpr (T::kAhead) {
        issue_scores();
        wgmma_wait<0>();
#pragma unroll 1
        while (rows.dq_tile >= 0) {
            float dprobs[kM / 2], dq[T::kDqColumns / 2];
            int const stage = ring.stage, tile = rows.dq_tile;
            if constexpr (T::kWithDq) { issue_dq(dq); }
            begin_values();
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                if (T::kWithDq && piece == kPieces / 2) {
                    wgmma_wait<kPieces / 2>();  // dQ
                    store_dq(dq, dq_tile, [] {});
                }
                issue_dv(piece);
            }
            dq_tile = tile;
            fetch_d();
            wgmma_wait<0>();
            issue_dprobs(dprobs);
            wgmma_wait<0>();
            issue_dk(dprobs, packed_p);
            ring.advance();
            fetch_block();
            issue_scores();
            ds.advance();
            if constexpr (T::kWithDq) { share_ds(packed_p); }
            fetch_lse();
            wgmma_wait<1>();
            pin(dk);
            release(s.empty[0][stage]);
            wgmma_wait<0>();
        }
        if (dq_tile >= 0) { last_dq(); }
    } else if (rows.dq_tile >= 0) {
        {
            float dprobs[kM / 2];
            issue_scores();
            wgmma_wait<0>();
            begin_values();
            issue_dv(0);
            fetch_d();
            finish_block(dprobs);
        }
#pragma unroll 1
        while (rows.dq_tile >= 0) {
            float dprobs[kM / 2];
            if (T::kWithDq && (!T::kDqTurns || ds.stage == warpgroup)) {
                float dq[T::kDqColumns / 2];
                issue_scores();
                issue_dq(dq);
                wgmma_wait<1>();  // S^T
                begin_values();
                issue_dv(0);
                wgmma_wait<T::kSoftcap ? 0 : 1>();  // dQ; with tanh, dV too
                store_dq(dq, dq_tile, fetch_d);
                if (T::kDqTurns) { wgmma_wait<0>(); }
            } else {
                issue_scores();
                wgmma_wait<0>();
                begin_values();
                issue_dv(0);
                if constexpr (T::kWithDq) {
                    wgmma_wait<0>();
                } else {
                    wgmma_wait<1>();
                    // Keeps ptxas from loading D early, in registers that it then spills others for.
                    named_sync(kScoreBarrier + warpgroup, 128);
                }
                fetch_d();
            }
            finish_block(dprobs);
        }
        last_dq();
    }
    if constexpr (T::kWithDq) {
        named_sync(kDqEmptyBarrier + warpgroup, 128 + 32);
        if (signals) { s.dq_tile[warpgroup] = kDqEnd; }
        named_arrive(kDqFullBarrier + warpgroup, 128 + 32);
    }
    bwd_store_gradients<T, false, true>(p, s.item, s.head_k, 64 * warpgroup, dv, dk);
}

}  // namespace flash_attn::sm90
