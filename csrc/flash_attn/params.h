// What a launch receives: pointers, strides and the plan's tables. Plain data; no torch, no CUTLASS.
//
// Shapes stand beside each pointer; strides count elements; the last dimension is contiguous everywhere.
// Two regions of keys: *context* (shared by a group of segments) and *decoded* (a segment's own keys). Where the
// context lies inside k and v (packed shared-prompt call) the context pointers equal k and v.
// Every field is filled in flash_api.cpp and read by the kernels; nobody else touches q, k, v.
#pragma once

#include <cstdint>

namespace flash_attn {

constexpr int kBlockRows = 64;  // granularity of the packed query grid: BlockSpan, dQ accumulator, backward row tiles

// Every arch's tiles.h returns one from `constexpr TileSizes tile_sizes(int head_dim)`, or, where tiles depend on what a
// block may use (src/common/shared_memory.h), `tile_sizes(int head_dim, int shared_bytes)`. The plan is built for it.
struct TileSizes {
    int fwd_block_m;  // most rows of a QueryItem (forward and dQ pass)
    int bwd_block_n;  // most keys of a KeyItem
};

// Whether a backward of so many entries of the key list (surplus ones too) for each of so many kv heads is short: then the sm_90a
// kernels take all heads together, longest items first, since a launch is as long as the processor with most to do; else head
// after head, so that all read the same rows and update the same dQ at about the same time.
constexpr bool few_key_items(int64_t entries, int64_t heads, int processors) { return entries * heads <= int64_t(32) * processors; }

// The kernels address a tile of up to 128 rows of 16-bit elements by 32-bit byte offsets; this is what that leaves for a
// row. flash_api.cpp copies tensors of wider rows.
constexpr int64_t kMaxRowStride = (int64_t(1) << 31) / (2 * 128);

// Keys that one packed query row sees. Absolute rows of the context and the decoded tensor; empty means begin >= end.
struct RowSpan {
    int context_begin, context_end;
    int decoded_begin, decoded_end;
};

// Keys that a set of rows sees in one region: some row sees [begin, end), every row sees [full_begin, full_end).
// A key tile inside the full interval needs no mask; one outside [begin, end) is skipped. Rows that see nothing do not
// widen [begin, end) but empty the full interval, which is then [begin, begin). No key at all: four zeros.
struct KeySpan {
    int begin, full_begin, full_end, end;
};

// One 64-row block of the packed grid (rows [64 i, 64 i + 64) clipped to total_q). Used by the backward.
struct BlockSpan {
    KeySpan context, decoded;
};

// One query tile of the forward (and of the dQ pass): rows [row_begin, row_begin + num_rows) of one group.
// num_rows == 0 marks a surplus entry: skip. Rows that see no key still form an item, which writes out 0, lse -inf.
struct QueryItem {
    int row_begin, num_rows;
    int cost;  // key columns to visit; the list is sorted by it, descending
    int segment;  // of its rows, in plans of separate segments (Extras); else 0
    KeySpan context, decoded;
};

// One key tile of the backward: keys [key_begin, key_begin + num_keys) of `region`, visited by rows
// [row_begin, row_end). num_keys == 0 marks a surplus entry: skip. An empty row range writes zero gradients.
struct KeyItem {
    int region;  // 0 decoded, 1 context
    int key_begin, num_keys;
    int row_begin, row_end;
    int cost;
    int split;  // < 0: the item owns its keys and writes dk, dv. >= 0: writes fp32 partials of this split (zeros where
                // its row range is empty); then all num_splits splits of these keys are in the list. Context only.
                // -1, or of decoded keys in plans of separate segments -1 - segment.
    int num_long;  // of the list, the same in every entry: it begins with so many long ones (long_item_rows in plan.h)
};

struct Plan {
    RowSpan const* row_span;        // [total_q]
    BlockSpan const* block_span;    // [ceil(total_q / 64)]
    QueryItem const* query_items;   // [num_query_items], a capacity: surplus entries have num_rows 0
    KeyItem const* key_items;       // [num_key_items], likewise
    int num_query_items, num_key_items;
};

// Options that cost the kernels registers, and so have kernels of their own (the *_extras functions of kernel_table.h). Without
// contexts; the plan is one of separate segments: an item has rows (keys) of one segment, and the keys of a query item begin
// at a multiple of 16 from its segment's first.
//   ALiBi:   S -= slope |row's position - key's position|, positions aligned bottom-right
//   dropout: out = (M / keep) softmax(S) v with M from Philox (src/sm80/extras.h); lse is that of S
struct Extras {
    int const* segments;            // (num_segments, 6)
    float const* alibi_slopes;      // (num_segments or 1, num_heads), or null
    int64_t alibi_segment_stride;   // 0: the same slopes for every segment
    int64_t const* rng_state;       // seed, offset; null: no dropout
    int keep_below;                 // a random byte below it keeps its probability; 1..255
    float keep_scale;               // 1 / (1 - dropout_p)
};

// Forward:  S = q k^T * softmax_scale (softcap: c tanh(S / c)), out = softmax(S) v, lse = log sum exp S.
struct FwdParams {
    void const* q;          // (total_q, num_heads, head_dim)
    void const* k;          // (total_k, num_heads_k, head_dim)
    void const* v;          // (total_k, num_heads_k, head_dim)
    void const* k_context;  // (total_context, num_heads_k, head_dim)
    void const* v_context;  // (total_context, num_heads_k, head_dim)
    void* out;              // (total_q, num_heads, head_dim)
    float* lse;             // (num_heads, total_q), natural log; row stride lse_head_stride

