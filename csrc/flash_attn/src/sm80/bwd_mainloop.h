// Backward on mma.sync: dK and dV of one KeyItem and kv head a block, dQ added to the fp32 accumulator.
//
//   P = exp(S - lse), dv = P^T dout, dS = P (dout v^T - D), dk = dS^T q scale, dq = dS k scale (scaled by the post kernel).
// The key tile stays in shared memory; the block walks the G query heads of its kv head and, per head, the 64-row blocks of
// the item's row range from the last to the first. dK and dV live in registers and are written once: no atomics on keys.
#pragma once

#include "../../params.h"
#include "../common/fragments.h"
#include "../common/mask.h"
#include "../common/softmax.h"
#include "schedule.h"
#include "traits.h"

namespace flash_attn::sm80 {

// dq_accum is an array of 16x8 mma tiles, row tile major. Inside a tile the four values of a lane lie together where the
// arch adds them in one instruction, else the lanes do.
template <int kHeadDim>
__device__ __forceinline__ int64_t dq_tile_offset(int64_t row_tile, int column_tile) {
    return (row_tile * (kHeadDim / 8) + column_tile) * 128;
}

__device__ __forceinline__ void add_dq_tile(float* tile, float const (&v)[4]) {
    int const lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(tile + lane * 4), "f"(v[0]), "f"(v[1]),
                 "f"(v[2]), "f"(v[3])
                 : "memory");
#else
#pragma unroll
    for (int j = 0; j < 4; ++j) atomicAdd(tile + j * 32 + lane, v[j]);
#endif
}

