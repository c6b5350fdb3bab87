// Masks are data: which columns of a score tile a query row sees is read from the plan's RowSpan and KeySpan.
//
// A key tile inside a KeySpan's full interval takes no mask at all; otherwise each row's interval is applied, relative to
// the thread's first column. The kernels know nothing of causal, windows, sequences or groups.
#pragma once

#include "../../params.h"

namespace flash_attn {

__device__ __forceinline__ KeySpan load_key_span(KeySpan const* span) {
    int4 const v = __ldg(reinterpret_cast<int4 const*>(span));
    return {v.x, v.y, v.z, v.w};
}

// Keys [begin, end) need no mask: every row of the set sees them all.
__device__ __forceinline__ bool is_clean(KeySpan const& span, int begin, int end) {
    return begin >= span.full_begin && end <= span.full_end;
}

// One row of a warp's accumulator (values 2 half and 2 half + 1 of each 16x8 tile): columns outside [begin, end) become
// `value`. begin and end count from the thread's own first column; neighbouring tile pairs lie kPairStep columns apart.
template <int kPairStep, int NT>
__device__ __forceinline__ void mask_row(float (&row)[NT][4], int half, int begin, int end, float value) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int const column = nt / 2 * kPairStep + nt % 2 * 8 + j;
            if (column < begin || column >= end) row[nt][2 * half + j] = value;
        }
    }
}

}  // namespace flash_attn