    int64_t q_row_stride, q_head_stride;
    int64_t k_row_stride, k_head_stride;
    int64_t v_row_stride, v_head_stride;
    int64_t k_context_row_stride, k_context_head_stride;
    int64_t v_context_row_stride, v_context_head_stride;
    int64_t out_row_stride, out_head_stride;
    int64_t lse_head_stride;

    int total_q, total_k, total_context;
    int num_heads, num_heads_k;
    int head_dim;           // of the tensors; the kernel's own head dim may be larger (predicated)

    float softmax_scale;
    float softcap;          // 0: off

    int* tile_counter;      // one int, zero at launch (persistent schedulers), or null: items are dealt out in turn
    Plan plan;
    Extras const* extras;   // on the host, for the *_extras functions alone; else null
};

// Backward, with P = exp(S - lse), D = rowsum(dout * out) - dlse:
//   dv = P^T dout, dS = P * (dout v^T - D), dk = dS^T q * softmax_scale, dq = dS k * softmax_scale.
struct BwdParams {
    FwdParams fwd;          // q, k, v, out and lse of the forward; fwd.out and fwd.lse are inputs here

    void const* dout;       // (total_q, num_heads, head_dim)
    float const* dlse;      // (num_heads, total_q) or null
    void* dq;               // (total_q, num_heads, head_dim)
    void* dk;               // (total_k, num_heads_k, head_dim)
    void* dv;
    void* dk_context;       // (total_context, num_heads_k, head_dim); equals dk where the context lies inside k
    void* dv_context;

    int64_t dout_row_stride, dout_head_stride;
    int64_t dlse_head_stride;
    int64_t dq_row_stride, dq_head_stride;
    int64_t dk_row_stride, dk_head_stride;
    int64_t dv_row_stride, dv_head_stride;
    int64_t dk_context_row_stride, dk_context_head_stride;
    int64_t dv_context_row_stride, dv_context_head_stride;

    // Written by the preprocess kernel, both (num_heads, rows_padded) with rows_padded = total_q rounded up to 128:
    float* lse_log2;        // lse * log2(e); +inf where the row sees no key (P becomes 0) and in the padding
    float* dout_dot_out;    // D; 0 in the padding
    float* dq_accum;        // (heads of the chunk, rows_padded, kernel head dim) fp32, opaque order inside a 64-row block
    float* dk_partial;      // (num_splits, total_context, num_heads_k, kernel head dim) fp32, or null; rows are context
                            // rows (rows of k where the context lies inside k: total_context = total_k then)
    float* dv_partial;
    int* split_counts;      // (2, total_context, num_heads_k), zeroed by the preprocess kernel; with partials on the sm_90a path
    int64_t rows_padded;
    int num_splits;

    int head_k_begin, head_k_end;  // kv heads of this launch: dq_accum covers only their query heads
};

}  // namespace flash_attn