__device__ __forceinline__ int load_shared_int(uint32_t address) {
    int x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ void store_shared_int(uint32_t address, int x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ float load_shared(uint32_t address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

// The item and the walk over its (query head, row block) pairs, in shared memory: registers are the backward's limit, so
// these uniform values are read again where they are used. Warp 0 looks at the spans of 32 blocks at once and appends
// those that see the tile to a ring; everyone reads entry `i` of it.
template <typename T>
struct RowBlocks {
    static constexpr int kAhead = 64, kPeriod = 32;  // after refill(i), i % kPeriod == 0, entries to i + kAhead - 1 are there
    static_assert(T::kListEntries >= kAhead + 32 + 2);
    static constexpr int kProduced = 32, kNextHead = 36, kNextBlock = 40;  // producer's state, behind the item's 32 bytes

    uint32_t const shared;
    BlockSpan const* const spans;
    int const num_heads;  // query heads of a kv head

    __device__ int item(int field) const { return load_shared_int(shared + T::kItem + 4 * field); }
    __device__ int region() const { return item(0); }
    __device__ int key_begin() const { return item(1); }
    __device__ int num_keys() const { return item(2); }
    __device__ int row_begin() const { return item(3); }
    __device__ int row_end() const { return item(4); }
    __device__ int head_k() const { return item(5); }
    __device__ int split() const { return item(6); }

    __device__ void start(KeyItem const& i, int head_k) const {  // one thread
        uint32_t const at = shared + T::kItem;
        store_shared_int(at, i.region), store_shared_int(at + 4, i.key_begin), store_shared_int(at + 8, i.num_keys);
        store_shared_int(at + 12, i.row_begin), store_shared_int(at + 16, i.row_end);
        store_shared_int(at + 20, head_k), store_shared_int(at + 24, i.split);
        store_shared_int(at + kProduced, 0);
        store_shared_int(at + kNextHead, i.row_begin < i.row_end ? 0 : num_heads);
        store_shared_int(at + kNextBlock, (i.row_end - 1) / T::kBlockM);
    }
    __device__ void refill(int consumed) const {  // warp 0
        int const lane = threadIdx.x % 32, begin = key_begin(), end = begin + num_keys(), tile_end = begin + T::kBlockN;
        int const first = row_begin() / T::kBlockM, last = (row_end() - 1) / T::kBlockM;
        int const first_head = head_k() * num_heads;
        int produced = item(kProduced / 4), head = item(kNextHead / 4), m = item(kNextBlock / 4);
        while (produced < consumed + kAhead && head < num_heads) {
            int const mine = m - lane;
            bool seen = false, clean = end == tile_end;
            if (mine >= first) {
                int const block = mine * T::kBlockM / kBlockRows;
#pragma unroll
                for (int b = block; b < block + (T::kBlockM + kBlockRows - 1) / kBlockRows; ++b) {
                    if (b > block && b * kBlockRows >= row_end()) break;
                    KeySpan const span = load_key_span(region() ? &spans[b].context : &spans[b].decoded);
                    seen |= span.begin < end && span.end > begin;
                    clean &= is_clean(span, begin, end);
                }
            }
            unsigned const mask = __ballot_sync(0xffffffffu, seen);
            if (seen) put(produced + __popc(mask & ((1u << lane) - 1)), first_head + head, mine, clean);
            produced += __popc(mask);
            m -= 32;
            if (m < first) m = last, ++head;
        }
        if (lane == 0) {
            if (head >= num_heads) put(produced, -1, 0, false), put(produced + 1, -1, 0, false);
            store_shared_int(shared + T::kItem + kProduced, produced);
            store_shared_int(shared + T::kItem + kNextHead, head);
            store_shared_int(shared + T::kItem + kNextBlock, m);
        }
        __syncwarp();
    }
    __device__ uint32_t entry(int i) const { return shared + T::kList + i % T::kListEntries * 8; }
    __device__ void put(int i, int head, int m, bool clean) const {
        store_shared_int(entry(i), head);
        store_shared_int(entry(i) + 4, 2 * m + (clean ? 1 : 0));
    }
    __device__ int head(int i) const { return load_shared_int(entry(i)); }  // query head; -1 in the two entries behind the last
    __device__ int block(int i) const { return static_cast<unsigned>(load_shared_int(entry(i) + 4)) >> 1; }
    __device__ bool clean(int i) const { return load_shared_int(entry(i) + 4) & 1; }
};

// Keys from the tile's start that some row of the item may see: keys behind them (padding behind the last segment may hold
// anything) must not be read.
template <int kThreads>
__device__ __forceinline__ int count_seen_keys(Plan const& plan, KeyItem const& item, uint32_t scratch) {
    if (item.row_begin >= item.row_end) return 0;
    int const key_end = item.key_begin + item.num_keys;
    RowSpan const& last = plan.row_span[item.row_end - 1];
    if ((item.region ? last.context_end : last.decoded_end) >= key_end) return item.num_keys;
    int end = 0;
#pragma unroll 1
    for (int b = item.row_begin / kBlockRows + threadIdx.x; b <= (item.row_end - 1) / kBlockRows; b += kThreads)
        end = max(end, item.region ? plan.block_span[b].context.end : plan.block_span[b].decoded.end);
    end = __reduce_max_sync(0xffffffffu, end);
    store_shared_int(scratch + threadIdx.x / 32 * 4, end);
    __syncthreads();
    for (int w = 0; w < kThreads / 32; ++w) end = max(end, load_shared_int(scratch + w * 4));
    __syncthreads();
    return max(0, min(end, key_end) - item.key_begin);
}

template <int kThreads>
__device__ __forceinline__ void slab_barrier(int slab) {
    asm volatile("bar.sync %0, %1;" ::"r"(slab + 1), "n"(kThreads) : "memory");
}

template <typename T>
struct BackwardLoader {
    using Element = typename T::Element;
    BwdParams const& p;
    RowBlocks<T> const& blocks;
    uint32_t const shared;

    __device__ void keys(KeyItem const& item, int head_k, int num_seen) const {
        FwdParams const& f = p.fwd;
        auto const one = [&](uint32_t tile, void const* base, int64_t row_stride, int64_t head_stride) {
            auto const* source = static_cast<Element const*>(base) + item.key_begin * row_stride + head_k * head_stride;
            load_rows<T::kBlockN, T::kHeadDim, T::kThreads>(tile, source, row_stride, 0, num_seen, f.head_dim);
        };
        bool const context = item.region != 0;
        one(shared + T::kKey, context ? f.k_context : f.k, context ? f.k_context_row_stride : f.k_row_stride,
            context ? f.k_context_head_stride : f.k_head_stride);
        one(shared + T::kValue, context ? f.v_context : f.v, context ? f.v_context_row_stride : f.v_row_stride,
            context ? f.v_context_head_stride : f.v_head_stride);
    }
    // Rows outside the item's range (other groups, padding) become zero in q, dout, lse and D: their P is then finite and
    // meets only zeros.
    __device__ void rows(uint32_t tile, void const* base, int64_t row_stride, int64_t head_stride, int head, int m) const {
        int const row = m * T::kBlockM;
        auto const* source = static_cast<Element const*>(base) + row * row_stride + head * head_stride;
        load_rows<T::kBlockM, T::kHeadDim, T::kThreads>(tile, source, row_stride, blocks.row_begin() - row, blocks.row_end() - row,
                                                        p.fwd.head_dim);
    }
    // q and stats of pair i, dout with it where `with_dout`; nothing behind the last pair.
    __device__ void query(int stage, int i, bool with_dout) const {
        int const head = blocks.head(i), m = blocks.block(i);
        if (head < 0) return;
        rows(shared + T::kQuery + stage * T::kRowBytes, p.fwd.q, p.fwd.q_row_stride, p.fwd.q_head_stride, head, m);
        if (with_dout) dout(T::kDoutStages == 2 ? stage : 0, i);
        stats(i & 1, head, m);
    }
    __device__ void dout(int stage, int i) const {
        int const head = blocks.head(i), m = blocks.block(i);
        if (head < 0) return;
        rows(shared + T::kDout + stage * T::kRowBytes, p.dout, p.dout_row_stride, p.dout_head_stride, head, m);
    }
    __device__ void stats(int stage, int head, int m) const {
        static_assert(2 * T::kBlockM <= T::kThreads);
        int const i = threadIdx.x, row = m * T::kBlockM + i % T::kBlockM;
        if (i >= 2 * T::kBlockM) return;
        float const* source = (i < T::kBlockM ? p.lse_log2 : p.dout_dot_out) + head * p.rows_padded + row;
        copy_async_4(shared + T::kStats + stage * T::kStatBytes + i * 4, source, row >= blocks.row_begin() && row < blocks.row_end());
    }
};

// Spans of a warp's rows applied to its scores; read from global memory, since few tiles of few items need them.
template <typename T, int MT, int NT>
__device__ __forceinline__ void mask_scores(float (&s)[MT][NT][4], FwdParams const& p, RowBlocks<T> const& blocks, int m,
                                            int warp_row, int warp_column) {
    int const lane = threadIdx.x % 32, column = blocks.key_begin() + warp_column + lane % 4 * 2;
    int const key_end = blocks.key_begin() + blocks.num_keys(), region = blocks.region();
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const row = m * T::kBlockM + warp_row + mt * 16 + half * 8 + lane / 4;
            int2 span = make_int2(0, 0);
            if (row < p.total_q) span = __ldg(reinterpret_cast<int2 const*>(p.plan.row_span + row) + (region ? 0 : 1));
            mask_row<16 * T::kColsS>(s[mt], half, span.x - column, min(span.y, key_end) - column, -INFINITY);
        }
    }
}

// dK or dV of the item: through shared memory to the tensor, or as fp32 partials of a split.
template <typename T>
__device__ __forceinline__ void store_keys(float (&acc)[T::kTilesN][2 * T::kPairsD][4], float scale, uint32_t stage, void* base,
                                           int64_t row_stride, int64_t head_stride, float* partial, BwdParams const& p,
                                           RowBlocks<T> const& blocks) {
    using Element = typename T::Element;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const warp_n = warp / T::kColsD, warp_d = warp % T::kColsD;
    int const key_begin = blocks.key_begin(), num_keys = blocks.num_keys(), split = blocks.split(), head_k = blocks.head_k();
#pragma unroll
    for (int mt = 0; mt < T::kTilesN; ++mt)
#pragma unroll
        for (int nt = 0; nt < 2 * T::kPairsD; ++nt)
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[mt][nt][j] *= scale;
    if (split >= 0) {
#pragma unroll
        for (int mt = 0; mt < T::kTilesN; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int const key = 16 * (warp_n + T::kWarpsN * mt) + half * 8 + lane / 4;
                int64_t const row = static_cast<int64_t>(split) * p.fwd.total_context + key_begin + key;
                float* const to = partial + (row * p.fwd.num_heads_k + head_k) * T::kHeadDim + lane % 4 * 2;
#pragma unroll
                for (int nt = 0; nt < 2 * T::kPairsD; ++nt) {
                    int const column = 16 * (warp_d + T::kColsD * (nt / 2)) + nt % 2 * 8;
                    if (key < num_keys)
                        *reinterpret_cast<float2*>(to + column) = make_float2(acc[mt][nt][2 * half], acc[mt][nt][2 * half + 1]);
                }
            }
        }
        return;
    }
#pragma unroll
    for (int mt = 0; mt < T::kTilesN; ++mt)
#pragma unroll
        for (int np = 0; np < T::kPairsD; ++np)
            store_pair<Element, T::kHeadDim>(stage, 16 * (warp_n + T::kWarpsN * mt), 2 * (warp_d + T::kColsD * np), acc[mt][2 * np],
                                             acc[mt][2 * np + 1]);
    __syncthreads();
    auto* to = static_cast<Element*>(base) + key_begin * row_stride + head_k * head_stride;
    store_rows<T::kBlockN, T::kHeadDim, T::kThreads>(to, row_stride, stage, 0, threadIdx.x, num_keys, p.fwd.head_dim);
}

