// Backward for head dims over 128, consumer warpgroups of two CTAs (bwd_wide_load.h), for 64 keys a CTA and all query rows
// that see the item. One accumulator of 64 x head_dim is all that a warpgroup can hold, so they take roles instead of halves:
//   warpgroup 1:  S^T = K Q^T, P^T = exp2(S^T - lse), dV += P^T dO          P^T goes to warpgroup 2
//   warpgroup 2:  dP^T = V dO^T, dS^T = P^T (dP^T - D), dK += dS^T Q        dS^T goes to warpgroup 3, in both CTAs
//   warpgroup 3:  half of the columns of dQ = dS K, over the keys of both CTAs, added to the accumulator from registers
// S of the next block is issued behind dV of this one, dP of the next behind dK.
#pragma once

#include "bwd_fragments.h"
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
    // A product of 256 columns does not fit the registers that a thread of 512 starts with, and ptxas insists.
    static constexpr int kN = kD == 192 ? 192 : 128;
    static constexpr bool kSameRing = T::kQStages == T::kDoutStages;  // registers are scarce

    BwdArgs const& args;
    BwdWideStorage<T>& s;
    int const rank = cluster_rank();
    Ring<T::kQStages> q = {};        // the block's stage of Q
    Ring<T::kDoutStages> dout = {};  // and of dO
    Ring<T::kBuffers> turn = {};     // the block's P^T and dS^T
    StageRows rows = {};

    __device__ __forceinline__ WideRole(BwdArgs const& args_, BwdWideStorage<T>& s_) : args(args_), s(s_) {}

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ bool signals() { return threadIdx.x % 128 == 0; }

    __device__ __forceinline__ void fetch_block() {
        s.full[q.stage].wait(q.phase);
        rows = s.stage_rows[q.stage];
    }
    // Behind the last block too, of whatever lies in the stage: without a branch around products.
    __device__ __forceinline__ void next_block() {
        turn.advance();
        q.advance();
        dout.advance();
        fetch_block();
    }
    __device__ __forceinline__ bool at_block() const { return rows.dq_tile >= 0; }
    // Of the block, Q (operand 0) or dO (1), among all stages.
    template <int kOperand>
    __device__ __forceinline__ int stage() const {
        return kOperand == 0 ? q.stage : T::kQStages + (kSameRing ? q.stage : dout.stage);
    }
    __device__ __forceinline__ void wait_for_dout() { s.full[stage<1>()].wait(kSameRing ? q.phase : dout.phase); }
    __device__ __forceinline__ void release(int stage) {
        if (signals()) { arrive_at_both(s.empty[stage]); }
    }
    // keys x rows scores of the block, S^T (operand 0) or dP^T (operand 1), on top of `scores`.
    template <int kOperand, bool kZero>
    __device__ __forceinline__ void issue_scores(float (&scores)[kM / 2]) {
        // Hidden from the compiler, or it keeps the descriptors of all steps over the loop and runs out of uniform registers.
        uint32_t keys = operand_address(s.keys[kOperand]);
        asm volatile("" : "+r"(keys));
        pin(scores);
        wgmma_fence();
        gemm_ss<Element, kM, kD / 16, TileK, Major::K, TileQ, Major::K, kZero>(
            scores, TileK::template descriptor<Major::K>(keys),
            TileQ::template descriptor<Major::K>(operand_address(s.rows[stage<kOperand>()])));
        wgmma_commit();
    }
    // acc += packed (keys x rows) times the stage's rows.
    template <int kOperand>
    __device__ __forceinline__ void issue_gradient(float (&acc)[kD / 2], uint32_t (&packed)[kM / 4]) {
        pin(packed);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kD / kN; ++i) {
            gemm_rs<Element, kN, kM / 16, TileQ, Major::MN, false>(
                reinterpret_cast<float(&)[kN / 2]>(acc[i * kN / 2]), packed,
                TileQ::template descriptor<Major::MN>(operand_address(s.rows[stage<kOperand>()]) +
                                                      i * kN / TileQ::kChunk * TileQ::kChunkBytes));
        }
        wgmma_commit();
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
            if constexpr (!T::kSoftcap) { fill_columns(probs, s.scalars[stage<0>()], -1.f / scale_log2); }
            issue_scores<0, T::kSoftcap>(probs);
        };
        s.keys_full.wait(0);
        fetch_block();
        if (at_block()) {
            issue();
            wgmma_wait<0>();
            pin(probs);
            release(stage<0>());
#pragma unroll 1
            while (at_block()) {
                if constexpr (T::kSoftcap) {
#pragma unroll
                    for (float& x : probs) { x = tanh_approx(x * tanh_scale); }
                }
                if (rows.masked()) {
                    mask_rows(probs, p, s.item, rows.block(), T::kKeys * rank + threadIdx.x % 128 / 32 * 16 + lane() / 4);
                }
#pragma unroll
                for (int j = 0; j < kM / 8; ++j) {
                    float2 lse = make_float2(0.f, 0.f);
                    if constexpr (T::kSoftcap) {
                        lse = column_pair(s.scalars[stage<0>()], j);
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
                wait_for_dout();
                issue_gradient<1>(dv, packed);
                int const read = stage<1>();
                // Before the wait for the next block, whose stage is free only when dK of an earlier one is done, by a warpgroup
                // that waits for this.
                s.ds_empty[turn.stage].wait(turn.phase ^ 1);
                if constexpr (T::kSoftcap) {
                    store_packed<TileS>(smem_address(s.ds[turn.stage]), sent, 0);
                } else {
                    store_packed<TileS>(smem_address(s.ds[turn.stage]), packed, 0);
                }
                __syncwarp();
                if (lane() == 0) { s.probs_full[turn.stage].arrive(); }
                next_block();
                issue();
                wgmma_wait<1>();
                pin(dv);
                release(read);
                wgmma_wait<0>();
                pin(probs);
                if (at_block()) { release(stage<0>()); }
            }
        }
        bwd_store_gradients<T, false>(p, s.item, s.head_k, T::kKeys * rank, dv);
    }

    // dS^T of this warp's 16 keys: ready for this CTA's dQ, and on its way to the other CTA, whose buffer is free: P^T came
    // when ds_empty had completed.
    __device__ __forceinline__ void hand_over_ds() {
        constexpr int kWarpBytes = TileS::kBytes / 4;
        fence_async_proxy();
        __syncwarp();
        if (lane() == 0) {
            int const warp = threadIdx.x % 128 / 32;
            Barrier& full = s.other_ds_full[turn.stage];
            if (warp == 0) {
                s.dq_tile[turn.stage] = rows.dq_tile;
                full.arrive_and_expect(TileS::kBytes);
            }
            s.ds_full[turn.stage].arrive();
            char* const from = reinterpret_cast<char*>(s.ds[turn.stage]) + warp * kWarpBytes;
            copy_to_peer(peer_address(smem_address(s.other_ds[turn.stage]) + warp * kWarpBytes, rank ^ 1), from,
                         kWarpBytes, peer_address(smem_address(&full), rank ^ 1));
        }
        __syncwarp();
    }

    __device__ __forceinline__ void scores() {
        float dk[kD / 2], dprobs[kM / 2];
        uint32_t packed[kM / 4];
#pragma unroll
        for (float& x : dk) { x = 0.f; }
        pin(dk);
        auto const issue = [&] {
            if (at_block()) { wait_for_dout(); }
            fill_columns(dprobs, s.scalars[stage<1>()], -1.f);
            issue_scores<1, false>(dprobs);
        };
        s.keys_full.wait(0);
        fetch_block();
        if (at_block()) {
            issue();
            wgmma_wait<0>();
            pin(dprobs);
            release(stage<1>());
#pragma unroll 1
            while (at_block()) {
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
                    hand_over_ds();
                }
                issue_gradient<0>(dk, packed);
                if constexpr (!T::kWithDq) {  // behind an instruction that uses what was loaded, or the next P may overtake it
                    __syncwarp();
                    if (lane() == 0) { s.ds_empty[turn.stage].arrive(); }
                }
                int const read = stage<0>();
                next_block();
                issue();
                wgmma_wait<1>();
                pin(dk);
                release(read);
                wgmma_wait<0>();
                pin(dprobs);
                if (at_block()) { release(stage<1>()); }
            }
        }
        if constexpr (T::kWithDq) {  // no more blocks
            s.ds_empty[turn.stage].wait(turn.phase ^ 1);
            if (signals()) { s.dq_tile[turn.stage] = -1; }
            __syncwarp();
            if (lane() == 0) { s.ds_full[turn.stage].arrive(); }
        }
        bwd_store_gradients<T, true>(args.params, s.item, s.head_k, T::kKeys * rank, dk);
    }

    // Its own half of the keys first: the other CTA's dS^T comes later.
    __device__ __forceinline__ void query_gradients() {
        s.keys_full.wait(0);
        bool turns = rank == 0;  // of 3 chunks, the middle one goes to the CTAs in turn
#pragma unroll 1
        while (true) {
            s.ds_full[turn.stage].wait(turn.phase);
            int const tile = s.dq_tile[turn.stage];
            if (tile < 0) { break; }
            bool const both = T::kChunks == 4 || turns;
            int const first = both || rank == 0 ? 0 : 1, end = both || rank == 1 ? 2 : 1;
#pragma unroll 1
            for (int i = first; i < end; ++i) {
                float dq[T::kDqColumns / 2];
                uint32_t const own = operand_address(s.keys[0]) + (T::first_chunk(rank) + i) * Chunk::kBytes,
                               other = operand_address(s.other_keys) + i * Chunk::kBytes;
                wgmma_fence();
                gemm_ss<Element, T::kDqColumns, T::kKeys / 16, TileS, Major::MN, Chunk, Major::MN, true>(
                    dq, TileS::template descriptor<Major::MN>(operand_address(s.ds[turn.stage])),
                    Chunk::template descriptor<Major::MN>(own));
                wgmma_commit();
                s.other_ds_full[turn.stage].wait(turn.phase);
                pin(dq);
                wgmma_fence();
                gemm_ss<Element, T::kDqColumns, T::kKeys / 16, TileS, Major::MN, Chunk, Major::MN, false>(
                    dq, TileS::template descriptor<Major::MN>(operand_address(s.other_ds[turn.stage])),
                    Chunk::template descriptor<Major::MN>(other));
                wgmma_commit();
                wgmma_wait<0>();
                pin(dq);
                if (i == end - 1 && signals()) { arrive_at_both(s.ds_empty[turn.stage]); }
                reduce_add(args.params.dq_accum + int64_t(tile) * kBlockRows * kD +
                               (T::first_chunk(rank) + i) * T::kDqFloats,
                           dq);
            }
            turns = !turns;
            turn.advance();
        }
    }
};

}  // namespace flash_attn::sm90
