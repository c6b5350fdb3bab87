// Head dim 512, producer warps: A once, then the streamed tiles of the item. Four warps share the groups of chunks of each tile,
// because waiting, announcing and loading takes one of them some 250 cycles a group. Groups that both blocks of a pair read
// are loaded by one of them into both.
#pragma once

#include "bwd_load.h"
#include "pair_traits.h"

namespace flash_attn::sm90 {

template <class T>
struct PairFeed {
    using Half = typename T::Half;
    PairStorage<T>& s;
    int const rank, blocks;
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int const group = warp % T::kGroups;  // the warp's own, in every half or in one of them
    Place<T::kStages> place{0};
    uint32_t tail_phase = 0;
    int num_tiles = 0;

    __device__ __forceinline__ bool loads_half(int half) const { return T::kGroups == 4 || half == warp / T::kGroups; }
    __device__ __forceinline__ char* address() const {
        return reinterpret_cast<char*>(s.ring[place.stage]) + group * T::kGroupBytes;
    }

    __device__ __forceinline__ void stationary(CUtensorMap const& map, int row, int head) {
        constexpr int kParts = T::kBlock / T::kTile, kShared = 8 - T::kRegisterChunks;
#pragma unroll 1
        for (int i = 0; i < T::kFirstStage; ++i) {
            int const part = i % kParts, half = i / kParts;
            if (lane == 0 && loads_half(half)) {
                Barrier& full = s.full[place.stage][group];
                int const first = half * T::kChunks + group * T::kGroup;
                int const num_chunks = max(0, min(T::kGroup, T::kRegisterChunks - first));
                full.arrive_and_expect(num_chunks * Half::kChunkBytes);
                for (int c = 0; c < num_chunks; ++c) {
                    tma_load(address() + c * Half::kChunkBytes, map, (first + c) * Half::kChunk, row + part * T::kTile,
                             head, full, kEvictFirst);
                }
            }
            place.advance(1);
        }
        if (kShared > 0 && lane == 0 && warp == 0) {
            s.stationary_full.arrive_and_expect(kShared * T::Stationary::kBytes);
            for (int i = 0; i < kShared * kParts; ++i) {
                int const part = i % kParts, c = i / kParts;
                tma_load(reinterpret_cast<char*>(s.stationary[c]) + part * Half::kChunkBytes, map,
                         (T::kRegisterChunks + c) * Half::kChunk, row + part * T::kTile, head, s.stationary_full,
                         kEvictFirst);
            }
        }
    }

    // For the scores, before the tile's loads. What is overwritten was read: later tiles have been released since.
    __device__ __forceinline__ void describe(PairTile const& tile) {
        if (threadIdx.x == 0) { s.tiles[num_tiles % kPairTiles] = tile; }
        ++num_tiles;
    }

    // kTile rows of which only `valid` may be read by products, rest zeros.
    __device__ __forceinline__ void tile(CUtensorMap const& map, int row, int head, int valid) {
        half(map, 0, row, head, valid);
        half(map, 1, row, head, valid);
    }
    __device__ __forceinline__ void half(CUtensorMap const& map, int half, int row, int head, int valid) {
        if (loads_half(half)) {
            int const column = half * Half::kColumns + group * T::kGroup * Half::kChunk;
            if (valid < T::kTile) {
                short_group(map, column, row, head, valid);
            } else if (lane == 0) {
                Barrier& full = s.full[place.stage][group];
                s.empty[place.stage][group].wait(place.phase ^ 1);
                full.arrive_and_expect(T::kGroupBytes);
                if (!T::kShared || blocks == 1) {
                    load(map, column, row, head, full);
                } else if (group % 2 == rank) {
#pragma unroll
                    for (int c = 0; c < T::kGroup; ++c) {
                        tma_load_multicast(address() + c * Half::kChunkBytes, map, column + c * Half::kChunk, row, head,
                                           full, 3, kEvictLast);
                    }
                }
            }
        }
        place.advance(1);
    }
    __device__ __forceinline__ void load(CUtensorMap const& map, int column, int row, int head, Barrier& barrier) {
#pragma unroll
        for (int c = 0; c < T::kGroup; ++c) {
            tma_load(address() + c * Half::kChunkBytes, map, column + c * Half::kChunk, row, head, barrier, kEvictLast);
        }
    }
    // Every block loads it by itself.
    __device__ __forceinline__ void short_group(CUtensorMap const& map, int column, int row, int head, int valid) {
        if (lane == 0) {
            s.empty[place.stage][group].wait(place.phase ^ 1);
            s.tail[warp].arrive_and_expect(T::kGroupBytes);
            load(map, column, row, head, s.tail[warp]);
        }
        __syncwarp();
        s.tail[warp].wait(tail_phase);
        tail_phase ^= 1;
        zero_tail<SmemTile<T::kTile, T::kGroup * Half::kChunk>>(address(), valid, lane);
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) { s.full[place.stage][group].arrive(); }
    }

