// Backward for head dims over 128, the producer warpgroup. dK and dV of 64 keys are all that a CTA can hold, so that Q, dO
// and dQ would cross L2 twice as often per product as with 128 keys. Two CTAs (a cluster) share an item instead, 64 keys
// each: half of each row block is loaded by either and multicast to both, and they exchange dS, so that either adds
// some 64-column chunks of dQ over all 128 keys. Warp 0 loads K, Q and lse, warp 1 V, dO and D.
#pragma once

#include "bwd_load.h"

namespace flash_attn::sm90 {

template <class Element_, int kHeadDim_, bool kSoftcap_, bool kWithDq_>
struct BwdWideTraits {
    using Element = Element_;
    static constexpr Tiles kTile = tiles(kHeadDim_);
    static constexpr int kHeadDim = kHeadDim_, kBlockN = kTile.bwd_block_n, kKeys = 64;
    static constexpr bool kSoftcap = kSoftcap_, kWithDq = kWithDq_;
    static constexpr int kThreads = 4 * 128;
    // Of 4 x 128 at launch. kAccRegisters: dV or dK, 32 of S or dP, 16 packed, 32 for the rest.
    static constexpr int kLoadRegisters = 32, kDqRegisters = kHeadDim == 192 ? 112 : 64,
                         kAccRegisters = kHeadDim == 192 ? 184 : 208;
    static_assert(kLoadRegisters + kDqRegisters + 2 * kAccRegisters <= 4 * 128);
    static_assert(kBlockN == 2 * kKeys);
    using TileK = SmemTile<kKeys, kHeadDim>;
    using TileQ = SmemTile<kBlockRows, kHeadDim>;
    using HalfQ = SmemTile<kBlockRows / 2, kHeadDim>;  // what a CTA loads of a row block for both
    using TileS = SmemTile<kKeys, kBlockRows>;         // P^T, then dS^T: keys x rows
    using Chunk = SmemTile<kKeys, 64>;                 // of K, for dQ
    // Chunks of dQ's columns. Of 4, each CTA adds two in every block; of 3, one, and the middle one in every other block.
    static constexpr int kChunks = kHeadDim / 64;
    // Stages of Q and of dO. Q comes first (S of the next block) and is needed longest (dK). Buffers of P^T and dS^T: how
    // far S and dQ may be apart. d = 256 has no room for more: 64 KB of K and V, 16 of the other CTA's K, 16 for dS.
    static constexpr int kQStages = kHeadDim == 192 ? 3 : 2, kDoutStages = 2, kAllStages = kQStages + kDoutStages;
    static constexpr int kBuffers = kHeadDim == 192 ? 2 : 1;
    static constexpr int kDqColumns = 64, kDqFloats = kBlockRows * kDqColumns;
    static_assert(kChunks == 3 || kChunks == 4);
    static __device__ __forceinline__ int first_chunk(int rank) { return rank * (kChunks - 2); }
};

template <class T>
struct BwdWideStorage {
    alignas(1024) typename T::Element keys[2][T::TileK::kElements];
    alignas(1024) typename T::Element other_keys[2][T::Chunk::kElements];  // K of the other CTA, this one's dQ columns
    alignas(1024) typename T::Element rows[T::kAllStages][T::TileQ::kElements];  // of Q, then of dO; so all that follows
    alignas(1024) typename T::Element ds[T::kBuffers][T::TileS::kElements];
    alignas(1024) typename T::Element other_ds[T::kBuffers][T::TileS::kElements];
    alignas(16) float scalars[T::kAllStages][kBlockRows];
    Barrier keys_full, tail[2];
    Barrier full[T::kAllStages], empty[T::kAllStages];
    Barrier probs_full[T::kBuffers];     // P^T is in ds
    Barrier ds_full[T::kBuffers];        // dS^T is
    Barrier other_ds_full[T::kBuffers];  // the other CTA's dS^T has arrived
    Barrier ds_empty[T::kBuffers];       // both CTAs have read both
    StageRows stage_rows[T::kQStages];
    int dq_tile[T::kBuffers];  // of the block whose dS^T is there; -1: no more blocks
    KeyItem item;
    int head_k;

