// Forward on mma.sync: out = softmax(q k^T scale) v and lse, for one QueryItem and one query head a block.
//
// Keys come in tiles: the item's decoded interval from its end down, then its context interval likewise. One loop body; a
// uniform branch applies the row spans where a tile is not clean. Called from launch.h.
#pragma once

#include "../../params.h"
#include "../common/fragments.h"
#include "../common/mask.h"
#include "../common/softmax.h"
#include "extras.h"
#include "schedule.h"
#include "traits.h"

namespace flash_attn::sm80 {

__device__ __forceinline__ QueryItem load_item(QueryItem const* item) {
    int4 const head = __ldg(reinterpret_cast<int4 const*>(item));
    return {head.x, head.y, head.z, head.w, load_key_span(&item->context), load_key_span(&item->decoded)};
}

// The key tiles of an item, numbered in the order they are visited. Its spans are read from the plan at each use: the L1 cache
// has them, the registers do not.
template <int kBlockN>
struct KeyTiles {
    Plan const& plan;
    int const index;
    int const num_decoded, num_tiles;
    __device__ static int count(KeySpan const& s) { return s.end > s.begin ? (s.end - s.begin + kBlockN - 1) / kBlockN : 0; }
    __device__ KeyTiles(Plan const& plan_, int index_, QueryItem const& item)
        : plan(plan_), index(index_), num_decoded(count(item.decoded)), num_tiles(num_decoded + count(item.context)) {}

    struct Tile {
        bool context;
        KeySpan span;
        int first;  // key of the tile's first column
        __device__ bool clean() const { return is_clean(span, first, first + kBlockN); }
        __device__ int num_keys() const { return span.end - first; }
    };
    __device__ Tile tile(int i) const {
        Tile t;
        t.context = i >= num_decoded;
        QueryItem const* const item = plan.query_items + opaque(index);
        t.span = load_key_span(t.context ? &item->context : &item->decoded);
        t.first = t.span.begin + ((t.context ? num_tiles : num_decoded) - 1 - i) * kBlockN;
        return t;
    }
    __device__ QueryItem item() const { return load_item(plan.query_items + opaque(index)); }
};

// Loads of one item's q, k, v rows.
template <typename T>
struct ForwardLoader {
    using Element = typename T::Element;
    FwdParams const& p;
    KeyTiles<T::kBlockN> const& tiles;
    uint32_t const shared;
    int const head, head_k;

    __device__ void rows(uint32_t tile, void const* base, int64_t row_stride, int64_t head_stride, QueryItem const& item) const {
        auto const* source = static_cast<Element const*>(base) + item.row_begin * row_stride + head * head_stride;
        load_rows<T::kBlockM, T::kHeadDim, T::kThreads>(tile, source, row_stride, 0, item.num_rows, p.head_dim);
    }
    // A tile of K or V into slot `slot`. Keys behind the interval, which no row sees, become zero.
    __device__ void keys(typename KeyTiles<T::kBlockN>::Tile const& tile, bool value, int slot) const {
        bool const context = tile.context;
        void const* base = value ? (context ? p.v_context : p.v) : (context ? p.k_context : p.k);
        int64_t const row_stride = value ? (context ? p.v_context_row_stride : p.v_row_stride)
                                         : (context ? p.k_context_row_stride : p.k_row_stride);
        int64_t const head_stride = value ? (context ? p.v_context_head_stride : p.v_head_stride)
                                          : (context ? p.k_context_head_stride : p.k_head_stride);
        auto const* source = static_cast<Element const*>(base) + tile.first * row_stride + head_k * head_stride;
        load_rows<T::kBlockN, T::kHeadDim, T::kThreads>(shared + T::kRing + slot * T::kSlotBytes, source, row_stride, 0,
                                                        tile.num_keys(), p.head_dim);
    }
};

// Applies the rows' spans to the scores of tile i where it is not clean; `value` is what an unseen score becomes. The spans
// come from global memory: few tiles need them, and behind a load ptxas leaves the branch a branch. Of arithmetic alone it makes
// predicated instructions, which would take their issue slots at every tile (a sixth of the loop).
template <typename T, int MT, int NT>
__device__ __forceinline__ void mask_unseen(float (&s)[MT][NT][4], KeyTiles<T::kBlockN> const& tiles, int i, int first_row, float value,
                                            int first_column = 0) {
    auto const tile = tiles.tile(i);
    if (tile.clean()) return;
    QueryItem const item = tiles.item();
    int const lane = opaque(threadIdx.x) % 32, column = tile.first + first_column + lane % 4 * 2;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const row = first_row + mt * 16 + half * 8 + lane / 4;
            int2 span = make_int2(0, 0);
            if (row < item.num_rows)
                span = __ldg(reinterpret_cast<int2 const*>(tiles.plan.row_span + item.row_begin + row) + (tile.context ? 0 : 1));
            mask_row<16>(s[mt], half, span.x - column, span.y - column, value);
        }
    }
}