    // The end of the item, in place of the scores' next tile.
    __device__ __forceinline__ void finish() {
        describe({0, 0, 0, 1});
        place.advance(T::score_offset(rank));
        if (threadIdx.x == 0) {
            s.empty[place.stage][0].wait(place.phase ^ 1);
            s.full[place.stage][0].arrive();
        }
        __syncwarp();
        place.advance(2);
    }
};

// Forward and dQ: the keys that a query item sees.
template <class T>
__device__ __forceinline__ void pair_load_keys(PairArgs const& args, PairStorage<T>& s, QueryItem const& item, int head,
                                               int rank, int blocks) {
    FwdParams const& p = args.params.fwd;
    int const head_k = head / (p.num_heads / p.num_heads_k);
    PairFeed<T> feed{s, rank, blocks};
    KeyWalk walk;
    walk.template init<T::kTile>(item);
    int const num_tiles = walk.size();
    feed.stationary(args.maps.rows[T::kRoles ? rank : 0], item.row_begin, head);
    constexpr int kLead = T::kForward;  // K runs ahead of V
#pragma unroll 1
    for (int i = 0; i < num_tiles + kLead; ++i) {
        if (i < num_tiles) {
            KeyTile const t = KeyTile::at<T::kTile>(walk, i);
            feed.describe({t.key, t.region, t.masked, 0});
            // The forward masks scores of keys behind the last one, whatever they are.
            int const valid = T::kForward ? T::kTile : t.valid;
            if (!T::kDq || rank == 0) { feed.half(args.maps.keys[0][t.region], 0, t.key, head_k, valid); }
            feed.half(args.maps.keys[0][t.region], 1, t.key, head_k, valid);
        } else if (T::kForward) {
            feed.finish();
        }
        if (i >= kLead && (T::kForward || rank == 1)) {
            KeyTile const t = KeyTile::at<T::kTile>(walk, i - kLead);
            feed.tile(args.maps.keys[1][t.region], t.key, head_k, t.valid);
        }
    }
    if (!T::kForward) { feed.finish(); }
}

// dK and dV: the rows that see a key item, for every query head of the group, last rows first.
template <class T>
__device__ __forceinline__ void pair_load_rows(PairArgs const& args, PairStorage<T>& s, KeyItem const& item, int head_k,
                                               int rank, int blocks) {
    BwdParams const& p = args.params;
    PairFeed<T> feed{s, rank, blocks};
    int const lane = threadIdx.x % 32, group = p.fwd.num_heads / p.fwd.num_heads_k;
    feed.stationary(args.maps.keys[rank][item.region], item.key_begin, head_k);
#pragma unroll 1
    for (int head = head_k * group; head < (head_k + 1) * group; ++head) {
        // 32 blocks of rows at a time, one a lane: two ballots say which are visited and which need the mask.
#pragma unroll 1
        for (int last = (item.row_end + kBlockRows - 1) / kBlockRows - 1; last >= item.row_begin / kBlockRows;
             last -= 32) {
            int const block = last - lane;
            bool visited = false, masked = false;
            if (block >= item.row_begin / kBlockRows) {
                KeySpan const* const spans = &p.fwd.plan.block_span[block].context;
                int4 const x = __ldg(reinterpret_cast<int4 const*>(spans + (item.region ? 0 : 1)));
                visited = x.x < item.key_begin + item.num_keys && item.key_begin < x.w;
                masked = x.y > item.key_begin || x.z < item.key_begin + T::kBlock ||
                         block * kBlockRows < item.row_begin || (block + 1) * kBlockRows > item.row_end;
            }
            uint32_t todo = __ballot_sync(0xffffffff, visited);
            uint32_t const mask = __ballot_sync(0xffffffff, masked);
#pragma unroll 1
            for (; todo != 0; todo &= todo - 1) {
                int const i = __ffs(todo) - 1, first = (last - i) * kBlockRows;
#pragma unroll 1
                for (int row = first + kBlockRows - T::kTile; row >= first; row -= T::kTile) {
                    int const valid = min(T::kTile, item.row_end - row);
                    if (valid <= 0) { continue; }
                    feed.describe({row, head, int(mask >> i & 1), 0});
                    feed.tile(args.maps.rows[0], row, head, valid);
                    feed.tile(args.maps.rows[1], row, head, valid);
                }
            }
        }
    }
    feed.finish();
}

}  // namespace flash_attn::sm90
