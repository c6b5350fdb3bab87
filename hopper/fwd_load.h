// Forward and dQ pass, producer warps. One takes items from the counter, reads their key spans and loads Q (and dO), an item ahead
// where there is room; the other feeds the K, V stages. Only this file knows which key tiles an item visits; with each stage goes
// {region, first key, masked}.
#pragma once

#include "scheduler.h"
#include "traits.h"

namespace flash_attn::sm90 {

struct StageKeys {
    int key;     // first key of the stage, a row of its region's tensor
    int region;  // 0 decoded, 1 context
    int masked;  // some row of the item does not see some key of the stage
    int reserved;  // 16 bytes: read at once
};

struct ItemRows {
    int row_begin, num_rows;  // num_rows 0: no more items
    int head, head_k;
    int num_tiles;
    bool skip_first, skip_last;  // of the tiles: no row of the warpgroup sees it
};

struct FwdMaps {
    CUtensorMap q, k[2], v[2];  // by region
};

struct FwdArgs {
    FwdParams params;
    FwdMaps maps;
    WorkOrder order;
};

struct DqArgs : FwdArgs {
    BwdParams bwd;
    CUtensorMap dout;
};

template <class T>
struct FwdStorage {
    alignas(1024) typename T::Element q[T::kQStages][T::kQParts][T::PartQ::kElements];
    alignas(1024) typename T::Element dout[T::kQStages][T::kQParts][T::kDqPass ? T::PartQ::kElements : 64];
    alignas(1024) typename T::Element k[T::kStages][T::TileK::kElements];
    alignas(1024) typename T::Element v[T::kStages][T::TileK::kElements];
    Barrier q_full[T::kQStages][T::kQParts], q_empty[T::kQStages][T::kQParts];
    Barrier k_full[T::kStages], k_empty[T::kStages], v_full[T::kStages], v_empty[T::kStages];
    Barrier tail;
    StageKeys stage_keys[T::kStages];
    Barrier item_full[T::kQStages];  // the item's rows and walk
    ItemRows item_rows[T::kQStages][T::kQParts];
    KeyWalk walks[T::kQStages];
    uint32_t scratch;

    __device__ void init() {
        for (int i = 0; i < T::kQStages; ++i) {
            for (int part = 0; part < T::kQParts; ++part) {
                q_full[i][part].init(1);
                // Every warp of its consumers has read the item, and that of K and V: with the first part the next one is published.
                q_empty[i][part].init(4 * T::kConsumers / T::kQParts + (part == 0 ? 1 : 0));
            }
            item_full[i].init(1);
        }
        for (int i = 0; i < T::kStages; ++i) {
            k_full[i].init(1);
            v_full[i].init(1);
            k_empty[i].init(T::kConsumers);
            v_empty[i].init(T::kConsumers);
        }
        tail.init(1);
    }
};

template <class Tile>
__device__ __forceinline__ void load_tile(void* dst, CUtensorMap const& map, int row, int head, Barrier& bar,
                                          uint64_t policy) {
#pragma unroll
    for (int c = 0; c < Tile::kChunks; ++c) {
        tma_load(static_cast<char*>(dst) + c * Tile::kChunkBytes, map, c * Tile::kChunk, row, head, bar, policy);
    }
}

// Rows [first, kRows) of a tile become zeros, written by one warp. Keys behind the item's last one may be padding that
// holds NaN, and 0 * NaN in a matrix product would reach every row.
template <class Tile>
__device__ __forceinline__ void zero_tail(void* tile, int first, int lane) {
    constexpr int kVectors = Tile::kRowBytes / 16;
#pragma unroll 1
    for (int i = first * kVectors + lane; i < Tile::kRows * kVectors; i += 32) {
#pragma unroll
        for (int c = 0; c < Tile::kChunks; ++c) {
            *reinterpret_cast<uint4*>(static_cast<char*>(tile) + c * Tile::kChunkBytes + i * 16) =
                make_uint4(0, 0, 0, 0);
        }
    }
}

// Loads a tile of which only `valid` rows may be read by the products; `full` completes when the rest is zero and `other_bytes`
// of other copies have arrived.
template <class Tile>
__device__ __forceinline__ void load_tile_zero_tail(void* dst, CUtensorMap const& map, int row, int head, int valid,
                                                    Barrier& full, uint32_t other_bytes, Barrier& tail,
                                                    uint32_t& tail_phase, uint64_t policy, int lane) {
    if (lane == 0) {
        tail.arrive_and_expect(Tile::kBytes);
        load_tile<Tile>(dst, map, row, head, tail, policy);
    }
    tail.wait(tail_phase);
    tail_phase ^= 1;
    zero_tail<Tile>(dst, valid, lane);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) { full.arrive_and_expect(other_bytes); }
}

