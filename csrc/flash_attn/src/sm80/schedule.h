// Order of the work: which (item, head) a block takes. A non-persistent grid, started in block order.
//
// Sections of heads outermost (what they stream fits in L2), then the list, longest item first, then the section's heads.
// Divisions are multiplications: block and head numbers then stay in uniform registers through the mainloops.
#pragma once

#include <cstdint>

#include "../../params.h"
#include "../common/softmax.h"

namespace flash_attn::sm80 {

// n / value for 0 <= n < 2^31: with 2^(p-1) < value <= 2^p and m = ceil(2^(31 + p) / value), m n / 2^(31 + p) rounds down to it.
struct Divisor {
    uint32_t value, multiplier, shift;
    __host__ explicit Divisor(uint32_t value_) : value(value_), multiplier(0), shift(0) {
        while (value > uint32_t(1) << (shift + 1)) ++shift;  // p - 1
        if (value > 1) multiplier = static_cast<uint32_t>(((uint64_t(1) << (32 + shift)) + value - 1) / value);
    }
    __device__ __forceinline__ int quotient(int n) const {
        return value == 1 ? n : static_cast<int>(__umulhi(static_cast<uint32_t>(n), multiplier) >> shift);
    }
};

struct Schedule {
    int section_heads;
    Divisor section_blocks, section, group;

    // `section_heads` divides the number of heads; `group` query heads share a kv head.
    __host__ Schedule(int num_items, int section_heads_, int group_)
        : section_heads(section_heads_), section_blocks(static_cast<uint32_t>(num_items) * section_heads_), section(section_heads_), group(group_) {}

    __device__ __forceinline__ void decode(int& item, int& head) const {
        int const block = blockIdx.x, index = section_blocks.quotient(block);
        int const rest = block - index * static_cast<int>(section_blocks.value);
        item = section.quotient(rest);
        head = index * section_heads + rest - item * section_heads;
    }
};

// The same order for kernels with registers to spare.
__device__ __forceinline__ void decode_block(int num_items, int num_heads, int section_heads, int& item, int& head) {
    int const block = blockIdx.x, section = block / (num_items * section_heads);
    int const rest = block - section * num_items * section_heads, first = section * section_heads;
    int const heads = min(section_heads, num_heads - first);
    item = rest / heads;
    head = first + rest % heads;
}

// Factors of the scores as parameters of the kernel: operands in constant memory, where a product in the kernel would hold a
// register through the mainloop.
struct Scales {
    float log2;          // of what the exponent takes: softmax_scale, or softcap, times log2(e)
    float over_softcap;  // softmax_scale / softcap
    __host__ explicit Scales(FwdParams const& p)
        : log2((p.softcap > 0.f ? p.softcap : p.softmax_scale) * kLog2E), over_softcap(p.softcap > 0.f ? p.softmax_scale / p.softcap : 0.f) {}
};

}  // namespace flash_attn::sm80
