// Backward, consumer warpgroups (64 keys each), for one key tile and all query rows that see it:
//   S^T = K Q^T, P^T = exp2(S^T - lse), dP^T = V dO^T, dS^T = P^T (dP^T - D), dV += P^T dO, dK += dS^T Q, dQ tile = dS K.
// P^T and dS^T are register operands; dS^T also goes to shared memory, where the warpgroups exchange it for dQ.
#pragma once

#include "bwd_load.h"
#include "epilogue.h"

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
    // Longer blocks: S of the next block is issued behind dK of this one, P waits for dP in 16 bits.
    static constexpr bool kAhead = kBlockM > kBlockRows && kWithDq;
    using TileK = SmemTile<kBlockN, kHeadDim>;
    using TileQ = SmemTile<kBlockM, kHeadDim>;
    using TileS = SmemTile<kBlockN, kBlockM>;  // dS^T: keys x rows
};

// Scores of pairs that are not visible become -inf. The thread's keys are key and key + 8, its columns rows of the block.
template <int N>
__device__ __forceinline__ void mask_rows(float (&scores)[N], BwdParams const& p, KeyItem const& item, int block,
                                          int key) {
    key += item.key_begin;
    int const key_end = item.key_begin + item.num_keys, first_row = block * 2 * N + 2 * (threadIdx.x % 4);
    constexpr int kTogether = 2;  // more take registers that the loop lacks
#pragma unroll
    for (int first = 0; first < N / 2; first += kTogether) {
        int2 spans[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {  // no branch: reads in a chain would take longer than the block's products
            int const row = first_row + (first + i) / 2 * 8 + i % 2;
            int const inside = min(max(row, item.row_begin), item.row_end - 1);
            spans[i] = __ldg(reinterpret_cast<int2 const*>(p.fwd.plan.row_span + inside) + (item.region ? 0 : 1));
            spans[i].y = inside == row ? min(spans[i].y, key_end) : 0;
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& x = scores[(first + i) / 2 * 4 + 2 * half + i % 2];
                if (key + 8 * half < spans[i].x || key + 8 * half >= spans[i].y) { x = -INFINITY; }
            }
        }
    }
}

// A packed accumulator of dS^T to its tile, 8 x 8 matrices four at a time.
template <class Tile, int N>
__device__ __forceinline__ void store_packed(uint32_t tile, uint32_t const (&x)[N], int warpgroup) {
    int const lane = threadIdx.x % 32;
    int const row = 64 * warpgroup + threadIdx.x % 128 / 32 * 16 + lane % 16;
    uint32_t const first = tile + row * Tile::kRowBytes + ((lane / 16 ^ row % 8) << 4);
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        uint32_t const address = (first ^ (j % 4 << 5)) + j / 4 * Tile::kChunkBytes;  // aligned to the swizzle's period
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[4 * j]),
                     "r"(x[4 * j + 1]), "r"(x[4 * j + 2]), "r"(x[4 * j + 3])
                     : "memory");
    }
}

// dK (scaled) or dV of 64 keys from `first` of the item on: rows of its region's tensor, or fp32 partials of a row
// split (not scaled).
template <class T, bool kDk>
__device__ __forceinline__ void bwd_store_gradient(BwdParams const& p, KeyItem const& item, int head_k, int first,
                                                   float const (&acc)[T::kHeadDim / 2]) {
    using Element = typename T::Element;
    int const key = item.key_begin + first, num_keys = item.num_keys - first;
    if (item.split >= 0) {
        int64_t const stride = int64_t(p.fwd.num_heads_k) * T::kHeadDim;
        int64_t const offset =
            (int64_t(item.split) * p.fwd.total_context + key) * stride + int64_t(head_k) * T::kHeadDim;
        store_rows_fp32<T::kHeadDim>(acc, (kDk ? p.dk_partial : p.dv_partial) + offset, stride, num_keys);
        return;
    }
    void* out = kDk ? p.dk : p.dv;
    int64_t row_stride = kDk ? p.dk_row_stride : p.dv_row_stride,
            head_stride = kDk ? p.dk_head_stride : p.dv_head_stride;
    if (item.region != 0) {
        out = kDk ? p.dk_context : p.dv_context;
        row_stride = kDk ? p.dk_context_row_stride : p.dv_context_row_stride;
        head_stride = kDk ? p.dk_context_head_stride : p.dv_context_head_stride;
    }
    float const scale = kDk ? p.fwd.softmax_scale : 1.f;
    store_rows<Element, T::kHeadDim>(acc, scale, scale,
                                     static_cast<Element*>(out) + key * row_stride + head_k * head_stride, row_stride,
                                     num_keys, p.fwd.head_dim);
}

// The two scalars of the thread's j-th pair of columns, from a stage's row scalars.
__device__ __forceinline__ float2 column_pair(float const* scalars, int j) {
    return *reinterpret_cast<float2 const*>(scalars + 8 * j + 2 * (threadIdx.x % 4));
}