// One stage of K or V. With `zero` the rows behind the item's last key become zeros.
template <class T, bool kZero>
__device__ __forceinline__ void load_keys(void* dst, CUtensorMap const& map, KeyTile const& t, int head, Barrier& full,
                                          Barrier& tail, uint32_t& tail_phase, int lane) {
    using Tile = typename T::TileK;
    if (kZero && t.valid < T::kBlockN) {
        load_tile_zero_tail<Tile>(dst, map, t.key, head, t.valid, full, 0, tail, tail_phase, kEvictLast, lane);
    } else if (lane == 0) {
        full.arrive_and_expect(Tile::kBytes);
        load_tile<Tile>(dst, map, t.key, head, full, kEvictLast);
    }
}

// Whether rows [64 i, 64 i + 64) of the item see nothing of a tile, where the plan's blocks are those rows.
template <class T>
__device__ __forceinline__ bool is_unseen(Plan const& plan, int2 rows, int i, KeyTile const& t) {
    if (rows.x % kBlockRows != 0 || rows.y <= kBlockRows * i) { return false; }
    KeySpan const* const span = &plan.block_span[rows.x / kBlockRows + i].context + (t.region ? 0 : 1);
    return __ldg(&span->begin) >= t.key + T::kBlockN || __ldg(&span->end) <= t.key;
}

// The next item and its Q, a part for each warpgroup (no dO): the walk with the first one.
template <class T>
__device__ __forceinline__ void load_rows_by_part(FwdArgs const& args, FwdStorage<T>& s, QueryItem const* item, int2 rows,
                                                  int head, int head_k, Ring<T::kQStages> const& q) {
    using PartQ = typename T::PartQ;
    KeyWalk walk{};
    if (rows.y > 0) { walk.template init<T::kBlockN>(*item); }
    int const num_tiles = walk.size();
    int skips = 0;  // two bits a part: the first, the last tile
    if (num_tiles > 2) {
#pragma unroll
        for (int i = 0; i < 2 * T::kQParts; ++i) {
            KeyTile const t = KeyTile::at<T::kBlockN>(walk, i % 2 == 0 ? 0 : num_tiles - 1);
            skips |= int(is_unseen<T>(args.params.plan, rows, i / 2, t)) << i;
        }
    }
#pragma unroll
    for (int part = 0; part < T::kQParts; ++part) {
        Barrier& full = s.q_full[q.stage][part];
        s.q_empty[q.stage][part].wait(q.phase ^ 1);
        if (threadIdx.x % 32 == 0) {
            bool const first = skips >> 2 * part & 1, last = skips >> 2 * part & 2;
            s.item_rows[q.stage][part] = {rows.x, rows.y, head, head_k, num_tiles, first, last};
            if (part == 0) {
                s.walks[q.stage] = walk;
                s.item_full[q.stage].arrive();
            }
            if (num_tiles > 0) {
                full.arrive_and_expect(PartQ::kBytes);
                load_tile<PartQ>(s.q[q.stage][part], args.maps.q, rows.x + PartQ::kRows * part, head, full, kEvictFirst);
            } else {
                full.arrive();
            }
        }
    }
}

