// bwd_preprocess.h says what is computed. Memory bound: out and dout are read once, in 16-byte pieces.
#include "bwd_preprocess.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace flash_attn {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements of 16 bytes

__device__ float2 to_float2(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ float2 to_float2(__half2 x) { return __half22float2(x); }

template <typename Pair>
__device__ float dot(uint4 const& a, uint4 const& b) {
    Pair const* x = reinterpret_cast<Pair const*>(&a);
    Pair const* y = reinterpret_cast<Pair const*>(&b);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
        float2 const u = to_float2(x[i]), v = to_float2(y[i]);
        sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
    }
    return sum;
}

// kLanes threads a row: one pass for head dim 64 or 128.
template <typename Pair, int kLanes>
__global__ void __launch_bounds__(kThreads) bwd_preprocess_kernel(__grid_constant__ BwdParams const p, int accum_head_dim) {
    int64_t const row = int64_t(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
    int const lane = threadIdx.x % kLanes;
    int const heads_per_kv = p.fwd.num_heads / p.fwd.num_heads_k;
    int const chunk_head = blockIdx.y, head = p.head_k_begin * heads_per_kv + chunk_head;

#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");  // the main kernel waits for this one's results itself
#endif
    float sum = 0.f, lse = -INFINITY;
    if (row < p.fwd.total_q) {
        using Element = typename std::remove_reference<decltype(Pair{}.x)>::type;
        Element const* out = static_cast<Element const*>(p.fwd.out) + row * p.fwd.out_row_stride + head * p.fwd.out_head_stride;
        Element const* dout = static_cast<Element const*>(p.dout) + row * p.dout_row_stride + head * p.dout_head_stride;
        for (int c = lane * kVector; c < p.fwd.head_dim; c += kLanes * kVector)
            sum += dot<Pair>(*reinterpret_cast<uint4 const*>(out + c), *reinterpret_cast<uint4 const*>(dout + c));
        lse = p.fwd.lse[head * p.fwd.lse_head_stride + row];
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset, kLanes);
    if (lane == 0) {
        bool const sees_keys = lse != -INFINITY;  // else dout may be NaN (padding), which must reach nothing
        float const dlse = sees_keys && p.dlse ? p.dlse[head * p.dlse_head_stride + row] : 0.f;
        p.lse_log2[head * p.rows_padded + row] = sees_keys ? lse * 1.4426950408889634f : INFINITY;
        p.dout_dot_out[head * p.rows_padded + row] = sees_keys ? sum - dlse : 0.f;
    }
    if (p.split_counts) {
        int64_t const threads = int64_t(gridDim.x) * gridDim.y * kThreads, counts = 2ll * p.fwd.total_context * p.fwd.num_heads_k;
        for (int64_t i = (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * kThreads + threadIdx.x; i < counts; i += threads) p.split_counts[i] = 0;
    }
    if (p.dq_accum) {
        float* accum = p.dq_accum + (chunk_head * p.rows_padded + row) * accum_head_dim;
        for (int c = lane * 4; c < accum_head_dim; c += kLanes * 4) *reinterpret_cast<float4*>(accum + c) = make_float4(0.f, 0.f, 0.f, 0.f);
    }
}

template <typename Pair, int kLanes>
void start(BwdParams const& p, int accum_head_dim, cudaStream_t stream) {
    int const heads = (p.head_k_end - p.head_k_begin) * (p.fwd.num_heads / p.fwd.num_heads_k);
    dim3 const grid(unsigned(p.rows_padded / (kThreads / kLanes)), heads);  // rows_padded is a multiple of 128
    bwd_preprocess_kernel<Pair, kLanes><<<grid, kThreads, 0, stream>>>(p, accum_head_dim);
}

}  // namespace

cudaError_t run_bwd_preprocess(BwdParams const& p, bool is_bf16, int accum_head_dim, cudaStream_t stream) {
    auto const run = is_bf16 ? (accum_head_dim > 64 ? start<__nv_bfloat162, 16> : start<__nv_bfloat162, 8>)
                             : (accum_head_dim > 64 ? start<__half2, 16> : start<__half2, 8>);
    run(p, accum_head_dim, stream);
    return cudaGetLastError();
}

}  // namespace flash_attn
