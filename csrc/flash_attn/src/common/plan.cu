// The plan on the GPU, three launches and no host sync (functions and formulas: plan.h):
//   spans and runs -> items with their spans -> lists sorted by cost, descending and stable.
#include "plan_launch.h"

namespace flash_attn {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ RowBounds join_lanes(RowBounds b) {
    auto const join = [](SpanBounds& x, int offset) {
        SpanBounds y;
        y.begin = __shfl_xor_sync(kAllLanes, x.begin, offset);
        y.full_begin = __shfl_xor_sync(kAllLanes, x.full_begin, offset);
        y.full_end = __shfl_xor_sync(kAllLanes, x.full_end, offset);
        y.end = __shfl_xor_sync(kAllLanes, x.end, offset);
        x.merge(y);
    };
    for (int offset = 16; offset > 0; offset /= 2) join(b.context, offset), join(b.decoded, offset);
    return b;
}

// Row spans of one 64-row block, by one warp.
__device__ void write_block(PlanParams const& p, int block, int lane) {
    RowBounds bounds;
    for (int row = block * kBlockRows + lane; row < min((block + 1) * kBlockRows, p.total_q); row += 32) {
        RowSpan const span = row_span_of(p, row);
        reinterpret_cast<int4*>(p.row_span)[row] =
            make_int4(span.context_begin, span.context_end, span.decoded_begin, span.decoded_end);
        bounds.add(span);
    }
    bounds = join_lanes(bounds);
    if (lane == 0) p.block_span[block] = {bounds.context.key_span(), bounds.decoded.key_span()};
}

// first_item[slot] = items of all slots before it; returns the total to every thread. One thread block.
template <typename Count>
__device__ int scan_slots(int num_slots, int* first_item, Count count) {
    __shared__ int warp_sum[kWarps];
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int total = 0;
    for (int base = 0; base < num_slots; base += kThreads) {
        int const slot = base + threadIdx.x;
        int const own = slot < num_slots ? count(slot) : 0;
        int sum = own;  // inclusive, in the warp
        for (int offset = 1; offset < 32; offset *= 2) {
            int const other = __shfl_up_sync(kAllLanes, sum, offset);
            if (lane >= offset) sum += other;
        }
        if (lane == 31) warp_sum[warp] = sum;
        __syncthreads();
        int before = total;
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp) before += warp_sum[w];
            total += warp_sum[w];
        }
        if (slot < num_slots) first_item[slot] = before + sum - own;
        __syncthreads();
    }
    return total;
}

// Block 0 joins segments to runs; the other blocks write the spans of rows.
__global__ void __launch_bounds__(kThreads) plan_spans_kernel(__grid_constant__ PlanParams const p) {
    if (blockIdx.x > 0) {
        int const block = (blockIdx.x - 1) * kWarps + threadIdx.x / 32;
        if (block * kBlockRows < p.total_q) write_block(p, block, threadIdx.x % 32);
        return;
    }
    int const slots = key_slots(p), num_chunks = (p.num_segments + kChunkSegments - 1) / kChunkSegments;
    // One walk a thread, dealt to the warps first: walks of one warp diverge.
    for (int i = threadIdx.x % 32 * kWarps + threadIdx.x / 32; i < 2 * num_chunks; i += kThreads) {
        int const chunk = i / 2;
        if (i % 2 == 0)
            make_runs(QueryPieces{p, {}}, p.num_segments, chunk, p.fwd_block_m, p.query_runs, p.query_runs + query_slots(p));
        else
            make_runs(DecodedPieces{p, {}}, p.num_segments, chunk, p.bwd_block_n, p.key_runs + 1,
                      p.key_runs + slots + 1);
    }
    for (int s = threadIdx.x; s < p.num_segments; s += kThreads) make_context_run(p, s);
    if (threadIdx.x == 0) make_end_runs(p);
    __syncthreads();
    int const num_queries = scan_slots(query_slots(p), p.query_runs + 2 * query_slots(p),
                                       [&](int slot) { return query_run_items(p, slot); });
    int const num_keys = scan_slots(slots, p.key_runs + 2 * slots, [&](int slot) { return key_run_items(p, slot); });
    if (threadIdx.x == 0) {
        p.num_items[0] = min(num_queries, p.query_capacity);
        p.num_items[1] = min(num_keys, p.key_capacity);
    }
}

