// Starting a kernel on a grid of num_rows x num_blocks (x): shared memory above 48 KB has to be asked for, and every error
// comes back to the caller.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

#include "shared_memory.h"

namespace flash_attn {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Asks for a kernel's shared memory, once on each device: the runtime takes as long for it as for two look-ups of attributes, and
// a launch of a short batch waits for it.
inline cudaError_t allow_shared_bytes(void const* kernel, int bytes) {
    static std::mutex mutex;
    static std::map<std::pair<void const*, int>, int> allowed;
    int device = 0;
    cudaGetDevice(&device);
    std::lock_guard<std::mutex> const lock(mutex);
    int& known = allowed[{kernel, device}];
    if (known >= bytes) return cudaSuccess;
    if (bytes > shared_memory_limit()) return cudaErrorInvalidValue;
    cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) known = bytes;
    return error;
}

template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), int64_t num_blocks, int num_rows, int num_threads, int shared_bytes, cudaStream_t stream,
                   Params const&... params) {
    if (num_blocks == 0 || num_rows == 0) return cudaSuccess;
    if (num_blocks > 0x7fffffff || num_rows > 0xffff) return cudaErrorInvalidConfiguration;
    if (shared_bytes > 48 * 1024) {
        cudaError_t const error = allow_shared_bytes(reinterpret_cast<void const*>(kernel), shared_bytes);
        if (error != cudaSuccess) return error;
    }
    kernel<<<dim3(static_cast<unsigned>(num_blocks), num_rows), dim3(num_threads), shared_bytes, stream>>>(params...);
    return cudaGetLastError();
}

}  // namespace flash_attn
