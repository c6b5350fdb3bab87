// The plan kernels' loops on one CPU thread: the same functions (plan.h) as plan.cu, for tests/test_plan.py (ctypes).
#include <algorithm>
#include <vector>

#include "../csrc/flash_attn/src/common/plan.h"

using namespace flash_attn;

namespace {

template <typename Item>
void sort_items(std::vector<Item> items, Item* sorted, int capacity) {
    std::stable_sort(items.begin(), items.end(), [](Item const& a, Item const& b) { return a.cost > b.cost; });
    items.resize(capacity);  // surplus entries are zeros
    std::copy(items.begin(), items.end(), sorted);
}

template <typename Count>
int scan_slots(int num_slots, int* first_item, Count count) {
    int total = 0;
    for (int slot = 0; slot < num_slots; ++slot) first_item[slot] = total, total += count(slot);
    return total;
}

}  // namespace

extern "C" int plan_query_capacity(int total_q, int num_segments, int block) {
    return int(query_capacity(total_q, num_segments, block));
}

extern "C" int plan_key_capacity(int total_k, int total_context, int context_in_k, int num_segments, int block, int num_splits) {
    return int(key_capacity(total_k, total_context, context_in_k != 0, num_segments, block, num_splits));
}

// sizes: num_segments, total_q, total_k, total_context, context_in_k, window_left, window_right, fwd_block_m,
// bwd_block_n, num_splits, separate, few_items. Returns 0, or 1 when the lists exceed their capacities.
extern "C" int plan_on_host(int const* segments, int const* sizes, int* row_span, int* block_span, int* query_items, int* key_items) {
    PlanParams p{segments, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4] != 0, sizes[5], sizes[6], sizes[7], sizes[8], sizes[9]};
    p.separate = sizes[10] != 0, p.few_items = sizes[11] != 0;
    p.query_capacity = plan_query_capacity(p.total_q, p.num_segments, p.fwd_block_m);
    p.key_capacity = plan_key_capacity(p.total_k, p.total_context, p.context_in_k, p.num_segments, p.bwd_block_n, p.num_splits);
    std::vector<int> query_runs(3 * query_slots(p), -1), key_runs(3 * key_slots(p), -1);
    p.query_runs = query_runs.data();
    p.key_runs = key_runs.data();

    std::vector<RowSpan> spans(p.total_q);
    for (int row = 0; row < p.total_q; ++row) spans[row] = row_span_of(p, row);
    std::copy(spans.begin(), spans.end(), reinterpret_cast<RowSpan*>(row_span));
    auto const bounds_of = [&](int begin, int end) {
        RowBounds bounds;
        for (int row = begin; row < end; ++row) bounds.add(spans[row]);
        return bounds;
    };
    for (int block = 0; block * kBlockRows < p.total_q; ++block) {
        RowBounds const b = bounds_of(block * kBlockRows, std::min((block + 1) * kBlockRows, p.total_q));
        reinterpret_cast<BlockSpan*>(block_span)[block] = {b.context.key_span(), b.decoded.key_span()};
    }

    for (int chunk = 0; chunk * kChunkSegments < p.num_segments; ++chunk) {
        make_runs(QueryPieces{p, {}}, p.num_segments, chunk, p.fwd_block_m, p.query_runs, p.query_runs + query_slots(p));
        make_runs(DecodedPieces{p, {}}, p.num_segments, chunk, p.bwd_block_n, p.key_runs + 1, p.key_runs + key_slots(p) + 1);
    }
    for (int s = 0; s < p.num_segments; ++s) make_context_run(p, s);
    make_end_runs(p);
    int const num_queries = scan_slots(query_slots(p), p.query_runs + 2 * query_slots(p), [&](int s) { return query_run_items(p, s); });
    int const num_keys = scan_slots(key_slots(p), p.key_runs + 2 * key_slots(p), [&](int s) { return key_run_items(p, s); });

    std::vector<QueryItem> queries;
    for (int i = 0; i < std::min(num_queries, p.query_capacity); ++i) {
        Interval const rows = query_item_rows(p, i);
        queries.push_back(of_segment(p, make_query_item(rows, bounds_of(rows.begin, rows.end))));
    }
    std::vector<KeyItem> keys;
    for (int i = 0; i < std::min(num_keys, p.key_capacity); ++i) {
        KeyTile const tile = key_item_tile(p, i);
        keys.push_back(make_key_item(p, tile, key_item_rows(p, tile, tile.keys, 0, 1), key_item_rows(p, tile, tile.pair, 0, 1)));
    }
    int const num_long = int(std::count_if(keys.begin(), keys.end(), [&](KeyItem const& x) { return x.cost > long_item_rows(p); }));
    for (KeyItem& item : keys) item.num_long = num_long;
    sort_items(queries, reinterpret_cast<QueryItem*>(query_items), p.query_capacity);
    sort_items(keys, reinterpret_cast<KeyItem*>(key_items), p.key_capacity);
    return num_queries > p.query_capacity || num_keys > p.key_capacity;
}