// One warp an item.
__global__ void __launch_bounds__(kThreads) plan_items_kernel(__grid_constant__ PlanParams const p) {
    int i = blockIdx.x * kWarps + threadIdx.x / 32;
    int const lane = threadIdx.x % 32;
    if (i < p.query_capacity) {
        if (i >= p.num_items[0]) return;
        Interval const rows = query_item_rows(p, i);
        RowBounds bounds;
        for (int row = rows.begin + lane; row < rows.end; row += 32) bounds.add(p.row_span[row]);
        bounds = join_lanes(bounds);
        if (lane == 0) p.unsorted_query_items[i] = of_segment(p, make_query_item(rows, bounds));
        return;
    }
    i -= p.query_capacity;
    if (i >= p.num_items[1]) return;
    KeyTile const tile = key_item_tile(p, i);
    auto const rows_of = [&](Interval keys) {
        Interval rows = key_item_rows(p, tile, keys, lane, 32);
        for (int offset = 16; offset > 0; offset /= 2)
            rows = hull(rows, Interval{__shfl_xor_sync(kAllLanes, rows.begin, offset), __shfl_xor_sync(kAllLanes, rows.end, offset)});
        return rows;
    };
    Interval const rows = rows_of(tile.keys), pair_rows = rows_of(tile.pair);
    if (lane == 0) p.unsorted_key_items[i] = make_key_item(p, tile, rows, pair_rows);
}

__device__ void set_num_long(QueryItem&, int) {}
__device__ void set_num_long(KeyItem& item, int count) { item.num_long = count; }

// Moves item i to its rank: the number of items that cost more, or as much and stand before it. Quadratic, in parallel.
// Items that cost more than `long_cost` are counted.
template <typename Item>
__device__ void sort_items(Item const* items, Item* sorted, int num_items, int capacity, int i, int long_cost) {
    __shared__ int costs[kThreads];
    int const own = i < num_items ? items[i].cost : 0;
    int rank = 0, num_long = 0;
    for (int base = 0; base < num_items; base += kThreads) {
        __syncthreads();
        if (base + int(threadIdx.x) < num_items) costs[threadIdx.x] = items[base + threadIdx.x].cost;
        __syncthreads();
        int const count = min(kThreads, num_items - base), before = i - base;
        for (int j = 0; j < count; ++j) {
            rank += costs[j] > own || (costs[j] == own && j < before);
            num_long += costs[j] > long_cost;
        }
    }
    if (i < num_items) {
        Item item = items[i];
        set_num_long(item, num_long);
        sorted[rank] = item;
    } else if (i < capacity) sorted[i] = Item{};
}

__global__ void __launch_bounds__(kThreads) plan_sort_kernel(__grid_constant__ PlanParams const p) {
    int const query_blocks = (p.query_capacity + kThreads - 1) / kThreads;
    int const block = blockIdx.x;
    if (block < query_blocks)
        sort_items(p.unsorted_query_items, p.query_items, p.num_items[0], p.query_capacity, block * kThreads + threadIdx.x,
                   INT32_MAX);
    else
        sort_items(p.unsorted_key_items, p.key_items, p.num_items[1], p.key_capacity,
                   (block - query_blocks) * kThreads + threadIdx.x, long_item_rows(p));
}

int64_t aligned(int64_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace

int64_t plan_scratch_bytes(PlanParams const& p) {
    return aligned(12ll * query_slots(p)) + aligned(12ll * key_slots(p)) + 16 +
           int64_t(sizeof(QueryItem)) * p.query_capacity + int64_t(sizeof(KeyItem)) * p.key_capacity;
}

void set_plan_scratch(PlanParams& p, void* scratch) {
    char* at = static_cast<char*>(scratch);
    auto const take = [&at](int64_t bytes) {
        char* const begin = at;
        at += aligned(bytes);
        return static_cast<void*>(begin);
    };
    p.query_runs = static_cast<int*>(take(12ll * query_slots(p)));
    p.key_runs = static_cast<int*>(take(12ll * key_slots(p)));
    p.num_items = static_cast<int*>(take(8));
    p.unsorted_query_items = static_cast<QueryItem*>(take(int64_t(sizeof(QueryItem)) * p.query_capacity));
    p.unsorted_key_items = static_cast<KeyItem*>(take(int64_t(sizeof(KeyItem)) * p.key_capacity));
}

cudaError_t run_plan(PlanParams const& p, cudaStream_t stream) {
    auto const blocks = [](int64_t n, int64_t per_block) { return unsigned((n + per_block - 1) / per_block); };
    plan_spans_kernel<<<1 + blocks(p.total_q, kWarps * kBlockRows), kThreads, 0, stream>>>(p);
    plan_items_kernel<<<blocks(int64_t(p.query_capacity) + p.key_capacity, kWarps), kThreads, 0, stream>>>(p);
    plan_sort_kernel<<<blocks(p.query_capacity, kThreads) + blocks(p.key_capacity, kThreads), kThreads, 0, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace flash_attn