// Items and their Q (and dO).
template <class T, class Args>
__device__ __forceinline__ void fwd_load_rows(Args const& args, FwdStorage<T>& s) {
    int const lane = threadIdx.x % 32, grid = gridDim.x;
    FwdParams const& p = args.params;
    Ring<T::kQStages> q;
    int const size = args.order.num_items * args.order.num_heads, group = p.num_heads / p.num_heads_k;
    int round = 0;
    auto const take = [&] {
        int index = round * grid + (round % 2 == 0 ? blockIdx.x : grid - 1 - blockIdx.x);  // dealt out there and back: sorted by length
        if (p.tile_counter != nullptr && round > 0) {
            if (lane == 0) { index = atomicAdd(p.tile_counter, 1) + grid; }
            index = __shfl_sync(0xffffffff, index, 0);
        }
        ++round;
        return index;
    };
    constexpr bool kAhead = T::kQStages > 1;  // else the item is read before its stage is free
#pragma unroll 1
    while (true) {
        if (kAhead) { s.q_empty[q.stage][0].wait(q.phase ^ 1); }
        int head = 0;
        QueryItem const* item = nullptr;
        int2 rows = make_int2(0, 0);  // first, number
#pragma unroll 1
        for (int index; rows.y == 0 && (index = take()) < size;) {
            int item_index;
            args.order.decode(index, item_index, head);
            item = p.plan.query_items + item_index;
            rows = __ldg(reinterpret_cast<int2 const*>(item));
        }
        if constexpr (T::kQParts > 1) {
            load_rows_by_part<T>(args, s, item, rows, head, head / group, q);
        } else {
            if (!kAhead) { s.q_empty[q.stage][0].wait(q.phase ^ 1); }
            Barrier& full = s.q_full[q.stage][0];
            if (lane == 0) {
                int num_tiles = 0;
                if (rows.y > 0) {
                    KeyWalk walk;
                    walk.template init<T::kBlockN>(*item);
                    s.walks[q.stage] = walk;
                    num_tiles = walk.size();
                }
                s.item_rows[q.stage][0] = {rows.x, rows.y, head, head / group, num_tiles, false, false};
                s.item_full[q.stage].arrive();
                if (num_tiles > 0) {
                    full.arrive_and_expect(T::TileQ::kBytes * (T::kDqPass ? 2 : 1));
                    load_tile<typename T::TileQ>(s.q[q.stage][0], args.maps.q, rows.x, head, full, kEvictFirst);
                    if constexpr (T::kDqPass) {
                        load_tile<typename T::TileQ>(s.dout[q.stage][0], args.dout, rows.x, head, full, kEvictFirst);
                    }
                } else {
                    full.arrive();
                }
            }
        }
        if (rows.y == 0) { break; }
        q.advance();
    }
}

template <class T, class Args>
__device__ __forceinline__ void fwd_load_keys(Args const& args, FwdStorage<T>& s) {
    int const lane = threadIdx.x % 32;
    Ring<T::kQStages> q;
    Ring<T::kStages> k, values;
    uint32_t tail_phase = 0;
#pragma unroll 1
    while (true) {
        s.item_full[q.stage].wait(q.phase);
        ItemRows const& item = s.item_rows[q.stage][0];  // read again for each tile: registers are scarce
        KeyWalk const& walk = s.walks[q.stage];
        if (item.num_rows == 0) { break; }

        // K runs ahead of V by as much as the consumers use it ahead: in the dQ pass not at all.
        constexpr int kLead = T::kDqPass ? 0 : 1;
        auto& v = kLead > 0 ? values : k;
#pragma unroll 1
        for (int i = 0; i < item.num_tiles + kLead; ++i) {
            if (i < item.num_tiles) {
                KeyTile const t = KeyTile::at<T::kBlockN>(walk, i);
                s.k_empty[k.stage].wait(k.phase ^ 1);
                if (lane == 0) { s.stage_keys[k.stage] = {t.key, t.region, t.masked, 0}; }
                load_keys<T, T::kDqPass>(s.k[k.stage], args.maps.k[t.region], t, item.head_k, s.k_full[k.stage], s.tail,
                                         tail_phase, lane);
                if (kLead > 0) { k.advance(); }
            }
            if (i >= kLead) {
                KeyTile const t = KeyTile::at<T::kBlockN>(walk, i - kLead);
                s.v_empty[v.stage].wait(v.phase ^ 1);
                load_keys<T, true>(s.v[v.stage], args.maps.v[t.region], t, item.head_k, s.v_full[v.stage], s.tail,
                                   tail_phase, lane);
                v.advance();
            }
        }
        __syncwarp();
        if (lane == 0) { s.q_empty[q.stage][0].arrive(); }
        q.advance();
    }
}

}  // namespace flash_attn::sm90
