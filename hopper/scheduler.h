// Order of work: sections of heads whose operands fit in L2 together, inside a section the plan's list (longest first),
// for each entry the heads of the section. All CTAs stream the same keys at about the same time.
#pragma once

#include <cuda_runtime.h>

#include "../csrc/flash_attn/params.h"

namespace flash_attn::sm90 {

struct WorkOrder {
    int num_items, num_heads, section_heads;
    int first_head;
    int num_first = 0;   // so many entries of the list come before all others, for every head
    int last_heads = 1;  // make up the last section

    int size() const { return num_items * num_heads; }

    // Key items: the long ones first (KeyItem::num_long), `unit` entries at a time.
    __device__ __forceinline__ void decode_keys(Plan const& plan, int unit, int index, int& item, int& head) const {
        WorkOrder order = *this;
        order.num_first = min((__ldg(&plan.key_items->num_long) + unit - 1) / unit, num_items);
        order.decode(index, item, head);
    }
    __device__ __forceinline__ void decode(int index, int& item, int& head) const {
        int first = 0, begin = 0, items = num_first, heads = num_heads;
        if (index >= num_first * num_heads) {
            index -= num_first * num_heads;
            begin = num_first;
            items = num_items - num_first;
            first = min(index / (items * section_heads) * section_heads, num_heads - last_heads);
            heads = first == num_heads - last_heads ? last_heads : min(section_heads, num_heads - first);
        }
        int const rest = index - items * first;
        item = begin + rest / heads;
        head = first_head + first + rest % heads;
    }
};

// As many of `heads` as stream at most `budget` bytes: whole units, `unit` heads (those of a kv head) of `bytes_per_unit`, and at
// least one.
inline int section_heads(int heads, int unit, int64_t bytes_per_unit, int64_t budget) {
    int64_t units = bytes_per_unit > 0 ? budget / bytes_per_unit : heads;
    if (units < 1) { units = 1; }
    int64_t const wanted = units * unit;
    return wanted < heads ? static_cast<int>(wanted) : heads;
}

// The key tiles of one query item, in the order in which they are visited: decoded keys from the last to the first
// (few, masked), then context keys likewise.
struct KeyWalk {
    KeySpan context, decoded;
    int num_context, num_decoded;

    template <int kBlockN>
    __device__ __forceinline__ void init(QueryItem const& item) {
        context = item.context;
        decoded = item.decoded;
        num_context = max(0, context.end - context.begin + kBlockN - 1) / kBlockN;
        num_decoded = max(0, decoded.end - decoded.begin + kBlockN - 1) / kBlockN;
    }
    __device__ __forceinline__ int size() const { return num_context + num_decoded; }
};

// One visited key tile: keys [key, key + kBlockN) of `region`; `valid` of them belong to the item.
struct KeyTile {
    int region, key, valid;
    bool masked;

    template <int kBlockN>
    __device__ __forceinline__ static KeyTile at(KeyWalk const& walk, int i) {
        bool const in_context = i >= walk.num_decoded;
        KeySpan span;  // field by field: choosing between the two by reference would put both in local memory
        span.begin = in_context ? walk.context.begin : walk.decoded.begin;
        span.full_begin = in_context ? walk.context.full_begin : walk.decoded.full_begin;
        span.full_end = in_context ? walk.context.full_end : walk.decoded.full_end;
        span.end = in_context ? walk.context.end : walk.decoded.end;
        KeyTile t;
        t.region = in_context;
        t.key = span.begin + (walk.size() - 1 - i - (in_context ? 0 : walk.num_context)) * kBlockN;
        t.valid = min(kBlockN, span.end - t.key);
        t.masked = t.key < span.full_begin || t.key + kBlockN > span.full_end;
        return t;
    }
};

}  // namespace flash_attn::sm90
