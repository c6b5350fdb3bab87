// Order of work: sections of heads whose operands fit in L2 together, inside a section the plan's list (longest first),
// for each entry the heads of the section. All CTAs stream the same keys at about the same time.
#pragma once

#include <cuda_runtime.h>

#include "../csrc/flash_attn/params.h"

namespace flash_attn::sm90 {

struct WorkOrder {
    int num_items, num_heads, section_heads;
    int first_head;

    int size() const { return num_items * num_heads; }

    __device__ __forceinline__ void decode(int index, int& item, int& head) const {
        int const section = index / (num_items * section_heads);
        int const first = section * section_heads;
        int const heads = min(section_heads, num_heads - first);
        int const rest = index - num_items * first;
        item = rest / heads;
        head = first_head + first + rest - item * heads;
    }
};

// `heads` that share `bytes_per_head` of operands, grouped in `unit`s (query heads of one kv head), within `budget` bytes.
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
