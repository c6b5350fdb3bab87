// Forward on mma.sync: out = softmax(q k^T scale) v and lse, for one QueryItem and one query head a block.
//
// Keys come in tiles: the item's decoded interval from its end down, then its context interval likewise. One loop body; a
// uniform branch applies the row spans where a tile is not clean. Called from launch.h.
#pragma once

#include "../../params.h"
#include "../common/fragments.h"
#include "../common/mask.h"
#include "../common/softmax.h"
#include "schedule.h"
#include "traits.h"

namespace flash_attn::sm80 {

__device__ __forceinline__ QueryItem load_item(QueryItem const* item) {
    int4 const head = __ldg(reinterpret_cast<int4 const*>(item));
    return {head.x, head.y, head.z, head.w, load_key_span(&item->context), load_key_span(&item->decoded)};
}

// The key tiles of an item, numbered in the order they are visited.
template <int kBlockN>
struct KeyTiles {
    KeySpan const context, decoded;
    int const num_decoded, num_tiles;
    __device__ static int count(KeySpan const& s) { return s.end > s.begin ? (s.end - s.begin + kBlockN - 1) / kBlockN : 0; }
    __device__ explicit KeyTiles(QueryItem const& item)
        : context(item.context), decoded(item.decoded), num_decoded(count(item.decoded)), num_tiles(num_decoded + count(item.context)) {}
    __device__ bool is_context(int i) const { return i >= num_decoded; }
    __device__ int end(int i) const { return is_context(i) ? context.end : decoded.end; }
    __device__ bool clean(int i) const {
        int const first = first_key(i);
        int const full_begin = is_context(i) ? context.full_begin : decoded.full_begin;
        return first >= full_begin && first + kBlockN <= (is_context(i) ? context.full_end : decoded.full_end);
    }
    __device__ int first_key(int i) const {
        return is_context(i) ? context.begin + (num_tiles - 1 - i) * kBlockN : decoded.begin + (num_decoded - 1 - i) * kBlockN;
    }
};

// Loads of one item's q, k, v rows and their row spans.
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
    // Tile i of K or V into ring slot `slot`. Keys behind the interval, which no row sees, become zero.
    __device__ void keys(int i, bool value, int slot) const {
        bool const context = tiles.is_context(i);
        void const* base = value ? (context ? p.v_context : p.v) : (context ? p.k_context : p.k);
        int64_t const row_stride = value ? (context ? p.v_context_row_stride : p.v_row_stride)
                                         : (context ? p.k_context_row_stride : p.k_row_stride);
        int64_t const head_stride = value ? (context ? p.v_context_head_stride : p.v_head_stride)
                                          : (context ? p.k_context_head_stride : p.k_head_stride);
        int const first = tiles.first_key(i);
        auto const* source = static_cast<Element const*>(base) + first * row_stride + head_k * head_stride;
        load_rows<T::kBlockN, T::kHeadDim, T::kThreads>(shared + T::kRing + slot * T::kSlotBytes, source, row_stride, 0,
                                                        tiles.end(i) - first, p.head_dim);
    }
    __device__ void spans(QueryItem const& item) const {
        for (int r = threadIdx.x; r < T::kBlockM; r += T::kThreads) {
            int4 v = make_int4(0, 0, 0, 0);
            if (r < item.num_rows) v = __ldg(reinterpret_cast<int4 const*>(p.plan.row_span + item.row_begin + r));
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared + T::kSpans + r * 16), "r"(v.x), "r"(v.y),
                         "r"(v.z), "r"(v.w)
                         : "memory");
        }
    }
};

// Applies the rows' spans to a score tile; `value` is what an unseen score becomes.
template <typename T, int MT, int NT>
__device__ __forceinline__ void mask_tile(float (&s)[MT][NT][4], uint32_t spans, bool context, int first_key, int first_row,
                                          float value) {
    int const lane = threadIdx.x % 32, column = first_key + lane % 4 * 2;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const row = first_row + mt * 16 + half * 8 + lane / 4;
            int begin, end;
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(begin), "=r"(end) : "r"(spans + row * 16 + (context ? 0 : 8)) : "memory");
            mask_row<16>(s[mt], half, begin - column, end - column, value);
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

