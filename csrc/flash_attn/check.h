// Errors of the C++ side. Form: "{name} must {rule}, got {value}". Python sees ValueError, NotImplementedError's texts come
// from kernel_table.h, and RuntimeError names the kernel whose launch failed.
#pragma once

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace flash_attn {

template <typename... Parts>
std::string text(Parts const&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

template <typename Got>
void check(bool ok, char const* name, std::string const& rule, Got const& got) {
    if (!ok) throw std::invalid_argument(text(name, " must ", rule, ", got ", got));
}

inline void check_cuda(cudaError_t status, std::string const& what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // not sticky unless the context is lost
    throw std::runtime_error(text("flash_attn: ", what, " failed: ", cudaGetErrorString(status)));
}

}  // namespace flash_attn
