// The plan: segment table -> row spans, block spans, query items, key items (params.h says what they mean).
//
// Functions for host and device: plan.cu runs them on the GPU without a host sync, tests/plan_host.cpp in loops, against
// tests/plan_oracle.py. Called by `plan` in flash_api.cpp, once per micro-batch.
#pragma once

#include "plan_table.h"

namespace flash_attn {

constexpr int kChunkSegments = 64;  // tiles end where a segment's index is a multiple: one thread walks one chunk
constexpr int kCostQuantum = 128;   // a tile of keys (rows) is paid whole
constexpr int kItemCost = 128;      // of any item, in key columns: load of the stationary tile, epilogue
constexpr int kMaxSplits = 4;
constexpr int64_t kSplitRows = 16384;  // a split made to shorten an item has at least as many rows

// Slots of query runs: the segments, then the rows behind the last one.
FLASH_ATTN_HOST_DEVICE int query_slots(PlanParams const& p) { return p.num_segments + 1; }
// Slots of key runs: keys before every segment, the segments' decoded keys, the segments' contexts, the context tensor.
FLASH_ATTN_HOST_DEVICE int key_slots(PlanParams const& p) { return 2 * p.num_segments + 2; }

FLASH_ATTN_HOST_DEVICE int64_t query_capacity(int64_t total_q, int64_t num_segments, int block) {
    return total_q / block + num_segments + 1;  // every run ends in at most one partial tile
}

FLASH_ATTN_HOST_DEVICE int64_t key_capacity(int64_t total_k, int64_t total_context, bool context_in_k,
                                            int64_t num_segments, int block, int num_splits) {
    if (context_in_k)
        return total_k / block + 2 * num_segments + 1 + (num_splits - 1) * (total_k / block + num_segments);
    return total_k / block + num_segments + 1 + num_splits * ((total_context + block - 1) / block);
}

// What a tile visits, as at most two intervals: the regions of a query tile, or the rows of a key tile.
struct Visit {
    Interval first{0, 0}, second{0, 0};

    FLASH_ATTN_HOST_DEVICE int64_t cost() const {
        auto const tiles = [](Interval x) { return (int64_t(x.end) - x.begin + kCostQuantum - 1) / kCostQuantum; };
        return kItemCost + (tiles(first) + tiles(second)) * kCostQuantum;
    }
};

FLASH_ATTN_HOST_DEVICE Visit hull(Visit const& a, Visit const& b) {
    return {hull(a.first, b.first), hull(a.second, b.second)};
}

// Pieces are what a segment contributes to an axis that is tiled: its query rows, or its decoded keys.
struct QueryPieces {
    PlanParams const& p;
    Segment g;  // the current segment

    FLASH_ATTN_HOST_DEVICE Interval load(int s) {
        g = load_segment(p, s);
        return g.q;
    }
    FLASH_ATTN_HOST_DEVICE Visit visit(Interval rows) const {
        Interval const context = intersect(rows, rows_seeing_logical(p, g, 0, g.num_context()));
        Interval const decoded =
            intersect(rows, rows_seeing_logical(p, g, g.num_context(), int64_t(g.num_context()) + g.num_decoded()));
        Visit v;
        if (!context.empty())
            v.first = {make_row_span(p, g, context.begin).context_begin, make_row_span(p, g, context.end - 1).context_end};
        if (!decoded.empty())
            v.second = {make_row_span(p, g, decoded.begin).decoded_begin, make_row_span(p, g, decoded.end - 1).decoded_end};
        return v;
    }
};

// Decoded keys of segment s and the gap behind them, whose rows nobody sees (their gradients are zeros).
FLASH_ATTN_HOST_DEVICE Interval decoded_piece(PlanParams const& p, int s, Segment const& g) {
    Interval piece{g.k.begin, p.total_k};
    if (p.context_in_k && is_context_head(p, s, g)) piece.begin = g.context.end;
    else if (s == 0) piece.begin = 0;
    if (s + 1 < p.num_segments) {
        Segment const next = load_segment(p, s + 1);
        bool const head = p.context_in_k && !next.context.empty() && !same_context(g, next);
        piece.end = head ? next.context.begin : next.k.begin;
    }
    piece.end = max_of(piece.begin, piece.end);
    return piece;
}

struct DecodedPieces {
    PlanParams const& p;
    Segment g;

