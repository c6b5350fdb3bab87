// Backward for head dims over 128, consumer warpgroups of two CTAs (bwd_wide_load.h), for 64 keys a CTA and all query rows
// that see the item. One accumulator of 64 x head_dim is all that a warpgroup can hold, so they take roles instead of halves:
//   warpgroup 0:  S^T = K Q^T, P^T = exp2(S^T - lse), dV += P^T dO          P^T goes to warpgroup 1
//   warpgroup 1:  dP^T = V dO^T, dS^T = P^T (dP^T - D), dK += dS^T Q        dS^T goes to both, in both CTAs
//   both:         64 columns of dQ = dS K, over the keys of both CTAs, added to the accumulator from registers
// S of the next block is issued behind dV of this one, dP of the next behind dK, dQ comes kLag blocks late.
#pragma once

#include "bwd_wide_load.h"

namespace flash_attn::sm90 {

// A warpgroup's dQ columns added in the order of its registers.
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

// What store_packed has written, to the same registers.
template <class Tile>
__device__ __forceinline__ void load_packed(uint32_t tile, uint32_t (&x)[16]) {
    int const lane = threadIdx.x % 32;
    int const row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    uint32_t const first = tile + row * Tile::kRowBytes + ((lane / 16 ^ row % 8) << 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[4 * j]), "=r"(x[4 * j + 1]), "=r"(x[4 * j + 2]), "=r"(x[4 * j + 3])
                     : "r"(first ^ (j << 5))
                     : "memory");
    }
}

// The two scalars of each of the thread's column pairs, from a stage's row scalars: lse and D enter as initial values of the
// accumulators of S^T and dP^T, P = exp2(scale (S - lse / scale)), dS = P (dP - D), without a load behind the products.
template <int N>
__device__ __forceinline__ void fill_scaled(float (&x)[N], float const* scalars, float factor) {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        float2 const pair = *reinterpret_cast<float2 const*>(scalars + 8 * j + 2 * (threadIdx.x % 4));
        x[4 * j] = x[4 * j + 2] = pair.x * factor;
        x[4 * j + 1] = x[4 * j + 3] = pair.y * factor;
    }
}

template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t x) {
    if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {
        return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
    } else {
        return __half22float2(*reinterpret_cast<__half2 const*>(&x));
    }
}

template <class T>
struct WideRole {
    using Element = typename T::Element;
    using TileK = typename T::TileK;
    using TileQ = typename T::TileQ;
    using TileS = typename T::TileS;
    using Chunk = typename T::Chunk;
    static constexpr int kD = T::kHeadDim, kM = kBlockRows;

    BwdArgs const& args;
    BwdWideStorage<T>& s;
    int const rank = cluster_rank(), lane = threadIdx.x % 32;
    bool const signals = threadIdx.x % 128 == 0;
    Ring<T::kStages> ring = {};  // the block's stage
    Ring<T::kLag> turn = {};     // the block's P^T and dS^T, before it those of the block whose dQ is due
    StageRows rows = {};
    int dq_tiles[T::kLag];  // of the blocks before, latest first; -1: none

    __device__ __forceinline__ WideRole(BwdArgs const& args_, BwdWideStorage<T>& s_) : args(args_), s(s_) {
#pragma unroll
        for (int& tile : dq_tiles) { tile = -1; }
    }

