// The segment table as the plan reads it: clamped values, and which keys a row sees (which rows see a key).
//
//   row o of a segment stands at pos = P + Lk - Lq + o and sees logical keys [pos - left, pos + right] of [0, P + Lk)
//
// Plain functions for host and device. Values are clamped to the tensors' sizes, so that wrong ones never lead out of
// bounds. Used by plan.h.
#pragma once

#include <cstdint>

#include "../../params.h"

#if defined(__CUDACC__)
#define FLASH_ATTN_HOST_DEVICE __host__ __device__ inline
#else
#define FLASH_ATTN_HOST_DEVICE inline
#endif

namespace flash_attn {

struct PlanParams {
    int const* segments;  // (num_segments, 6): q_begin, q_end, context_begin, context_end, k_begin, k_end
    int num_segments;
    int total_q, total_k, total_context;  // rows of the tensors; total_context = total_k where context_in_k
    bool context_in_k;                    // context rows are rows of k, else of a tensor of their own
    int window_left, window_right;        // negative: infinite; right is 0 for causal attention
    int fwd_block_m, bwd_block_n;         // see TileSizes
    int num_splits;                       // row splits of each context item
    int query_capacity, key_capacity;     // entries of the lists
    RowSpan* row_span;
    BlockSpan* block_span;
    QueryItem* query_items;
    KeyItem* key_items;
    // Scratch. Runs are consecutive rows (keys) that are cut into equal tiles; one slot per segment that may begin one.
    int* query_runs;    // 3 x query_slots: begin, end, first item
    int* key_runs;      // 3 x key_slots
    int* num_items;     // [2]: query items, key items
    QueryItem* unsorted_query_items;
    KeyItem* unsorted_key_items;
    bool few_items;  // see few_key_items: decoded tiles are sorted one by one, not run by run
    bool separate;  // no item has rows (keys) of two segments, and items name theirs (Extras)
};

constexpr int kSeparateAlign = 16;  // keys of a separate query item begin at such a multiple from its segment's first

template <typename T>
FLASH_ATTN_HOST_DEVICE T min_of(T a, T b) { return a < b ? a : b; }
template <typename T>
FLASH_ATTN_HOST_DEVICE T max_of(T a, T b) { return a > b ? a : b; }
FLASH_ATTN_HOST_DEVICE int clamp_to(int64_t x, int64_t low, int64_t high) {
    return int(min_of(max_of(x, low), high));
}

struct Interval {
    int begin, end;
    FLASH_ATTN_HOST_DEVICE bool empty() const { return begin >= end; }
};

FLASH_ATTN_HOST_DEVICE Interval hull(Interval a, Interval b) {
    if (a.empty()) return b;
    if (b.empty()) return a;
    return {min_of(a.begin, b.begin), max_of(a.end, b.end)};
}

FLASH_ATTN_HOST_DEVICE Interval intersect(Interval a, Interval b) {
    return {max_of(a.begin, b.begin), min_of(a.end, b.end)};
}

FLASH_ATTN_HOST_DEVICE Interval clamp_interval(int begin, int end, int limit) {
    int const b = clamp_to(begin, 0, limit);
    return {b, max_of(clamp_to(end, 0, limit), b)};
}

struct Segment {
    Interval q, context, k;
    int64_t offset;  // logical position of its first row: P + Lk - Lq

    FLASH_ATTN_HOST_DEVICE int num_rows() const { return q.end - q.begin; }
    FLASH_ATTN_HOST_DEVICE int num_context() const { return context.end - context.begin; }
    FLASH_ATTN_HOST_DEVICE int num_decoded() const { return k.end - k.begin; }
};

FLASH_ATTN_HOST_DEVICE Segment load_segment(PlanParams const& p, int s) {
    int const* row = p.segments + int64_t(s) * 6;
    Segment g;
    g.q = clamp_interval(row[0], row[1], p.total_q);
    g.context = clamp_interval(row[2], row[3], p.total_context);
    g.k = clamp_interval(row[4], row[5], p.total_k);
    if (g.context.empty()) g.context = {0, 0};
    g.offset = int64_t(g.num_context()) + g.num_decoded() - g.num_rows();
    return g;
}

FLASH_ATTN_HOST_DEVICE bool same_context(Segment const& a, Segment const& b) {
    return a.context.begin == b.context.begin && a.context.end == b.context.end;
}

// Segment s is the first of a group of segments with one context.
FLASH_ATTN_HOST_DEVICE bool is_context_head(PlanParams const& p, int s, Segment const& g) {
    return !g.context.empty() && (s == 0 || !same_context(load_segment(p, s - 1), g));
}

FLASH_ATTN_HOST_DEVICE int64_t window_limit(int window) { return window < 0 ? int64_t(1) << 40 : window; }

FLASH_ATTN_HOST_DEVICE RowSpan make_row_span(PlanParams const& p, Segment const& g, int row) {
    int const num_context = g.num_context(), num_decoded = g.num_decoded();
    int64_t const pos = g.offset + (row - g.q.begin);
    int64_t const lo = pos - window_limit(p.window_left);
    int64_t const hi = pos + window_limit(p.window_right) + 1;
    RowSpan r{clamp_to(lo, 0, num_context), clamp_to(hi, 0, num_context),
              clamp_to(lo - num_context, 0, num_decoded), clamp_to(hi - num_context, 0, num_decoded)};
    bool const context = r.context_begin < r.context_end, decoded = r.decoded_begin < r.decoded_end;
    r.context_begin = context ? r.context_begin + g.context.begin : 0;
    r.context_end = context ? r.context_end + g.context.begin : 0;
    r.decoded_begin = decoded ? r.decoded_begin + g.k.begin : 0;
    r.decoded_end = decoded ? r.decoded_end + g.k.begin : 0;
    return r;
}

// Rows of the segment that see a logical key of [begin, end). Exact: both bounds grow with the row.
FLASH_ATTN_HOST_DEVICE Interval rows_seeing_logical(PlanParams const& p, Segment const& g, int64_t begin, int64_t end) {
    if (begin >= end) return {0, 0};
    int64_t const num_rows = g.num_rows();
    int64_t const first = max_of<int64_t>(begin - window_limit(p.window_right) - g.offset, 0);
    int64_t const last = min_of(end + window_limit(p.window_left) - g.offset, num_rows);
    return first < last ? Interval{int(g.q.begin + first), int(g.q.begin + last)} : Interval{0, 0};
}

FLASH_ATTN_HOST_DEVICE Interval rows_seeing_context(PlanParams const& p, Segment const& g, Interval keys) {
    Interval const own = intersect(keys, g.context);
    return rows_seeing_logical(p, g, int64_t(own.begin) - g.context.begin, int64_t(own.end) - g.context.begin);
}

FLASH_ATTN_HOST_DEVICE Interval rows_seeing_decoded(PlanParams const& p, Segment const& g, Interval keys) {
    Interval const own = intersect(keys, g.k);
    int64_t const shift = int64_t(g.num_context()) - g.k.begin;
    return rows_seeing_logical(p, g, own.begin + shift, own.end + shift);
}

}  // namespace flash_attn