    FLASH_ATTN_HOST_DEVICE Interval load(int s) {
        g = load_segment(p, s);
        return decoded_piece(p, s, g);
    }
    FLASH_ATTN_HOST_DEVICE Visit visit(Interval keys) const { return {rows_seeing_decoded(p, g, keys), {0, 0}}; }
};

FLASH_ATTN_HOST_DEVICE bool joinable(QueryPieces const& x, Segment const& group) {
    return !x.p.separate && same_context(x.g, group);
}
FLASH_ATTN_HOST_DEVICE bool joinable(DecodedPieces const& x, Segment const&) { return !x.p.separate; }

// Walks the pieces of one chunk of segments and joins them to runs: begin and end of each run at the slot of its first
// piece, an empty interval at all others. At a border inside a tile, the head of the next piece joins the tile when that
// costs less than 3/4 of its share in a tile of its own (equal work in fewer items is worse: they run in parallel). What
// it costs: a wider tile here, and the other tiles of the piece, which then start off the diagonal of a causal mask.
template <typename Pieces>
FLASH_ATTN_HOST_DEVICE void make_runs(Pieces pieces, int num_segments, int chunk, int block, int* begins, int* ends) {
    int const first = chunk * kChunkSegments, last = min_of(first + kChunkSegments, num_segments);
    int head = -1, run_end = 0;
    int filled = 0;  // rows in the run's last, unfinished tile
    bool broken = false;
    Visit tile;      // what that tile visits
    Segment group{};
    for (int s = first; s < last; ++s) {
        begins[s] = ends[s] = 0;
        Interval const piece = pieces.load(s);
        broken = broken || (head >= 0 && !joinable(pieces, group));
        if (piece.empty()) continue;
        int const length = piece.end - piece.begin;
        bool join = head >= 0 && !broken && run_end == piece.begin;
        if (join && filled > 0) {
            int const taken = min_of(length, block - filled), own = min_of(length, block);
            int const rest_begin = piece.begin + taken, rest_tiles = (length - taken + block - 1) / block;
            int64_t const whole = pieces.visit({piece.begin, piece.begin + own}).cost();
            int64_t extra = hull(tile, pieces.visit({piece.begin, rest_begin})).cost() - tile.cost();
            if (rest_tiles > 0) {
                int const rest_end = min_of(rest_begin, piece.end - block) + block;  // no overflow
                int64_t const shifted = pieces.visit({rest_begin, min_of(rest_end, piece.end)}).cost();
                extra += rest_tiles * max_of<int64_t>(shifted - whole, 0);
            }
            join = 4 * extra * own <= 3 * taken * whole;
        }
        if (!join) {
            if (head >= 0) ends[head] = run_end;
            head = s, begins[s] = piece.begin, filled = 0;
        }
        int const room = block - filled;
        if (length < room) {
            Visit const v = pieces.visit(piece);
            tile = filled ? hull(tile, v) : v;
            filled += length;
        } else {
            filled = (length - room) % block;
            if (filled) tile = pieces.visit({piece.end - filled, piece.end});
        }
        run_end = piece.end, group = pieces.g, broken = false;
    }
    if (head >= 0) ends[head] = run_end;
}

// Runs that do not come from joining: contexts inside k (one per group), and the ends of the three axes.
FLASH_ATTN_HOST_DEVICE void make_context_run(PlanParams const& p, int s) {
    Segment const g = load_segment(p, s);
    bool const head = p.context_in_k && is_context_head(p, s, g);
    int const slot = 1 + p.num_segments + s;
    p.key_runs[slot] = head ? g.context.begin : 0;
    p.key_runs[key_slots(p) + slot] = head ? g.context.end : 0;
}

FLASH_ATTN_HOST_DEVICE void make_end_runs(PlanParams const& p) {
    int const s = p.num_segments, slots = key_slots(p);
    p.query_runs[s] = s ? load_segment(p, s - 1).q.end : 0;
    p.query_runs[query_slots(p) + s] = p.total_q;
    p.key_runs[0] = 0;  // before the first piece
    p.key_runs[slots] = s == 0 ? p.total_k : 0;
    if (s > 0 && p.context_in_k) p.key_runs[slots] = load_segment(p, 0).context.begin;
    p.key_runs[slots - 1] = 0;  // a context tensor of its own is covered as a whole
    p.key_runs[2 * slots - 1] = p.context_in_k ? 0 : p.total_context;
}

FLASH_ATTN_HOST_DEVICE int query_run_items(PlanParams const& p, int slot) {
    int const rows = p.query_runs[query_slots(p) + slot] - p.query_runs[slot];
    return rows > 0 ? (rows - 1) / p.fwd_block_m + 1 : 0;
}

FLASH_ATTN_HOST_DEVICE bool is_context_slot(PlanParams const& p, int slot) { return slot > p.num_segments; }

FLASH_ATTN_HOST_DEVICE int key_run_items(PlanParams const& p, int slot) {
    int const keys = p.key_runs[key_slots(p) + slot] - p.key_runs[slot];
    int const tiles = keys > 0 ? (keys - 1) / p.bwd_block_n + 1 : 0;
    return is_context_slot(p, slot) ? tiles * p.num_splits : tiles;
}

// Last slot whose first item is <= i (slots without items have the same first item as their successor).
FLASH_ATTN_HOST_DEVICE int find_run(int const* first_item, int num_slots, int i) {
    int low = 0, high = num_slots;
    while (high - low > 1) {
        int const middle = low + (high - low) / 2;
        if (first_item[middle] <= i) low = middle;
        else high = middle;
    }
    return low;
}

// Segment that holds a row, or -1. q intervals are consecutive; of the clamped ones, so that the spans of rows agree with the
// items also where cu_seqlens goes back.
FLASH_ATTN_HOST_DEVICE int find_segment(PlanParams const& p, int row) {
    int low = 0, high = p.num_segments;  // first segment with q_end > row
    while (low < high) {
        int const middle = low + (high - low) / 2;
        if (load_segment(p, middle).q.end <= row) low = middle + 1;
        else high = middle;
    }
    return low < p.num_segments && load_segment(p, low).q.begin <= row ? low : -1;
}

FLASH_ATTN_HOST_DEVICE RowSpan row_span_of(PlanParams const& p, int row) {
    int const s = find_segment(p, row);
    if (s < 0) return {0, 0, 0, 0};
    Segment const g = load_segment(p, s);
    return row < g.q.end ? make_row_span(p, g, row) : RowSpan{0, 0, 0, 0};
}

// Min and max of the spans of a set of rows, in one region.
struct SpanBounds {
    int begin = INT32_MAX, full_begin = 0, full_end = INT32_MAX, end = 0;