// A warp's rows, rounded, to `out` (the warp's first row) through its rows of a shared tile that only it reads.
template <typename T>
__device__ __forceinline__ void store_warp_rows(float const (&acc)[T::kRowTiles][T::kHeadDim / 8][4], typename T::Element* out,
                                                int64_t row_stride, uint32_t stage, int first_row, int num_rows, int num_cols) {
#pragma unroll
    for (int mt = 0; mt < T::kRowTiles; ++mt)
#pragma unroll
        for (int np = 0; np < T::kHeadDim / 16; ++np)
            store_pair<typename T::Element, T::kHeadDim>(stage, first_row + mt * 16, 2 * np, acc[mt][2 * np], acc[mt][2 * np + 1]);
    __syncwarp();
    store_rows<16 * T::kRowTiles, T::kHeadDim, 32>(out, row_stride, stage, first_row, threadIdx.x % 32, num_rows, num_cols);
}

template <typename T>
__device__ __forceinline__ void store_forward(FwdParams const& p, QueryItem const& item, int head, uint32_t stage, int first_row,
                                              OnlineSoftmax<T::kRowTiles>& softmax, float (&o)[T::kRowTiles][T::kHeadDim / 8][4]) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int mt = 0; mt < T::kRowTiles; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float const l = quad_sum(softmax.l[mt][half]), inverse = l > 0.f ? 1.f / l : l;  // NaN stays NaN
            bool const empty = l == 0.f;
            int const row = first_row + mt * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && row < item.num_rows)
                p.lse[head * p.lse_head_stride + item.row_begin + row] = empty ? -INFINITY : (softmax.m[mt][half] + log2f(l)) * kLn2;
#pragma unroll
            for (int no = 0; no < T::kHeadDim / 8; ++no) {
#pragma unroll
                for (int j = 2 * half; j < 2 * half + 2; ++j) o[mt][no][j] = empty ? 0.f : o[mt][no][j] * inverse;
            }
        }
    }
    auto* out = static_cast<typename T::Element*>(p.out) + (item.row_begin + first_row) * p.out_row_stride + head * p.out_head_stride;
    store_warp_rows<T>(o, out, p.out_row_stride, stage, first_row, item.num_rows - first_row, p.head_dim);
}