template <typename T, bool kSoftcap>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSm) forward_kernel(FwdParams const __grid_constant__ p, int const section_heads) {
    using Element = typename T::Element;
    constexpr int MT = T::kRowTiles, NT = T::kBlockN / 8, NO = T::kHeadDim / 8;
    extern __shared__ __align__(1024) char shared_bytes[];
    uint32_t const shared = shared_address(shared_bytes);

    int index, head;
    decode_block(p.plan.num_query_items, p.num_heads, section_heads, index, head);
    QueryItem const item = load_item(p.plan.query_items + index);
    if (item.num_rows <= 0) return;
    KeyTiles<T::kBlockN> const tiles(item);
    ForwardLoader<T> const load{p, tiles, shared, head, head / (p.num_heads / p.num_heads_k)};

    // The ring holds tiles in the order of use, K0 V0 K1 V1 ..., or K0 K1 V0 K2 V1 ... where scores run ahead; kSlots - 1 of
    // these ticks are in flight.
    int const num_tiles = tiles.num_tiles, num_ticks = 2 * num_tiles;
    auto const load_tick = [&](int tick, int slot) {
        int const k_tile = (tick + 1) / 2;
        bool const value = T::kAhead ? tick > 0 && (tick % 2 == 0 || k_tile == num_tiles) : tick % 2 == 1;
        int const tile = !T::kAhead ? tick / 2 : value ? (tick - 1) / 2 : k_tile;
        if (tick < num_ticks) load.keys(tile, value, slot);
        copy_async_commit();
    };
    load.spans(item);
    if (num_ticks > 0) load.rows(shared, p.q, p.q_row_stride, p.q_head_stride, item);
#pragma unroll
    for (int tick = 0; tick < T::kSlots - 1; ++tick) load_tick(tick, tick);

    int const warp_row = threadIdx.x / 32 * 16 * MT;
    auto const q_lane = lane_a<T::kHeadDim>(shared, warp_row);
    auto const k_lane = lane_b<T::kHeadDim>(shared + T::kRing, 0);
    auto const v_lane = lane_b_transposed<T::kHeadDim>(shared + T::kRing, 0);
    float const scale_log2 = (kSoftcap ? p.softcap : p.softmax_scale) * kLog2E;
    float o[MT][NO][4], s[MT][NT][4];
    uint32_t prob[NT / 2][MT][4];
    clear(o);
    OnlineSoftmax<MT> softmax;
    int slot = 0;
    // Waits for the tile of tick `tick`, which is in ring slot `slot`. Every warp has left the tick before: its slot is filled
    // again. Returns the slot's offset.
    auto const turn = [&](int tick) {
        copy_async_wait<T::kSlots - 2>();
        __syncthreads();
        load_tick(tick + T::kSlots - 1, slot == 0 ? T::kSlots - 1 : slot - 1);
        uint32_t const offset = slot * T::kSlotBytes;
        slot = slot == T::kSlots - 1 ? 0 : slot + 1;
        return offset;
    };
    auto const scores = [&](int i, uint32_t k_slot) {
        clear(s);
        auto const k_now = k_lane.moved(k_slot);
        gemm<Element, T::kHeadDim / 16>(
            s,
            [&](int kk, uint32_t(&a)[MT][4]) {
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) load_matrix(a[mt], q_lane.at(16 * mt, 2 * kk));
            },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix(b, k_now.at(16 * np, 2 * kk)); });
        if constexpr (kSoftcap) apply_softcap(s, p.softmax_scale / p.softcap);
        if (!tiles.clean(i)) mask_tile<T>(s, shared + T::kSpans, tiles.is_context(i), tiles.first_key(i), warp_row, -INFINITY);
    };
    auto const add_values = [&](uint32_t v_slot, auto meanwhile) {
        auto const v_now = v_lane.moved(v_slot);
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
        SoftmaxTile<Element, MT, NT> tile(softmax, s, prob, scale_log2);
        tile.maxima(0, tile.kUnits);
        tile.update();
        tile.rescale(o);
        tile.exponentials(0, tile.kUnits);
    };
    if constexpr (T::kAhead) {
        if (num_tiles > 0) {
            scores(0, turn(0));
            whole_softmax();
        }
        for (int i = 1; i < num_tiles; ++i) {
            scores(i, turn(2 * i - 1));
            uint32_t const v_slot = turn(2 * i);
            SoftmaxTile<Element, MT, NT> tile(softmax, s, prob, scale_log2);
            add_values(v_slot, [&](int step) { tile.template slice<T::kBlockN / 16 * NO / 2>(step); });
            tile.rescale(o);
        }
        if (num_tiles > 0) add_values(turn(num_ticks - 1), NoWork{});
    } else {
        for (int i = 0; i < num_tiles; ++i) {
            scores(i, turn(2 * i));
            uint32_t const v_slot = turn(2 * i + 1);
            whole_softmax();
            add_values(v_slot, NoWork{});
        }
    }
    store_forward<T>(p, item, head, shared, warp_row, softmax, o);
}

}  // namespace flash_attn::sm80
