// Order of the work: which (item, head) a block takes. A non-persistent grid, started in block order.
#pragma once

namespace flash_attn::sm80 {

// Sections of heads outermost (what they stream fits in L2), then the list, longest item first, then the section's heads.
__device__ __forceinline__ void decode_block(int num_items, int num_heads, int section_heads, int& item, int& head) {
    int const block = blockIdx.x, section = block / (num_items * section_heads);
    int const rest = block - section * num_items * section_heads, first = section * section_heads;
    int const heads = min(section_heads, num_heads - first);
    item = rest / heads;
    head = first + rest % heads;
}

}  // namespace flash_attn::sm80