// Minus the scalars of the columns, as what accumulators begin with.
template <int N>
__device__ __forceinline__ void fill_columns(float (&x)[N], float const* scalars) {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        float2 const pair = column_pair(scalars, j);
        x[4 * j] = x[4 * j + 2] = -pair.x;
        x[4 * j + 1] = x[4 * j + 3] = -pair.y;
    }
}

// One warpgroup's state over the blocks of an item. Order of its products: S_i, dQ_{i-1}, dV_i, dP_i, dK_i. dQ comes one
// block late, so that the exchange of dS never makes one warpgroup wait for the other and the two drift apart: while one
// computes exponentials, the other has the tensor cores. D enters as initial values of dP^T's accumulators.
// Longer blocks (kAhead): dV_i, dP_i, dQ_{i-1}, dK_i, S_{i+1}, and no product waits at the loop's end.
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
    // P^T in fp16, where fp32 takes too many registers: 11 bits down to 2^-14, steps of 2^-24 below, which counts where rows see
    // more than some 10^5 keys (README.md).
    uint32_t weights[kM / 4];
    float2 lse[kM / 8];

    uint32_t const desc_k =
        TileK::template descriptor<Major::K>(operand_address(s.keys[0]) + 64 * TileK::kRowBytes * warpgroup);
    uint32_t const desc_v =
        TileK::template descriptor<Major::K>(operand_address(s.keys[1]) + 64 * TileK::kRowBytes * warpgroup);
    uint32_t const desc_k_dq = TileK::template descriptor<Major::MN>(
        operand_address(s.keys[0]) + (T::kDqWhole ? 0 : T::kDqColumns / TileK::kChunk * TileK::kChunkBytes * warpgroup));
    // dV may be under way while dP^T's accumulators are filled, where both its operand P^T and they have registers.
    constexpr int kPending = kM > kBlockRows ? 0 : 1;
    Ring<T::kRowStages> ring;   // the block's stage of Q
    Ring<T::kDoutStages> dout;  // of dO
    Ring<2> ds;                 // its dS buffer
    StageRows rows;
    int dq_tile = 0;  // of the block before

    // Shared memory is busy with operands and a load from it takes hundreds of cycles: every load below is placed where
    // products of this warpgroup are on their way.
    auto const fetch_block = [&] {
        s.full[0][ring.stage].wait(ring.phase);
        rows = s.stage_rows[ring.stage];
    };
    auto const fetch_lse = [&] {
        if constexpr (!T::kSoftcap) {  // where tanh needs the registers, lse is read behind it
#pragma unroll
            for (int j = 0; j < kM / 8; ++j) { lse[j] = column_pair(s.scalars[0][ring.stage], j); }
        }
    };
    auto const issue_scores = [&] {
        pin(probs);
        wgmma_fence();
        gemm_ss<Element, kM, kD / 16, TileK, Major::K, TileQ, Major::K, true>(
            probs, desc_k, TileQ::template descriptor<Major::K>(operand_address(s.rows[ring.stage])));
        wgmma_commit();
    };
    // S^T to P^T.
    auto const probabilities = [&] {
        pin(probs);
        if constexpr (T::kSoftcap) {
#pragma unroll
            for (float& x : probs) { x = tanh_approx(x * tanh_scale); }
        }
        if (rows.masked()) { mask_rows(probs, p, s.item, rows.block(), 64 * warpgroup + thread / 32 * 16 + lane / 4); }
#pragma unroll
        for (int j = 0; j < kM / 8; ++j) {
            if constexpr (T::kSoftcap) { lse[j] = column_pair(s.scalars[0][ring.stage], j); }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& x = probs[4 * j + 2 * half];
                float& y = probs[4 * j + 2 * half + 1];
                float const px = exp2_approx(x * scale_log2 - lse[j].x), py = exp2_approx(y * scale_log2 - lse[j].y);
                packed_p[2 * j + half] = pack<Element>(px, py);
                x = T::kSoftcap ? px * fmaxf(1.f - x * x, 0.f) : px;  // dS takes tanh's derivative along
                y = T::kSoftcap ? py * fmaxf(1.f - y * y, 0.f) : py;
                if constexpr (T::kAhead) { weights[2 * j + half] = pack<cutlass::half_t>(x, y); }
            }
        }
    };
    auto const fill_dprobs = [&](float(&dprobs)[kM / 2]) {
        s.full[1][dout.stage].wait(dout.phase);
        fill_columns(dprobs, s.scalars[1][dout.stage]);
    };
    auto const issue_dv = [&] {
        s.full[1][dout.stage].wait(dout.phase);
        pin(packed_p);
        wgmma_fence();
        gemm_rs<Element, kD, kM / 16, TileQ, Major::MN, false>(
            dv, packed_p, TileQ::template descriptor<Major::MN>(operand_address(s.rows[T::kRowStages + dout.stage])));
        wgmma_commit();
    };
    auto const issue_dprobs = [&](float(&dprobs)[kM / 2]) {
        pin(dprobs);
        wgmma_fence();
        gemm_ss<Element, kM, kD / 16, TileK, Major::K, TileQ, Major::K, false>(
            dprobs, desc_v, TileQ::template descriptor<Major::K>(operand_address(s.rows[T::kRowStages + dout.stage])));
        wgmma_commit();
    };
    // dS^T, a register operand, and dK.
    auto const issue_dk = [&](float(&dprobs)[kM / 2], uint32_t(&packed)[kM / 4]) {
        pin(dprobs);
        pin(dv);
        release(s.empty[1][dout.stage]);
        dout.advance();
#pragma unroll
        for (int i = 0; i < kM / 4; ++i) {
            float2 weight = make_float2(probs[2 * i], probs[2 * i + 1]);
            if constexpr (T::kAhead) { weight = __half22float2(*reinterpret_cast<__half2 const*>(&weights[i])); }
            packed[i] = pack<Element>(weight.x * dprobs[2 * i], weight.y * dprobs[2 * i + 1]);
        }
        pin(packed);
        wgmma_fence();
        gemm_rs<Element, kD, kM / 16, TileQ, Major::MN, false>(
            dk, packed, TileQ::template descriptor<Major::MN>(operand_address(s.rows[ring.stage])));
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
    auto const next_block = [&] {
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
    // dQ of the block before with nothing beside it: where warpgroups take turns, and where registers are short.
    auto const dq_alone = [&](int of) {
        if (!T::kDqTurns || ds.stage == warpgroup) {
            float dq[T::kDqColumns / 2];
            issue_dq(dq);
            wgmma_wait<0>();
            store_dq(dq, of, [] {});
        }
    };

    s.keys_full.wait(0);
    fetch_block();
    fetch_lse();
    if constexpr (T::kAhead) {
        ds = {1, 1};  // dQ of what was before the first block: nobody waits, nobody adds it
        dq_tile = kNoDq;
        issue_scores();
        wgmma_wait<0>();
#pragma unroll 1
        while (rows.dq_tile >= 0) {
            float dprobs[kM / 2], dq[T::kDqColumns / 2];
            int const stage = ring.stage, tile = rows.dq_tile, tile_before = dq_tile;
            probabilities();
            issue_dv();
            fill_dprobs(dprobs);
            issue_dprobs(dprobs);
            issue_dq(dq);
            wgmma_wait<1>();  // dP^T
            issue_dk(dprobs, packed_p);
            ring.advance();
            fetch_block();
            issue_scores();
            wgmma_wait<2>();  // dQ
            ds.advance();
            share_ds(packed_p);
            dq_tile = tile;
            store_dq(dq, tile_before, fetch_lse);
            wgmma_wait<1>();
            pin(dk);
            release(s.empty[0][stage]);
            wgmma_wait<0>();
        }
        if (dq_tile >= 0) { dq_alone(dq_tile); }
    } else if (rows.dq_tile >= 0) {
        {
            float dprobs[kM / 2];
            uint32_t packed[kM / 4];
            issue_scores();
            wgmma_wait<0>();
            probabilities();
            issue_dv();
            wgmma_wait<kPending>();
            named_sync(kScoreBarrier + warpgroup, 128);
            fill_dprobs(dprobs);
            issue_dprobs(dprobs);
            wgmma_wait<0>();
            issue_dk(dprobs, packed);
            if constexpr (T::kWithDq) { share_ds(packed); }
            next_block();
        }
#pragma unroll 1
        while (rows.dq_tile >= 0) {
            float dprobs[kM / 2];
            uint32_t packed[kM / 4];
            issue_scores();
            if constexpr (T::kWithDq && !T::kDqTurns) {
                float dq[T::kDqColumns / 2];
                issue_dq(dq);
                wgmma_wait<1>();  // S^T
                probabilities();
                issue_dv();
                wgmma_wait<kPending>();
                store_dq(dq, dq_tile, [&] { fill_dprobs(dprobs); });
                issue_dprobs(dprobs);
                wgmma_wait<0>();
                issue_dk(dprobs, packed);
                ds.advance();
                share_ds(packed);
            } else {
                wgmma_wait<0>();
                probabilities();
                issue_dv();
                if constexpr (T::kWithDq) {
                    dq_alone(dq_tile);
                } else {  // the barrier keeps ptxas from loading D early, in registers that it then spills others for
                    wgmma_wait<kPending>();
                    named_sync(kScoreBarrier + warpgroup, 128);
                }
                fill_dprobs(dprobs);
                issue_dprobs(dprobs);
                wgmma_wait<0>();
                issue_dk(dprobs, packed);
                ds.advance();
                if constexpr (T::kWithDq) { share_ds(packed); }
            }
            next_block();
        }
        if constexpr (T::kWithDq) { dq_alone(dq_tile); }
    }
    if constexpr (T::kWithDq) {
        named_sync(kDqEmptyBarrier + warpgroup, 128 + 32);
        if (signals) { s.dq_tile[warpgroup] = kDqEnd; }
        named_arrive(kDqFullBarrier + warpgroup, 128 + 32);
    }
    bwd_store_gradient<T, false>(p, s.item, s.head_k, 64 * warpgroup, dv);
    bwd_store_gradient<T, true>(p, s.item, s.head_k, 64 * warpgroup, dk);
}

}  // namespace flash_attn::sm90