    FLASH_ATTN_HOST_DEVICE void add(int row_begin, int row_end) {
        bool const empty = row_begin >= row_end;
        if (!empty) begin = min_of(begin, row_begin), end = max_of(end, row_end);
        full_begin = max_of(full_begin, row_begin);
        full_end = empty ? 0 : min_of(full_end, row_end);
    }
    FLASH_ATTN_HOST_DEVICE void merge(SpanBounds const& o) {
        begin = min_of(begin, o.begin), end = max_of(end, o.end);
        full_begin = max_of(full_begin, o.full_begin), full_end = min_of(full_end, o.full_end);
    }
    FLASH_ATTN_HOST_DEVICE KeySpan key_span() const {
        if (end == 0) return {0, 0, 0, 0};
        return full_begin < full_end ? KeySpan{begin, full_begin, full_end, end} : KeySpan{begin, begin, begin, end};
    }
};

struct RowBounds {
    SpanBounds context, decoded;

    FLASH_ATTN_HOST_DEVICE void add(RowSpan const& r) {
        context.add(r.context_begin, r.context_end);
        decoded.add(r.decoded_begin, r.decoded_end);
    }
    FLASH_ATTN_HOST_DEVICE void merge(RowBounds const& o) {
        context.merge(o.context);
        decoded.merge(o.decoded);
    }
};

// Rows of the i-th query item in table order.
FLASH_ATTN_HOST_DEVICE Interval query_item_rows(PlanParams const& p, int i) {
    int const slots = query_slots(p);
    int const slot = find_run(p.query_runs + 2 * slots, slots, i);
    int const begin = p.query_runs[slot] + (i - p.query_runs[2 * slots + slot]) * p.fwd_block_m;
    return {begin, min_of(begin + p.fwd_block_m, p.query_runs[slots + slot])};
}

FLASH_ATTN_HOST_DEVICE QueryItem make_query_item(Interval rows, RowBounds const& bounds) {
    QueryItem item{rows.begin, rows.end - rows.begin, 0, 0, bounds.context.key_span(), bounds.decoded.key_span()};
    item.cost = item.context.end - item.context.begin + item.decoded.end - item.decoded.begin;
    return item;
}

// In plans of separate segments: the item's segment, and its keys from an aligned one on (rows' spans do not change).
FLASH_ATTN_HOST_DEVICE QueryItem of_segment(PlanParams const& p, QueryItem item) {
    if (!p.separate) return item;
    item.segment = max_of(find_segment(p, item.row_begin), 0);
    if (item.decoded.begin < item.decoded.end) {
        int const first = load_segment(p, item.segment).k.begin;
        item.decoded.begin -= (item.decoded.begin - first) % kSeparateAlign;
    }
    return item;
}

// Keys of the i-th key item in table order: decoded tiles, then context tiles with their splits, two neighbours in turn. Rows
// are still missing.
struct KeyTile {
    int slot, split;
    Interval keys;
    // Keys whose rows are the item's cost. Of a context tile and its neighbour, those of both: they are cut alike and stay together.
    // Of a decoded tile, those of its run's first tile: tiles of a run stay together, longest first, and share their rows in L2. Of
    // few items, its own: short ones fill up the end of the launch.
    Interval pair;
};

FLASH_ATTN_HOST_DEVICE KeyTile key_item_tile(PlanParams const& p, int i) {
    int const slots = key_slots(p);
    KeyTile t;
    t.slot = find_run(p.key_runs + 2 * slots, slots, i);
    int tile = i - p.key_runs[2 * slots + t.slot];
    int const run_begin = p.key_runs[t.slot], run_end = p.key_runs[slots + t.slot];
    int first = p.few_items ? tile : 0, width = 1;  // tiles of the pair
    t.split = -1;
    if (is_context_slot(p, t.slot)) {
        int const tiles = (run_end - run_begin - 1) / p.bwd_block_n + 1;
        first = tile / (2 * p.num_splits) * 2;
        width = first + 1 < tiles ? 2 : 1;
        int const rest = tile - first * p.num_splits;
        if (p.num_splits > 1) t.split = rest / width;
        tile = first + rest % width;
    }
    int const begin = run_begin + tile * p.bwd_block_n, pair_begin = run_begin + first * p.bwd_block_n;
    t.keys = {begin, min_of(begin + p.bwd_block_n, run_end)};
    t.pair = {pair_begin, min_of(pair_begin + width * p.bwd_block_n, run_end)};
    return t;
}

// Rows that see any of `keys`, those of the tile or of its pair. Segments are visited by `num_lanes` lanes, whose results the
// caller joins.
FLASH_ATTN_HOST_DEVICE Interval key_item_rows(PlanParams const& p, KeyTile const& t, Interval keys, int lane,
                                              int num_lanes) {
    Interval rows{0, 0};
    if (t.slot == 0) return rows;
    if (is_context_slot(p, t.slot)) {
        int const head = p.context_in_k ? t.slot - 1 - p.num_segments : 0;
        Segment const group = head < p.num_segments ? load_segment(p, head) : Segment{};
        for (int s = head + lane; s < p.num_segments; s += num_lanes) {
            Segment const g = load_segment(p, s);
            if (p.context_in_k && !same_context(g, group)) break;
            rows = hull(rows, rows_seeing_context(p, g, keys));
        }
        return rows;
    }
    for (int s = t.slot - 1 + lane; s < p.num_segments; s += num_lanes) {
        Segment const g = load_segment(p, s);
        if (g.k.begin >= keys.end) break;
        rows = hull(rows, rows_seeing_decoded(p, g, keys));
    }
    return rows;
}

// rows: of the tile; pair_rows: of its pair.
FLASH_ATTN_HOST_DEVICE KeyItem make_key_item(PlanParams const& p, KeyTile const& t, Interval rows, Interval pair_rows) {
    if (t.split >= 0 && !pair_rows.empty()) {  // cut on the 64-row grid, so that no block is visited twice
        int64_t const first = pair_rows.begin / kBlockRows, count = (pair_rows.end - 1) / kBlockRows + 1 - first;
        Interval const part{int(first + count * t.split / p.num_splits) * kBlockRows,
                            int(min_of<int64_t>((first + count * (t.split + 1) / p.num_splits) * kBlockRows, INT32_MAX))};
        rows = intersect(rows, part);
        pair_rows = intersect(pair_rows, part);
    }
    if (rows.empty()) rows = {0, 0};
    int const region = is_context_slot(p, t.slot) ? 1 : 0, cost = max_of(0, pair_rows.end - pair_rows.begin);
    int const split = p.separate && region == 0 ? -1 - max_of(t.slot - 1, 0) : t.split;
    return {region, t.keys.begin, t.keys.end - t.keys.begin, rows.begin, rows.end, cost, split, 0};
}

// Within a window, one segment's rows that see a pair of tiles are at most half of this. Longer: the last keys of a context,
// seen by rows of every response. There are few, each many times an ordinary item, so all heads should start theirs first.
FLASH_ATTN_HOST_DEVICE int long_item_rows(PlanParams const& p) {
    if (p.window_left < 0 || p.window_right < 0) return INT32_MAX;
    int64_t const rows = 2 * (int64_t(p.window_left) + p.window_right + 1 + 2 * p.bwd_block_n);
    return rows < INT32_MAX ? int(rows) : INT32_MAX;
}

}  // namespace flash_attn
