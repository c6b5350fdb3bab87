// Epilogue of every pass: accumulator fragments of a warpgroup to rows in global memory, 16 bytes a thread, rows and
// columns predicated, so that full and short tiles take one path.
#pragma once

#include "traits.h"

namespace flash_attn::sm90 {

// 4 x 4 transpose over the four threads of a quad: thread q holds x[j] = word q of block j, returns block q.
__device__ __forceinline__ uint4 quad_transpose(uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
    bool const odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    uint32_t const r0 = __shfl_xor_sync(0xffffffff, odd ? x0 : x1, 1);
    uint32_t const r1 = __shfl_xor_sync(0xffffffff, odd ? x2 : x3, 1);
    (odd ? x0 : x1) = r0;
    (odd ? x2 : x3) = r1;
    uint32_t const s0 = __shfl_xor_sync(0xffffffff, upper ? x0 : x2, 2);
    uint32_t const s1 = __shfl_xor_sync(0xffffffff, upper ? x1 : x3, 2);
    return upper ? make_uint4(s0, s1, x2, x3) : make_uint4(x0, x1, s0, s1);
}

// Rows row_begin + (row inside the warpgroup's 64) of `dst`, scaled, those below num_rows; columns below num_columns.
template <class Element, int kColumns>
__device__ __forceinline__ void store_rows(float const (&acc)[kColumns / 2], float scale0, float scale1, Element* dst,
                                           int64_t row_stride, int num_rows, int num_columns) {
    static_assert(kColumns % 32 == 0);
    int const lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float const scale = half ? scale1 : scale0;
        int const r = row + 8 * half;
        Element* const line = dst + r * row_stride;
#pragma unroll
        for (int j = 0; j < kColumns / 32; ++j) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i] =
                    pack<Element>(acc[16 * j + 4 * i + 2 * half] * scale, acc[16 * j + 4 * i + 2 * half + 1] * scale);
            }
            uint4 const vector = quad_transpose(x[0], x[1], x[2], x[3]);
            int const column = 32 * j + 8 * (lane % 4);
            if (r < num_rows && column < num_columns) { *reinterpret_cast<uint4*>(line + column) = vector; }
        }
    }
}

// fp32 partials of a split, 8 bytes a thread (32 contiguous bytes a quad).
template <int kColumns>
__device__ __forceinline__ void store_rows_fp32(float const (&acc)[kColumns / 2], float* dst, int64_t row_stride,
                                                int num_rows) {
    int const lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int const r = row + 8 * half;
        float* const line = dst + r * row_stride + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            if (r < num_rows) {
                *reinterpret_cast<float2*>(line + 8 * j) =
                    make_float2(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
            }
        }
    }
}

}  // namespace flash_attn::sm90
