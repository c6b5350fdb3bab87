// Tensor maps (what TMA loads, and in which boxes) from the parameters, on the host.
#pragma once

#include <cuda_runtime.h>

#include "traits.h"

namespace flash_attn::sm90 {

#define FLASH_ATTN_TRY(call)                            \
    do {                                                \
        cudaError_t const status_ = (call);             \
        if (status_ != cudaSuccess) { return status_; } \
    } while (0)

// cuTensorMapEncodeTiled through the runtime, so that the library does not link libcuda.
using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*,
                                 cuuint64_t const*, cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
    static EncodeTiled const function = [] {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &result);
#endif
        return reinterpret_cast<EncodeTiled>(f);
    }();
    return function;
}

// (rows, heads, head_dim) with the given strides, read in boxes of Tile::kChunk columns and Tile::kRows rows of a head.
template <class Element, class Tile>
cudaError_t make_map(CUtensorMap& map, void const* data, int rows, int heads, int head_dim, int64_t row_stride,
                     int64_t head_stride) {
    EncodeTiled const encode = encode_tiled();
    if (encode == nullptr) { return cudaErrorNotSupported; }
    if (rows == 1) { row_stride = head_dim; }  // strides of axes of length one are arbitrary; TMA checks them
    if (heads == 1) { head_stride = head_dim; }
    cuuint64_t const sizes[3] = {cuuint64_t(head_dim), cuuint64_t(rows), cuuint64_t(heads)};
    cuuint64_t const strides[2] = {cuuint64_t(row_stride) * 2, cuuint64_t(head_stride) * 2};
    cuuint32_t const box[3] = {Tile::kChunk, Tile::kRows, 1}, steps[3] = {1, 1, 1};
    auto const type = cute::is_same_v<Element, cutlass::bfloat16_t> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                    : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    auto const swizzle = Tile::kRowBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
    CUresult const result =
        encode(&map, type, 3, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Maps of both regions' keys and values, [0] decoded, [1] context. A region without rows is never read: it gets the other's map.
template <class Element, class Tile>
cudaError_t make_key_maps(FwdParams const& p, CUtensorMap (&k)[2], CUtensorMap (&v)[2]) {
    if (p.total_k > 0) {
        FLASH_ATTN_TRY((
            make_map<Element, Tile>(k[0], p.k, p.total_k, p.num_heads_k, p.head_dim, p.k_row_stride, p.k_head_stride)));
        FLASH_ATTN_TRY((
            make_map<Element, Tile>(v[0], p.v, p.total_k, p.num_heads_k, p.head_dim, p.v_row_stride, p.v_head_stride)));
    }
    if (p.total_context > 0) {
        FLASH_ATTN_TRY((make_map<Element, Tile>(k[1], p.k_context, p.total_context, p.num_heads_k, p.head_dim,
                                                p.k_context_row_stride, p.k_context_head_stride)));
        FLASH_ATTN_TRY((make_map<Element, Tile>(v[1], p.v_context, p.total_context, p.num_heads_k, p.head_dim,
                                                p.v_context_row_stride, p.v_context_head_stride)));
    }
    if (p.total_k <= 0) { k[0] = k[1], v[0] = v[1]; }
    if (p.total_context <= 0) { k[1] = k[0], v[1] = v[0]; }
    return cudaSuccess;
}

}  // namespace flash_attn::sm90