template <typename T, bool kSoftcap, bool kAccumulateDq>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSm) backward_kernel(BwdParams const __grid_constant__ p, int const group,
                                                                                     int const section_heads) {
    using Element = typename T::Element;
    constexpr int kD = T::kHeadDim, kN = T::kBlockN, MT = T::kTilesM, NS = T::kPairsS;
    extern __shared__ __align__(1024) char shared_bytes[];
    uint32_t const shared = shared_address(shared_bytes);

    FwdParams const& f = p.fwd;
    int index, head_k;
    decode_block(f.plan.num_key_items, p.head_k_end - p.head_k_begin, section_heads, index, head_k);
    head_k += p.head_k_begin;
    int4 const item_low = __ldg(reinterpret_cast<int4 const*>(f.plan.key_items + index));
    int4 const item_high = __ldg(reinterpret_cast<int4 const*>(f.plan.key_items + index) + 1);
    KeyItem const item{item_low.x, item_low.y, item_low.z, item_low.w, item_high.x, item_high.y, item_high.z, 0};
    if (item.num_keys <= 0) return;

    RowBlocks<T> const blocks{shared, f.plan.block_span, group};
    BackwardLoader<T> const load{p, blocks, shared};
    load.keys(item, head_k, count_seen_keys<T::kThreads>(f.plan, item, shared + T::kStats));
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) blocks.start(item, head_k);
        __syncwarp();
        blocks.refill(0);
    }
    __syncthreads();
    load.query(0, 0, true);
    copy_async_commit();
    if constexpr (T::kQueryStages == 2) {
        load.query(1, 1, T::kDoutStages == 2);
        copy_async_commit();
    }
    if constexpr (T::kQueryStages == 2) {
        copy_async_wait<1>();
        __syncthreads();
    }

    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const slab = warp / T::kWarpsM, row_s = 16 * MT * (warp % T::kWarpsM), column_s = 16 * slab, warp_d = warp % T::kColsD;
    // Lane addresses serve two tiles of the same shape, a constant apart: q and dout, K and V, P and dS.
    constexpr int kQueryToDout = T::kDout - T::kQuery, kKeyToValue = T::kValue - T::kKey, kPToDs = T::kDs - T::kP;
    auto const q_s = lane_a<kD>(shared + T::kQuery, row_s);
    auto const k_s = lane_b<kD>(shared + T::kKey, column_s);
    auto const q_t = lane_b_transposed<kD>(shared + T::kQuery, 2 * warp_d);
    float const scale_log2 = (kSoftcap ? f.softcap : f.softmax_scale) * kLog2E;

    float dk[T::kTilesN][2 * T::kPairsD][4], dv[T::kTilesN][2 * T::kPairsD][4];
    clear(dk);
    clear(dv);
    for (int i = 0; blocks.head(i) >= 0; ++i) {
        int const stage = i & 1;
        uint32_t const q_stage = T::kQueryStages == 2 ? stage * T::kRowBytes : 0;
        uint32_t const dout_stage = T::kDoutStages == 2 ? stage * T::kRowBytes : 0;
        uint32_t const ds_stage = T::kDsStages == 2 ? stage * T::kScoreBytes : 0;
        if constexpr (T::kQueryStages == 1) {
            copy_async_wait<0>();
            __syncthreads();
        }
        if (i > 0 && i % RowBlocks<T>::kPeriod == 0 && threadIdx.x < 32) blocks.refill(i);

        float s[MT][2 * NS][4];
        clear(s);
        auto const q_now = q_s.moved(q_stage), k_now = k_s.moved(0);
        gemm<Element, kD / 16>(
            s,
            [&](int kk, uint32_t(&a)[MT][4]) {
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) load_matrix(a[mt], q_now.at(16 * mt, 2 * kk));
            },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix(b, k_now.at(16 * T::kColsS * np, 2 * kk)); });
        if constexpr (kSoftcap) apply_softcap(s, f.softmax_scale / f.softcap);
        if (!blocks.clean(i)) mask_scores<T>(s, f, blocks, blocks.block(i), row_s, column_s);

        uint32_t const stats = shared + T::kStats + stage * T::kStatBytes + (row_s + lane / 4) * 4;
        auto const exponent = [&](float x, float lse) { return exp2_fast(fmaf(x, scale_log2, -lse)); };
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
            float const lse[2] = {load_shared(stats + mt * 64), load_shared(stats + mt * 64 + 32)};
