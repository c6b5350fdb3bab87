// How much shared memory a block may use on the current device, in bytes: sm_80 163 KB, sm_86, sm_89 and sm_120 99 KB,
// sm_90 227 KB. FLASH_ATTN_FORCE_SHARED_KB lowers it, to test the tiles of smaller GPUs on a larger one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdlib>

namespace flash_attn {

inline int shared_memory_limit() {
    int device = 0, bytes = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    char const* const forced = std::getenv("FLASH_ATTN_FORCE_SHARED_KB");
    int const limit = forced ? std::atoi(forced) * 1024 : bytes;
    return limit < bytes ? limit : bytes;
}

}  // namespace flash_attn
