// Backward, the producer warpgroup. Two warps feed one item: K, Q and lse (operands of S) one of them, V, dO and D (of dP)
// the other; K and V once, the rest per block of rows of the group's query heads, last rows first, skipping blocks that see
// none of the keys. Where two CTAs work as a pair, each loads half of a block's Q and dO into both. The other two warps add
// the consumers' dQ tiles to the fp32 accumulator by bulk reduction.
#pragma once

#include "cluster.h"
#include "fwd_load.h"
#include "row_blocks.h"

namespace flash_attn::sm90 {

struct StageRows {
    int dq_tile;  // (query head of the launch, first 64-row block) as dq_accum counts them; -1: the item is done
    int block_and_mask;  // 2 * block, + 1 where some pair of row and key of this block and item is not visible

    __device__ __forceinline__ int block() const { return block_and_mask >> 1; }
    __device__ __forceinline__ bool masked() const { return block_and_mask & 1; }
};

struct BwdMaps {
    CUtensorMap rows[2], keys[2][2];  // q, dout; k, v by region
};

struct BwdArgs {
    BwdParams params;
    BwdMaps maps;
    WorkOrder order;  // heads: the kv heads of this launch
};

// Index [0]: operands of S (k, q, lse). Index [1]: operands of dP (v, dout, D).
template <class T>
struct BwdStorage {
    alignas(1024) typename T::Element keys[2][T::TileK::kElements];
    alignas(1024) typename T::Element rows[T::kRowStages + T::kDoutStages][T::TileQ::kElements];  // Q, dO
    alignas(1024) typename T::Element ds[2][T::kWithDq ? T::TileS::kElements : 64];
    alignas(1024) float dq[T::kConsumers][T::kWithDq ? T::kDqFloats : 4];
    alignas(16) float scalars[2][T::kRowStages][T::kBlockM];
    Barrier keys_full, tail[2], ds_full[2];
    Barrier full[2][T::kRowStages], empty[2][T::kRowStages];
    StageRows stage_rows[T::kRowStages];  // travels with operand 0
    int dq_tile[T::kConsumers];        // that the warpgroup's dQ belongs to; kDqEnd, kNoDq
    KeyItem item;
    int head_k;
    int paired;                         // the other CTA of the cluster has a key tile of the same context
    int row_begin, key_begin, key_end;  // of both

    __device__ void set_pair(bool is_pair, KeyItem const& other) {
        paired = is_pair;
        row_begin = min(item.row_begin, other.row_begin);
        key_begin = min(item.key_begin, other.key_begin);
        key_end = max(item.key_begin + item.num_keys, other.key_begin + other.num_keys);
    }