#pragma unroll
            for (int np = 0; np < NS; ++np) {
                float prob[2][4];
#pragma unroll
                for (int nt = 0; nt < 2; ++nt)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        prob[nt][j] = exponent(s[mt][2 * np + nt][j], lse[j / 2]);
                        if constexpr (!kSoftcap) s[mt][2 * np + nt][j] = prob[nt][j];
                    }
                store_pair<Element, kN>(shared + T::kP, row_s + 16 * mt, column_s / 8 + 2 * T::kColsS * np, prob[0], prob[1]);
            }
        }

        if constexpr (T::kQueryStages == 2 && T::kDoutStages == 1) {
            copy_async_wait<1>();
            __syncthreads();
        }
        float dp[MT][2 * NS][4];
        clear(dp);
        auto const dout_now = q_s.moved(kQueryToDout + dout_stage), v_now = k_s.moved(kKeyToValue);
        gemm<Element, kD / 16>(
            dp,
            [&](int kk, uint32_t(&a)[MT][4]) {
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) load_matrix(a[mt], dout_now.at(16 * mt, 2 * kk));
            },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix(b, v_now.at(16 * T::kColsS * np, 2 * kk)); });
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
            uint32_t const delta_at = stats + T::kBlockM * 4 + mt * 64;
            float const delta[2] = {load_shared(delta_at), load_shared(delta_at + 32)};
            float lse[2];
            if constexpr (kSoftcap) lse[0] = load_shared(stats + mt * 64), lse[1] = load_shared(stats + mt * 64 + 32);