// With extras a softcap is looked for at run time.
template <typename T, bool kSoftcap, typename X>
__global__ void __launch_bounds__(T::kThreads, (kSoftcap || X::kOn) && T::kBlocksPerSm > 2 ? 2 : T::kBlocksPerSm)
    forward_kernel(FwdParams const __grid_constant__ p, Schedule const __grid_constant__ schedule, Scales const __grid_constant__ scales,
                   X const __grid_constant__ extras) {
    using Element = typename T::Element;
    constexpr int MT = T::kRowTiles, NT = T::kBlockN / 8, NO = T::kHeadDim / 8;
    extern __shared__ __align__(1024) char shared_bytes[];
    uint32_t const shared = shared_address(shared_bytes);

    int index, head;
    schedule.decode(index, head);
    QueryItem const item = load_item(p.plan.query_items + index);
    if (item.num_rows <= 0) return;
    KeyTiles<T::kBlockN> const tiles(p.plan, index, item);
    ForwardLoader<T> const load{p, tiles, shared, head, schedule.group.quotient(head)};

    // Round i: scores of tile i; P V of the same tile, or (kAhead) of the one before. With pairs of slots a round waits once, for
    // what was loaded a round before; else K comes during P V and V during the scores.
    static_assert(T::kPaired || !T::kAhead);
    int const num_tiles = tiles.num_tiles;
    auto const slot_of = [](int i, bool value) { return (T::kPaired ? 2 * (i & 1) : 0) + value; };
    auto const load_keys = [&](int i, bool key, bool value) {
        if (i >= num_tiles) return;
        auto const tile = tiles.tile(i);
        if (key) load.keys(tile, false, slot_of(i, false));
        if (value) load.keys(tile, true, slot_of(i, true));
    };
    auto const wait = [] {
        copy_async_wait<0>();
        __syncthreads();
    };
    if (num_tiles > 0) {
        load.rows(shared, p.q, p.q_row_stride, p.q_head_stride, item);
        load_keys(0, true, T::kPaired && !T::kAhead);
    }
    copy_async_commit();

    int const warp_row = threadIdx.x / 32 * 16 * MT;
    auto const q_lane = lane_a<T::kHeadDim>(shared, warp_row);
    auto const k_lane = lane_b<T::kHeadDim>(shared + T::kRing, 0);
    auto const v_lane = lane_b_transposed<T::kHeadDim>(shared + T::kRing, 0);
    float o[MT][NO][4], s[MT][NT][4];
    uint32_t prob[NT / 2][MT][4];
    clear(o);
    OnlineSoftmax<MT> softmax;
    constexpr int kLoadStep = 3;  // of the products of a score tile: the loads' address arithmetic mixes with them
    auto const scores = [&](int i) {
        clear(s);
        auto const k_now = k_lane.moved(slot_of(i, false) * T::kSlotBytes);
        gemm<Element, T::kHeadDim / 16>(
            s,
            [&](int kk, uint32_t(&a)[MT][4]) {
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) load_matrix(a[mt], q_lane.at(16 * mt, 2 * kk));
            },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix(b, k_now.at(16 * np, 2 * kk)); },
            [&](int step) {
                if (step != kLoadStep) return;
                if constexpr (T::kPaired) load_keys(i + 1, true, !T::kAhead);
                if constexpr (!T::kPaired || T::kAhead) load_keys(i, false, true);
                copy_async_commit();
            });
        if constexpr (kSoftcap) apply_softcap(s, scales.over_softcap);
        if constexpr (X::kOn)
            if (scales.over_softcap > 0.f) apply_softcap(s, scales.over_softcap);
        mask_unseen<T>(s, tiles, i, warp_row, -INFINITY);
        if constexpr (X::kOn) {
            if (extras.alibi_slopes != nullptr) {
                QueryItem const rows = tiles.item();
                ItemExtras const options(extras, rows.segment, head);
                float const slope = options.slope(scales.log2);
                int const distance = options.distance(rows.row_begin + warp_row, tiles.tile(i).first);
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                        for (int j = 0; j < 4; ++j) s[mt][nt][j] = with_alibi<16>(s[mt][nt][j], slope, distance + 16 * mt, nt, j);
            }
        }
    };
    auto const drop = [&](int i) {
        if constexpr (X::kOn) {
            if (extras.rng_state == nullptr) return;
            QueryItem const rows = tiles.item();
            ItemExtras(extras, rows.segment, head).drop(prob, rows.row_begin + warp_row, tiles.tile(i).first);
        }
    };
    auto const add_values = [&](int i, auto meanwhile) {
        auto const v_now = v_lane.moved(slot_of(i, true) * T::kSlotBytes);
        gemm<Element, T::kBlockN / 16>(
            o,
            [&](int kk, uint32_t(&a)[MT][4]) {
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int j = 0; j < 4; ++j) a[mt][j] = prob[kk][mt][j];
            },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix_transposed(b, v_now.at(16 * kk, 2 * np)); }, meanwhile);
    };
    auto const whole_softmax = [&] {
        SoftmaxTile<Element, MT, NT> tile(softmax, s, prob, scales.log2);
        tile.maxima(0, tile.kUnits);
        tile.update();
        tile.rescale(o);
        tile.exponentials(0, tile.kUnits);
    };
    if constexpr (T::kAhead) {
        if (num_tiles > 0) {
            wait();
            scores(0);
            whole_softmax();
            drop(0);
        }
        for (int i = 1; i < num_tiles; ++i) {
            wait();
            scores(i);
            SoftmaxTile<Element, MT, NT> tile(softmax, s, prob, scales.log2);
            add_values(i - 1, [&](int step) { tile.template slice<T::kBlockN / 16 * NO / 2>(step); });
            tile.rescale(o);
            drop(i);
        }
        wait();
        if (num_tiles > 0) add_values(num_tiles - 1, NoWork{});
    } else {
        for (int i = 0; i < num_tiles; ++i) {
            wait();
            scores(i);
            whole_softmax();
            drop(i);
            if constexpr (!T::kPaired) {
                wait();
                load_keys(i + 1, true, false);
                copy_async_commit();
            }
            add_values(i, NoWork{});
        }
    }
    if constexpr (X::kOn) {
        float const keep_scale = extras.keep_scale;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int no = 0; no < NO; ++no)
#pragma unroll
                for (int j = 0; j < 4; ++j) o[mt][no][j] *= keep_scale;
    }
    store_forward<T>(p, tiles.item(), head, shared, warp_row, softmax, o);
}

}  // namespace flash_attn::sm80