    __device__ void init() {
        keys_full.init(2);
        for (int operand = 0; operand < 2; ++operand) {
            tail[operand].init(1);
            ds_full[operand].init(4 * T::kConsumers);  // every warp has written its part
            for (int i = 0; i < T::kRowStages; ++i) {
                full[operand][i].init(1);
                empty[operand][i].init(T::kConsumers * T::kCluster);
            }
        }
    }
};

constexpr int kDqFullBarrier = 1, kDqEmptyBarrier = 3, kScoreBarrier = 5;  // each + warpgroup
constexpr int kDqEnd = -1, kNoDq = -16;  // dq_tile: no more, and (+ warpgroup) nothing to add

// Keys that no row sees, at the end of a decoded item, belong to it (it writes their zero gradients), but may be padding.
__device__ __forceinline__ int num_seen_keys(KeyItem const& item, RowSpan const* row_span) {
    if (item.region != 0 || item.row_begin >= item.row_end) { return item.num_keys; }
    return max(
        0, min(item.num_keys, row_span[item.row_end - 1].decoded_end - item.key_begin));  // wrong tables give anything
}

template <class T, int kOperand>
__device__ __forceinline__ void bwd_load(BwdArgs const& args, BwdStorage<T>& s) {
    using TileK = typename T::TileK;
    using TileQ = typename T::TileQ;
    constexpr int kM = T::kBlockM;
    int const lane = threadIdx.x % 32;
    BwdParams const& p = args.params;
    KeyItem const& item = s.item;
    CUtensorMap const& map_rows = args.maps.rows[kOperand];
    uint32_t tail_phase = 0;
    {
        CUtensorMap const& map = args.maps.keys[kOperand][item.region];
        int const valid = num_seen_keys(item, p.fwd.plan.row_span);
        if (valid < T::kBlockN) {
            load_tile_zero_tail<TileK>(s.keys[kOperand], map, item.key_begin, s.head_k, valid, s.keys_full, 0,
                                       s.tail[kOperand], tail_phase, kEvictFirst, lane);
        } else if (lane == 0) {
            s.keys_full.arrive_and_expect(TileK::kBytes);
            load_tile<TileK>(s.keys[kOperand], map, item.key_begin, s.head_k, s.keys_full, kEvictFirst);
        }
    }

    int const rank = cluster_rank();
    constexpr int kStages = kOperand == 0 ? T::kRowStages : T::kDoutStages;
    auto* const stages = s.rows + (kOperand == 0 ? 0 : T::kRowStages);
    Ring<kStages> ring;
    int const group = p.fwd.num_heads / p.fwd.num_heads_k;
#pragma unroll 1
    for (int head = s.head_k * group; head < (s.head_k + 1) * group; ++head) {
        auto const visit = [&](int block, bool masked) {
            int const row = block * kM;
            Barrier& full = s.full[kOperand][ring.stage];
            s.empty[kOperand][ring.stage].wait(ring.phase ^ 1);
            bool const whole = row + kM <= item.row_end;
            if (lane == 0) {
                if constexpr (kOperand == 0) {
                    s.stage_rows[ring.stage] = {
                        (head - p.head_k_begin * group) * int(p.rows_padded / kBlockRows) + row / kBlockRows,
                        2 * block + masked};
                }
                if (whole) { full.arrive_and_expect(kM * 4 + TileQ::kBytes); }
                bulk_load(s.scalars[kOperand][ring.stage],
                          (kOperand == 0 ? p.lse_log2 : p.dout_dot_out) + head * p.rows_padded + row, kM * 4, full);
                if (whole && s.paired) {
#pragma unroll
                    for (int c = 0; c < TileQ::kChunks; ++c) {
                        if ((c + kOperand) % 2 != rank) { continue; }
                        tma_load_multicast(reinterpret_cast<char*>(stages[ring.stage]) + c * TileQ::kChunkBytes, map_rows,
                                           c * TileQ::kChunk, row, head, full, 3, kEvictFirst);
                    }
                } else if (whole) {
                    load_tile<TileQ>(stages[ring.stage], map_rows, row, head, full, kEvictFirst);
                }
            }
            if (!whole) {  // rows behind the item's last one may be padding
                load_tile_zero_tail<TileQ>(stages[ring.stage], map_rows, row, head, item.row_end - row, full, kM * 4,
                                           s.tail[kOperand], tail_phase, kEvictFirst, lane);
            }
            ring.advance();
        };
        for_row_blocks<kM, T::kBlockN>(p.fwd.plan, item, 0, s.row_begin, s.key_begin, s.key_end, visit);
    }
    if (kOperand == 0) {
        s.empty[0][ring.stage].wait(ring.phase ^ 1);
        if (lane == 0) {
            s.stage_rows[ring.stage].dq_tile = -1;
            s.full[0][ring.stage].arrive();
        }
    }
}

// One warp per consumer warpgroup.
template <class T>
__device__ __forceinline__ void bwd_store_dq(BwdArgs const& args, BwdStorage<T>& s, int warpgroup) {
    named_arrive(kDqEmptyBarrier + warpgroup, 128 + 32);
#pragma unroll 1
    while (true) {
        named_sync(kDqFullBarrier + warpgroup, 128 + 32);
        int const tile = s.dq_tile[warpgroup];
        if (tile == kDqEnd) { break; }
        if (threadIdx.x % 32 == 0 && tile >= 0) {
            int64_t const offset =
                int64_t(tile) * kBlockRows * T::kHeadDim + (T::kDqWhole ? 0 : warpgroup * T::kDqFloats);
            bulk_reduce_add(args.params.dq_accum + offset, s.dq[warpgroup], T::kDqFloats * 4);
            bulk_wait_read();
        }
        __syncwarp();
        named_arrive(kDqEmptyBarrier + warpgroup, 128 + 32);
    }
    if (threadIdx.x % 32 == 0) { bulk_wait(); }
}

}  // namespace flash_attn::sm90