    __device__ void init() {
        keys_full.init(T::kWithDq ? 4 : 2);  // tiles
        for (int i = 0; i < 2; ++i) { tail[i].init(1); }
        for (int i = 0; i < T::kAllStages; ++i) {
            full[i].init(1);
            empty[i].init(4);  // two warpgroups of two CTAs
        }
        for (int i = 0; i < T::kBuffers; ++i) {
            probs_full[i].init(4);  // warps
            ds_full[i].init(4);
            other_ds_full[i].init(1);
            ds_empty[i].init(T::kWithDq ? 2 : 4);  // the dQ warpgroups of two CTAs; without dQ, the warps that read P^T
        }
    }
};

// All 64 rows of a block by this CTA alone.
template <class T>
__device__ __forceinline__ void load_rows(void* dst, CUtensorMap const& map, int row, int head, Barrier& bar) {
#pragma unroll
    for (int i = 0; i < 2 * T::kChunks; ++i) {
        tma_load(static_cast<char*>(dst) + i / 2 * T::TileQ::kChunkBytes + i % 2 * T::HalfQ::kChunkBytes, map,
                 i / 2 * 64, row + i % 2 * kBlockRows / 2, head, bar, kEvictFirst);
    }
}

// A tile of which only `valid` rows may be read by the products; returns when it is there and the rest is zero.
template <class Tile, class Load>
__device__ __forceinline__ void load_and_zero(void* dst, int valid, Barrier& tail, uint32_t& tail_phase, int lane,
                                              Load const& load) {
    if (lane == 0) {
        tail.arrive_and_expect(Tile::kBytes);
        load(tail);
    }
    tail.wait(tail_phase);
    tail_phase ^= 1;
    zero_tail<Tile>(dst, max(valid, 0), lane);
    fence_async_proxy();
    __syncwarp();
}

// One arrival on `full`.
template <class Tile, class Load>
__device__ __forceinline__ void load_wide_keys(void* dst, int valid, Barrier& full, Barrier& tail, uint32_t& tail_phase,
                                               int lane, Load const& load) {
    if (valid < Tile::kRows) { load_and_zero<Tile>(dst, valid, tail, tail_phase, lane, load); }
    if (lane == 0) {
        if (valid < Tile::kRows) {
            full.arrive();
        } else {
            full.arrive_and_expect(Tile::kBytes);
            load(full);
        }
    }
}

template <class T, int kOperand>
__device__ __forceinline__ void bwd_wide_load(BwdArgs const& args, BwdWideStorage<T>& s) {
    using TileK = typename T::TileK;
    using TileQ = typename T::TileQ;
    using Chunk = typename T::Chunk;
    int const lane = threadIdx.x % 32, rank = cluster_rank();
    BwdParams const& p = args.params;
    KeyItem const& item = s.item;
    CUtensorMap const& map_rows = args.maps.rows[kOperand];
    uint32_t tail_phase = 0;
    {
        CUtensorMap const& map = args.maps.keys[kOperand][item.region];
        int const valid = num_seen_keys(item, p.fwd.plan.row_span);
        load_wide_keys<TileK>(s.keys[kOperand], valid - T::kKeys * rank, s.keys_full, s.tail[kOperand], tail_phase, lane,
                              [&](Barrier& bar) {
                                  load_tile<TileK>(s.keys[kOperand], map, item.key_begin + T::kKeys * rank, s.head_k,
                                                   bar, kEvictFirst);
                              });
        if constexpr (kOperand == 0 && T::kWithDq) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                load_wide_keys<Chunk>(s.other_keys[i], valid - T::kKeys * (1 - rank), s.keys_full, s.tail[0],
                                      tail_phase, lane, [&](Barrier& bar) {
                                          tma_load(s.other_keys[i], map, 64 * (T::first_chunk(rank) + i),
                                                   item.key_begin + T::kKeys * (1 - rank), s.head_k, bar, kEvictFirst);
                                      });
            }
        }
    }

    constexpr int kFirst = kOperand ? T::kQStages : 0;
    Ring<(kOperand ? T::kDoutStages : T::kQStages)> ring;
    int const group = p.fwd.num_heads / p.fwd.num_heads_k;
#pragma unroll 1
    for (int head = s.head_k * group; head < (s.head_k + 1) * group; ++head) {
        auto const visit = [&](int block, bool masked) {
            int const row = block * kBlockRows;
            Barrier& full = s.full[kFirst + ring.stage];
            char* const dst = reinterpret_cast<char*>(s.rows[kFirst + ring.stage]);
            s.empty[kFirst + ring.stage].wait(ring.phase ^ 1);
            bool const whole = row + kBlockRows <= item.row_end;
            if (lane == 0) {
                if constexpr (kOperand == 0) {
                    s.stage_rows[ring.stage] = {
                        (head - p.head_k_begin * group) * int(p.rows_padded / kBlockRows) + block, 2 * block + masked};
                }
                if (whole) { full.arrive_and_expect(kBlockRows * 4 + TileQ::kBytes); }
                bulk_load(s.scalars[kFirst + ring.stage],
                          (kOperand == 0 ? p.lse_log2 : p.dout_dot_out) + head * p.rows_padded + row, kBlockRows * 4,
                          full);
                if (whole) {
#pragma unroll
                    for (int c = 0; c < T::kChunks; ++c) {
                        tma_load_multicast(dst + c * TileQ::kChunkBytes + rank * T::HalfQ::kChunkBytes, map_rows, 64 * c,
                                           row + kBlockRows / 2 * rank, head, full, 3, kEvictFirst);
                    }
                }
            }
            if (!whole) {  // rows behind the item's last one may be padding
                load_and_zero<TileQ>(dst, item.row_end - row, s.tail[kOperand], tail_phase, lane,
                                     [&](Barrier& bar) { load_rows<T>(dst, map_rows, row, head, bar); });
                if (lane == 0) { full.arrive_and_expect(kBlockRows * 4); }
            }
            ring.advance();
        };
        for_row_blocks<kBlockRows, T::kKeys>(p.fwd.plan, item, T::kKeys * rank, item.row_begin, item.key_begin,
                                             item.key_begin + item.num_keys, visit);
    }
    if (kOperand == 0) {
        s.empty[ring.stage].wait(ring.phase ^ 1);
        if (lane == 0) {
            s.stage_rows[ring.stage].dq_tile = -1;
            s.full[ring.stage].arrive();
        }
    }
}

__device__ __forceinline__ void arrive_at_both(Barrier& barrier) {
    arrive_at(barrier, 0);
    arrive_at(barrier, 1);
}

}  // namespace flash_attn::sm90
