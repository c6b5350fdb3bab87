// Which blocks of query rows a key item visits: the walk of the backward's producers (bwd_load.h, bwd_wide_load.h).
#pragma once

#include <cuda_runtime.h>

#include "../csrc/flash_attn/params.h"

namespace flash_attn::sm90 {

// Calls `visit(block, masked)`, with a whole warp, for the blocks of kRows rows in which some row sees some key of [seen_begin,
// seen_end), from the item's last one down to that of `row_begin`; masked: not every row of the block sees all of the kKeys keys
// from the item's `first` on, which are the CTA's own. 32 blocks at a time, one a lane: two ballots say which are visited and
// which need the mask. What lies in shared memory comes by reference: the warps that load have 24 registers a thread.
template <int kRows, int kKeys, class Visit>
__device__ __forceinline__ void for_row_blocks(Plan const& plan, KeyItem const& item, int first, int const& row_begin,
                                               int const& seen_begin, int const& seen_end, Visit const& visit) {
#pragma unroll 1
    for (int last = (item.row_end + kRows - 1) / kRows - 1; last >= row_begin / kRows; last -= 32) {
        int const block = last - int(threadIdx.x % 32);
        bool visited = false;
        bool masked = item.num_keys < first + kKeys || block * kRows < item.row_begin || (block + 1) * kRows > item.row_end;
        if (block >= row_begin / kRows) {
#pragma unroll
            for (int i = block * (kRows / kBlockRows); i < (block + 1) * (kRows / kBlockRows); ++i) {
                if (i * kBlockRows >= item.row_end) { break; }
                KeySpan const* const spans = &plan.block_span[i].context;
                int4 const x = __ldg(
                    reinterpret_cast<int4 const*>(spans + (item.region ? 0 : 1)));  // begin, full_begin, full_end, end
                visited |= x.x < seen_end && seen_begin < x.w;
                masked |= x.y > item.key_begin + first || x.z < item.key_begin + first + kKeys;
            }
        }
        uint32_t const mask = __ballot_sync(0xffffffff, masked);
#pragma unroll 1
        for (uint32_t todo = __ballot_sync(0xffffffff, visited); todo != 0; todo &= todo - 1) {
            int const i = __ffs(todo) - 1;
            visit(last - i, bool(mask >> i & 1));
        }
    }
}

}  // namespace flash_attn::sm90
