// What the backward reads: the item and its walk over (query head, row block) pairs, and the loads of keys and rows.
//
// Included by bwd_mainloop.h; nothing here computes.
#pragma once

#include "../../params.h"
#include "../common/fragments.h"
#include "../common/mask.h"
#include "traits.h"

namespace flash_attn::sm80 {

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

// An item of the key list: two loads of 16 bytes.
__device__ __forceinline__ KeyItem load_key_item(KeyItem const* items, int index) {
    int4 const low = __ldg(reinterpret_cast<int4 const*>(items + index));
    int4 const high = __ldg(reinterpret_cast<int4 const*>(items + index) + 1);
    return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, 0};
}

// The item and the walk over its (query head, row block) pairs, in shared memory: registers are the backward's limit, so
// these uniform values are read again where they are used. Warp 0 looks at the spans of 32 blocks at once and appends
// those that see the tile to a ring; everyone reads entry `i` of it.
template <typename T>
struct RowBlocks {
    // After refill(i), i % kPeriod == 0, entries to i + kAhead - 1 are there.
    static constexpr int kAhead = T::kListEntries == 64 ? 30 : 64, kPeriod = T::kListEntries == 64 ? 16 : 32;
    static_assert(T::kListEntries >= kAhead + 32 + 2 && kAhead >= kPeriod + 2);
    static constexpr int kProduced = 32, kNextHead = 36, kNextBlock = 40;  // producer's state, behind the item's 32 bytes

    uint32_t const shared;
    BlockSpan const* const spans;
    int const num_heads;  // query heads of a kv head

    __device__ static int aligned(int row) { return row & ~15; }
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
        store_shared_int(at + kNextBlock, (i.row_end - 1 - aligned(i.row_begin)) / T::kBlockM);
    }
    __device__ void refill(int consumed) const {  // warp 0
        int const lane = threadIdx.x % 32, begin = key_begin(), end = begin + num_keys(), tile_end = begin + T::kBlockN;
        int const first = aligned(row_begin()), rows_end = row_end(), last = (rows_end - 1 - first) / T::kBlockM;
        int const first_head = head_k() * num_heads;
        int produced = item(kProduced / 4), head = item(kNextHead / 4), m = item(kNextBlock / 4);
        while (produced < consumed + kAhead && head < num_heads) {
            int const row = first + (m - lane) * T::kBlockM;
            bool seen = false, clean = end == tile_end;
            if (m >= lane) {
#pragma unroll
                for (int i = 0; i <= (T::kBlockM + kBlockRows - 16) / kBlockRows; ++i) {
                    int const b = row / kBlockRows + i;
                    if (b * kBlockRows - row >= min(T::kBlockM, rows_end - row)) break;
                    KeySpan const span = load_key_span(region() ? &spans[b].context : &spans[b].decoded);
                    seen |= span.begin < end && span.end > begin;
                    clean &= is_clean(span, begin, end);
                }
            }
            unsigned const mask = __ballot_sync(0xffffffffu, seen);
            if (seen) put(produced + __popc(mask & ((1u << lane) - 1)), first_head + head, row, clean);
            produced += __popc(mask);
            m -= 32;
            if (m < 0) m = last, ++head;
        }
        if (lane == 0) {
            if (head >= num_heads) put(produced, -1, 0, false), put(produced + 1, -1, 0, false);
            store_shared_int(shared + T::kItem + kProduced, produced);
            store_shared_int(shared + T::kItem + kNextHead, head);
            store_shared_int(shared + T::kItem + kNextBlock, m);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void begin(KeyItem const& i, int head_k) const {  // all threads: the item, the first entries
        if (threadIdx.x < 32) {
            if (threadIdx.x == 0) start(i, head_k);
            __syncwarp();
            refill(0);
        }
        __syncthreads();
    }
    __device__ uint32_t entry(int i) const { return shared + T::kList + i % T::kListEntries * 8; }
    __device__ void put(int i, int head, unsigned row, bool clean) const {
        store_shared_int(entry(i), head);
        store_shared_int(entry(i) + 4, 2 * row + (clean ? 1 : 0));
    }
    __device__ int head(int i) const { return load_shared_int(entry(i)); }  // query head; -1 in the two entries behind the last
    __device__ int row(int i) const { return static_cast<unsigned>(load_shared_int(entry(i) + 4)) >> 1; }  // first of the block
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

// q, k, v, dout and the rows' lse and D to shared memory.
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
    __device__ void rows(uint32_t tile, void const* base, int64_t row_stride, int64_t head_stride, int head, int row) const {
        auto const* source = static_cast<Element const*>(base) + row * row_stride + head * head_stride;
        load_rows<T::kBlockM, T::kHeadDim, T::kThreads>(tile, source, row_stride, blocks.row_begin() - row, blocks.row_end() - row,
                                                        p.fwd.head_dim);
    }
    // q and stats of pair i, dout with it where `with_dout`; nothing behind the last pair.
    __device__ void query(int stage, int i, bool with_dout) const {
        int const head = blocks.head(i), row = blocks.row(i);
        if (head < 0) return;
        rows(shared + T::kQuery + stage * T::kRowBytes, p.fwd.q, p.fwd.q_row_stride, p.fwd.q_head_stride, head, row);
        if (with_dout) dout(T::kDoutStages == 2 ? stage : 0, i);
        stats(i & 1, head, row);
    }
    __device__ void dout(int stage, int i) const {
        int const head = blocks.head(i), row = blocks.row(i);
        if (head < 0) return;
        rows(shared + T::kDout + stage * T::kRowBytes, p.dout, p.dout_row_stride, p.dout_head_stride, head, row);
    }
    __device__ void stats(int stage, int head, int first) const {
        static_assert(2 * T::kBlockM <= T::kThreads);
        int const i = threadIdx.x, row = first + i % T::kBlockM;
        if (i >= 2 * T::kBlockM) return;
        float const* source = (i < T::kBlockM ? p.lse_log2 : p.dout_dot_out) + head * p.rows_padded + row;
        copy_async_4(shared + T::kStats + stage * T::kStatBytes + i * 4, source, row >= blocks.row_begin() && row < blocks.row_end());
    }
    // Keys, the walk's first entries and the first rows: in front of every item's loop.
    __device__ void begin(KeyItem const& item, int head_k) const {
        keys(item, head_k, count_seen_keys<T::kThreads>(p.fwd.plan, item, shared + T::kStats));
        blocks.begin(item, head_k);
        query(0, 0, true);
        copy_async_commit();
    }
};

}  // namespace flash_attn::sm80
