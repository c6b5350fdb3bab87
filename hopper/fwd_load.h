// Forward and dQ pass, producer warp: takes items from the counter, reads their key spans, and feeds Q (and dO) and the K, V
// stages by TMA. Only this file knows which key tiles an item visits; with each stage goes {region, first key, masked}.
#pragma once

#include "scheduler.h"
#include "traits.h"

namespace flash_attn::sm90 {

struct StageKeys {
    int key;     // first key of the stage, a row of its region's tensor
    int region;  // 0 decoded, 1 context
    int masked;  // some row of the item does not see some key of the stage
    int reserved;
};

struct ItemRows {
    int row_begin, num_rows;  // num_rows 0: no more items
    int head, num_tiles;
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
    alignas(1024) typename T::Element q[T::kQStages][T::TileQ::kElements];
    alignas(1024) typename T::Element dout[T::kQStages][T::kDqPass ? T::TileQ::kElements : 64];
    alignas(1024) typename T::Element k[T::kStages][T::TileK::kElements];
    alignas(1024) typename T::Element v[T::kStages][T::TileK::kElements];
    Barrier q_full[T::kQStages], q_empty[T::kQStages];
    Barrier k_full[T::kStages], k_empty[T::kStages], v_full[T::kStages], v_empty[T::kStages];
    Barrier tail;
    StageKeys stage_keys[T::kStages];
    ItemRows item_rows[T::kQStages];
    uint32_t scratch;

    __device__ void init() {
        for (int i = 0; i < T::kQStages; ++i) {
            q_full[i].init(1);
            q_empty[i].init(4 * T::kConsumers);  // every warp has read item_rows
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

template <class T, class Args>
__device__ __forceinline__ void fwd_load(Args const& args, FwdStorage<T>& s) {
    int const lane = threadIdx.x % 32;
    FwdParams const& p = args.params;
    int const group = p.num_heads / p.num_heads_k;
    Ring<T::kQStages> q;
    Ring<T::kStages> k, v;
    uint32_t tail_phase = 0;

    int index = blockIdx.x, round = 0;
    int const size = args.order.num_items * args.order.num_heads;
#pragma unroll 1
    while (index < size) {
        int next = 0;
        if (p.tile_counter == nullptr) {  // dealt out there and back, since the list is sorted by length
            ++round;
            next = round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
        } else if (lane == 0) {
            next = atomicAdd(p.tile_counter, 1) + gridDim.x;
        }
        int item_index, head;
        args.order.decode(index, item_index, head);
        QueryItem const item = p.plan.query_items[item_index];
        if (item.num_rows > 0) {
            int const head_k = head / group;
            KeyWalk walk;
            walk.template init<T::kBlockN>(item);
            int const num_tiles = walk.size();

            s.q_empty[q.stage].wait(q.phase ^ 1);
            if (lane == 0) {
                s.item_rows[q.stage] = {item.row_begin, item.num_rows, head, num_tiles};
                if (num_tiles > 0) {
                    s.q_full[q.stage].arrive_and_expect(T::TileQ::kBytes * (T::kDqPass ? 2 : 1));
                    load_tile<typename T::TileQ>(s.q[q.stage], args.maps.q, item.row_begin, head, s.q_full[q.stage],
                                                 kEvictFirst);
                    if constexpr (T::kDqPass) {
                        load_tile<typename T::TileQ>(s.dout[q.stage], args.dout, item.row_begin, head,
                                                     s.q_full[q.stage], kEvictFirst);
                    }
                } else {
                    s.q_full[q.stage].arrive();
                }
            }
            q.advance();

            // K runs ahead of V by as much as the consumers use it ahead.
            constexpr int kLead = T::kDqPass ? 0 : 1;
#pragma unroll 1
            for (int i = 0; i < num_tiles + kLead; ++i) {
                if (i < num_tiles) {
                    KeyTile const t = KeyTile::at<T::kBlockN>(walk, i);
                    s.k_empty[k.stage].wait(k.phase ^ 1);
                    if (lane == 0) { s.stage_keys[k.stage] = {t.key, t.region, t.masked, 0}; }
                    load_keys<T, T::kDqPass>(s.k[k.stage], args.maps.k[t.region], t, head_k, s.k_full[k.stage], s.tail,
                                             tail_phase, lane);
                    k.advance();
                }
                if (i >= kLead) {
                    KeyTile const t = KeyTile::at<T::kBlockN>(walk, i - kLead);
                    s.v_empty[v.stage].wait(v.phase ^ 1);
                    load_keys<T, true>(s.v[v.stage], args.maps.v[t.region], t, head_k, s.v_full[v.stage], s.tail,
                                       tail_phase, lane);
                    v.advance();
                }
            }
        }
        index = __shfl_sync(0xffffffff, next, 0);
    }
    s.q_empty[q.stage].wait(q.phase ^ 1);
    if (lane == 0) {
        s.item_rows[q.stage].num_rows = 0;
        s.q_full[q.stage].arrive();
    }
}

}  // namespace flash_attn::sm90