    __device__ __forceinline__ void fetch_block() {
        s.full[0][ring.stage].wait(ring.phase);
        rows = s.stage_rows[ring.stage];
    }
    // Behind the last block too, of whatever lies in the stage: without a branch around products.
    __device__ __forceinline__ void next_block() {
        next_turn();
        ring.advance();
        fetch_block();
    }
    __device__ __forceinline__ void next_turn() {
#pragma unroll
        for (int i = T::kLag - 1; i > 0; --i) { dq_tiles[i] = dq_tiles[i - 1]; }
        dq_tiles[0] = rows.dq_tile;
        turn.advance();
    }
    __device__ __forceinline__ int due_tile() const { return dq_tiles[T::kLag - 1]; }
    __device__ __forceinline__ bool at_block() const { return rows.dq_tile >= 0; }
    __device__ __forceinline__ void release(int operand, int stage) {
        if (signals) { arrive_at_both(s.empty[operand][stage]); }
    }
    // keys x rows scores of the stage, S^T (operand 0) or dP^T (operand 1), on top of `scores`.
    template <int kOperand, bool kZero>
    __device__ __forceinline__ void issue_scores(float (&scores)[kM / 2]) {
        // Hidden from the compiler, or it keeps the descriptors of all steps over the loop and runs out of uniform registers.
        uint32_t keys = operand_address(s.keys[kOperand]);
        asm volatile("" : "+r"(keys));
        pin(scores);
        wgmma_fence();
        gemm_ss<Element, kM, kD / 16, TileK, Major::K, TileQ, Major::K, kZero>(
            scores, TileK::template descriptor<Major::K>(keys),
            TileQ::template descriptor<Major::K>(operand_address(s.rows[kOperand][ring.stage])));
        wgmma_commit();
    }
    // acc += packed (keys x rows) times the stage's rows.
    template <int kOperand>
    __device__ __forceinline__ void issue_gradient(float (&acc)[kD / 2], uint32_t (&packed)[kM / 4]) {
        pin(packed);
        wgmma_fence();
        gemm_rs<Element, kD, kM / 16, TileQ, Major::MN, false>(
            acc, packed, TileQ::template descriptor<Major::MN>(operand_address(s.rows[kOperand][ring.stage])));
        wgmma_commit();
    }
    // The 64-column chunk of dQ that is this warpgroup's, and whether it is in the block that is due.
    template <int kWarpgroup>
    __device__ __forceinline__ int dq_chunk() const {
        return kWarpgroup == 0 ? 2 * rank : T::kChunks == 4 ? 2 * rank + 1 : 1;
    }
    template <int kWarpgroup>
    __device__ __forceinline__ bool has_dq() const {
        return kWarpgroup == 0 || T::kChunks == 4 || turn.stage == rank;
    }
    template <int kWarpgroup>
    __device__ __forceinline__ void issue_dq(float (&dq)[T::kDqColumns / 2]) {
        int const chunk = dq_chunk<kWarpgroup>();
        s.ds_full[turn.stage].wait(turn.phase ^ 1);
        s.other_ds_full[turn.stage].wait(turn.phase ^ 1);
        wgmma_fence();
        gemm_ss<Element, T::kDqColumns, T::kKeys / 16, TileS, Major::MN, Chunk, Major::MN, true>(
            dq, TileS::template descriptor<Major::MN>(operand_address(s.ds[turn.stage])),
            Chunk::template descriptor<Major::MN>(operand_address(s.keys[0]) + chunk * Chunk::kBytes));
        gemm_ss<Element, T::kDqColumns, T::kKeys / 16, TileS, Major::MN, Chunk, Major::MN, false>(
            dq, TileS::template descriptor<Major::MN>(operand_address(s.other_ds[turn.stage])),
            Chunk::template descriptor<Major::MN>(operand_address(s.other_keys) +
                                                  (chunk - T::first_chunk(rank)) * Chunk::kBytes));
        wgmma_commit();
    }
    __device__ __forceinline__ void release_ds() {
        if (signals) { arrive_at_both(s.ds_empty[turn.stage]); }
    }
    // To the other CTA, whose buffer is free: P^T came when ds_empty had completed.
    __device__ __forceinline__ void send_ds() {
        if (signals) {
            Barrier& full = s.other_ds_full[turn.stage];
            s.ds_full[turn.stage].wait(turn.phase);
            full.arrive_and_expect(TileS::kBytes);
            copy_to_peer(peer_address(smem_address(s.other_ds[turn.stage]), rank ^ 1), s.ds[turn.stage], TileS::kBytes,
                         peer_address(smem_address(&full), rank ^ 1));
        }
        __syncwarp();
    }
    template <int kWarpgroup>
    __device__ __forceinline__ void add_dq(float const (&dq)[T::kDqColumns / 2], int tile) {
        reduce_add(args.params.dq_accum + int64_t(tile) * kBlockRows * kD + dq_chunk<kWarpgroup>() * T::kDqFloats, dq);
    }
    // dQ of the block that is due, start to end.
    template <int kWarpgroup>
    __device__ __forceinline__ void whole_dq() {
        if constexpr (T::kWithDq) {
            if (has_dq<kWarpgroup>()) {
                float dq[T::kDqColumns / 2];
                issue_dq<kWarpgroup>(dq);
                wgmma_wait<0>();
                pin(dq);
                release_ds();
                add_dq<kWarpgroup>(dq, due_tile());
            } else {
                release_ds();
            }
        }
    }
    // Behind the last block.
    template <int kWarpgroup>
    __device__ __forceinline__ void last_dq() {
#pragma unroll 1
        for (int i = 0; i < T::kLag; ++i) {
            if (due_tile() >= 0) { whole_dq<kWarpgroup>(); }
            next_turn();
        }
    }

