// Errors of the C++ side. Form: "{name} must {rule}, got {value}". Python sees ValueError, NotImplementedError's texts come
// from kernel_table.h, and RuntimeError names the kernel whose launch failed.
#pragma once

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace flash_attn {

template <typename... Parts>
std::string text(Parts const&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

template <typename Got>
[[noreturn]] void refuse(char const* name, std::string const& rule, Got const& got) {
    throw std::invalid_argument(text(name, " must ", rule, ", got ", got));
}

// FLASH_ATTN_CHECK(ok, name, rule, got): rule and got are evaluated for an error only (building their texts every time took
// longer than a short kernel).
#define FLASH_ATTN_CHECK(ok, ...)                                \
    do {                                                         \
        if (!(ok)) ::flash_attn::refuse(__VA_ARGS__); \
    } while (0)

template <typename What>  // text, or a function that builds one
void check_cuda(cudaError_t status, What const& what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // not sticky unless the context is lost
    if constexpr (std::is_invocable_v<What>) throw std::runtime_error(text("flash_attn: ", what(), " failed: ", cudaGetErrorString(status)));
    else throw std::runtime_error(text("flash_attn: ", what, " failed: ", cudaGetErrorString(status)));
}

}  // namespace flash_attn