#pragma unroll
            for (int np = 0; np < NS; ++np) {
#pragma unroll
                for (int nt = 2 * np; nt < 2 * np + 2; ++nt)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float x = s[mt][nt][j];
                        if constexpr (kSoftcap) x = x == -INFINITY ? 0.f : exponent(x, lse[j / 2]) * (1.f - x * x);
                        dp[mt][nt][j] = x * (dp[mt][nt][j] - delta[j / 2]);
                    }
                store_pair<Element, kN>(shared + T::kDs + ds_stage, row_s + 16 * mt, column_s / 8 + 2 * T::kColsS * np, dp[mt][2 * np],
                                        dp[mt][2 * np + 1]);
            }
        }
        slab_barrier<32 * T::kWarpsM>(slab);

        // Computed anew in every round, since a register for each would not fit.
        int const late_warp = opaque(threadIdx.x) / 32;
        auto const p_now = lane_a_transposed<kN>(shared + T::kP, 2 * (late_warp / T::kColsD));
        auto const dout_t = q_t.moved(kQueryToDout + dout_stage);
        gemm<Element, T::kBlockM / 16>(
            dv,
            [&](int kk, uint32_t(&a)[T::kTilesN][4]) {
#pragma unroll
                for (int mt = 0; mt < T::kTilesN; ++mt) load_matrix_transposed(a[mt], p_now.at(16 * kk, 2 * T::kWarpsN * mt));
            },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix_transposed(b, dout_t.at(16 * kk, 2 * T::kColsD * np)); });
        auto const ds_now = p_now.moved(kPToDs + ds_stage);
        auto const q_t_now = q_t.moved(q_stage);
        gemm<Element, T::kBlockM / 16>(
            dk,
            [&](int kk, uint32_t(&a)[T::kTilesN][4]) {
#pragma unroll
                for (int mt = 0; mt < T::kTilesN; ++mt) load_matrix_transposed(a[mt], ds_now.at(16 * kk, 2 * T::kWarpsN * mt));
            },
            [&](int kk, int np, uint32_t(&b)[4]) { load_matrix_transposed(b, q_t_now.at(16 * kk, 2 * T::kColsD * np)); });
        // Everyone is done with the rows of block i, dS is whole, and with two stages the rows of block i + 1 are there.
        copy_async_wait<0>();
        __syncthreads();
        if constexpr (T::kDoutStages == 1) {
            load.dout(0, i + 1);
            if constexpr (T::kQueryStages == 2) copy_async_commit();
        }
        load.query(T::kQueryStages == 2 ? stage : 0, i + T::kQueryStages, T::kDoutStages == 2);
        copy_async_commit();
        if constexpr (kAccumulateDq) {
            float dq[T::kTilesQ][2 * T::kPairsQ][4];
            clear(dq);
            int const warp_q = late_warp / T::kColsQ, warp_e = late_warp % T::kColsQ;
            auto const ds_q_now = lane_a<kN>(shared + T::kDs + ds_stage, 16 * T::kTilesQ * warp_q);
            auto const k_q_now = lane_b_transposed<kD>(shared + T::kKey, 2 * warp_e);
            gemm<Element, kN / 16>(
                dq,
                [&](int kk, uint32_t(&a)[T::kTilesQ][4]) {
#pragma unroll
                    for (int mt = 0; mt < T::kTilesQ; ++mt) load_matrix(a[mt], ds_q_now.at(16 * mt, 2 * kk));
                },
                [&](int kk, int np, uint32_t(&b)[4]) { load_matrix_transposed(b, k_q_now.at(16 * kk, 2 * T::kColsQ * np)); });
            int const head_of_chunk = blocks.head(i) - p.head_k_begin * group;
            float* const accum = p.dq_accum + head_of_chunk * p.rows_padded * kD;
#pragma unroll
            for (int mt = 0; mt < T::kTilesQ; ++mt) {
                float* const row = accum + dq_tile_offset<kD>(blocks.block(i) * (T::kBlockM / 16) + warp_q * T::kTilesQ + mt, 0);
#pragma unroll
                for (int nt = 0; nt < 2 * T::kPairsQ; ++nt)
                    add_dq_tile(row + (2 * (warp_e + T::kColsQ * (nt / 2)) + nt % 2) * 128, dq[mt][nt]);
            }
        }
    }
    __syncthreads();  // the key tiles become staging
    bool const context = blocks.region() != 0;
    store_keys<T>(dv, 1.f, shared + T::kValue, context ? p.dv_context : p.dv, context ? p.dv_context_row_stride : p.dv_row_stride,
                  context ? p.dv_context_head_stride : p.dv_head_stride, p.dv_partial, p, blocks);
    store_keys<T>(dk, f.softmax_scale, shared + T::kKey, context ? p.dk_context : p.dk,
                  context ? p.dk_context_row_stride : p.dk_row_stride, context ? p.dk_context_head_stride : p.dk_head_stride,
                  p.dk_partial, p, blocks);
}

}  // namespace flash_attn::sm80