    __device__ __forceinline__ void probabilities() {
        BwdParams const& p = args.params;
        float const scale_log2 = (T::kSoftcap ? p.fwd.softcap : p.fwd.softmax_scale) * kLog2e;
        float const tanh_scale = T::kSoftcap ? p.fwd.softmax_scale / p.fwd.softcap : 0.f;
        float dv[kD / 2], probs[kM / 2];
        uint32_t packed[kM / 4], sent[T::kSoftcap ? kM / 4 : 1];
#pragma unroll
        for (float& x : dv) { x = 0.f; }
        pin(dv);
        auto const issue = [&] {
            if constexpr (!T::kSoftcap) { fill_scaled(probs, s.scalars[0][ring.stage], -1.f / scale_log2); }
            issue_scores<0, T::kSoftcap>(probs);
        };
        // S^T to P^T; starts dV.
        auto const softmax = [&] {
            if constexpr (T::kSoftcap) {
#pragma unroll
                for (float& x : probs) { x = tanh_approx(x * tanh_scale); }
            }
            if (rows.masked()) {
                mask_rows(probs, p, s.item, rows.block(), T::kKeys * rank + threadIdx.x % 128 / 32 * 16 + lane / 4);
            }
#pragma unroll
            for (int j = 0; j < kM / 8; ++j) {
                float2 lse = make_float2(0.f, 0.f);
                if constexpr (T::kSoftcap) {
                    lse = *reinterpret_cast<float2 const*>(&s.scalars[0][ring.stage][8 * j + 2 * (lane % 4)]);
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float const x = probs[4 * j + 2 * half], y = probs[4 * j + 2 * half + 1];
                    float const px = exp2_approx(x * scale_log2 - lse.x), py = exp2_approx(y * scale_log2 - lse.y);
                    packed[2 * j + half] = pack<Element>(px, py);
                    if constexpr (T::kSoftcap) {  // dS takes tanh's derivative along
                        sent[2 * j + half] =
                            pack<Element>(px * fmaxf(1.f - x * x, 0.f), py * fmaxf(1.f - y * y, 0.f));
                    }
                }
            }
            s.full[1][ring.stage].wait(ring.phase);
            issue_gradient<1>(dv, packed);
        };
        // S^T of the next block; P^T of this one to the other warpgroup.
        auto const advance = [&] {
            int const stage = ring.stage;
            Ring<T::kLag> const to = turn;
            next_block();
            issue();
            s.ds_empty[to.stage].wait(to.phase ^ 1);
            if constexpr (T::kSoftcap) {
                store_packed<TileS>(smem_address(s.ds[to.stage]), sent, 0);
            } else {
                store_packed<TileS>(smem_address(s.ds[to.stage]), packed, 0);
            }
            __syncwarp();
            if (lane == 0) { s.probs_full[to.stage].arrive(); }
            wgmma_wait<0>();
            pin(dv);
            pin(probs);
            release(1, stage);
            if (at_block()) { release(0, ring.stage); }
        };

        s.keys_full.wait(0);
        fetch_block();
        if (at_block()) {
            issue();
            wgmma_wait<0>();
            pin(probs);
            release(0, ring.stage);
#pragma unroll 1
            for (int i = 0; i < T::kLag && at_block(); ++i) {
                softmax();
                advance();
            }
#pragma unroll 1
            while (at_block()) {
                if constexpr (T::kWithDq && !T::kSoftcap) {
                    float dq[T::kDqColumns / 2];
                    issue_dq<0>(dq);
                    softmax();
                    wgmma_wait<1>();
                    pin(dq);
                    release_ds();
                    add_dq<0>(dq, due_tile());
                } else {
                    whole_dq<0>();  // softcap has no registers for it beside its exponentials
                    softmax();
                }
                advance();
            }
            last_dq<0>();
        }
        bwd_store_gradient<T, false>(p, s.item, s.head_k, T::kKeys * rank, dv);
    }

    __device__ __forceinline__ void scores() {
        float dk[kD / 2], dprobs[kM / 2];
        uint32_t packed[kM / 4];
#pragma unroll
        for (float& x : dk) { x = 0.f; }
        pin(dk);
        auto const issue = [&] {
            if (at_block()) { s.full[1][ring.stage].wait(ring.phase); }
            fill_scaled(dprobs, s.scalars[1][ring.stage], -1.f);
            issue_scores<1, false>(dprobs);
        };
        s.keys_full.wait(0);
        fetch_block();
        if (at_block()) {
            issue();
            wgmma_wait<0>();
            pin(dprobs);
            release(1, ring.stage);
#pragma unroll 1
            while (at_block()) {
                if (due_tile() >= 0) { whole_dq<1>(); }
                uint32_t const ds = smem_address(s.ds[turn.stage]);
                s.probs_full[turn.stage].wait(turn.phase);
                load_packed<TileS>(ds, packed);
#pragma unroll
                for (int i = 0; i < kM / 4; ++i) {
                    float2 const probs = unpack<Element>(packed[i]);
                    packed[i] = pack<Element>(probs.x * dprobs[2 * i], probs.y * dprobs[2 * i + 1]);
                }
                if constexpr (T::kWithDq) {
                    store_packed<TileS>(ds, packed, 0);
                    fence_async_proxy();
                }
                __syncwarp();
                if (lane == 0) { (T::kWithDq ? s.ds_full : s.ds_empty)[turn.stage].arrive(); }
                if constexpr (T::kWithDq) { send_ds(); }
                issue_gradient<0>(dk, packed);
                int const stage = ring.stage;
                next_block();
                issue();
                wgmma_wait<0>();
                pin(dk);
                pin(dprobs);
                release(0, stage);
                if (at_block()) { release(1, ring.stage); }
            }
            last_dq<1>();
        }
        bwd_store_gradient<T, true>(args.params, s.item, s.head_k, T::kKeys * rank, dk);
    }
};

}  // namespace flash_attn::sm90
