// Starting a kernel on a grid of num_rows x num_blocks (x): shared memory above 48 KB has to be asked for, and every error
// comes back to the caller.
#pragma once

#include <cuda_runtime.h>

#include "shared_memory.h"

namespace flash_attn {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), int64_t num_blocks, int num_rows, int num_threads, int shared_bytes, cudaStream_t stream,
                   Params const&... params) {
    if (num_blocks == 0 || num_rows == 0) return cudaSuccess;
    if (num_blocks > 0x7fffffff || num_rows > 0xffff) return cudaErrorInvalidConfiguration;
    if (shared_bytes > 48 * 1024) {
        if (shared_bytes > shared_memory_limit()) return cudaErrorInvalidValue;
        cudaError_t const error =
            cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return error;
    }
    kernel<<<dim3(static_cast<unsigned>(num_blocks), num_rows), dim3(num_threads), shared_bytes, stream>>>(params...);
    return cudaGetLastError();
}

}  // namespace flash_attn
