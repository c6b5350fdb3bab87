// Tensors of the stable ABI, and what the kernels need of them: addresses, strides, alignment, the current stream.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "kernel_table.h"

namespace flash_attn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline std::string shape_of(Tensor const& x) {
    std::string out = "[";
    for (int64_t i = 0; i < x.dim(); ++i) out += text(i ? ", " : "", x.size(i));
    return out + "]";
}

inline bool has_shape(Tensor const& x, std::initializer_list<int64_t> shape) {
    if (x.dim() != int64_t(shape.size())) return false;
    for (int64_t i = 0; i < x.dim(); ++i)
        if (x.size(i) != shape.begin()[i]) return false;
    return true;
}

// Contiguous, on the device of `like`. torch::stable::new_empty goes through the dispatcher's boxed form, 2 us instead of 0.3,
// and a backward makes up to nine tensors before its first kernel or beside it.
template <int kDims>
Tensor new_empty(Tensor const& like, int64_t const (&shape)[kDims], ScalarType dtype) {
    int64_t strides[kDims], stride = 1;
    for (int i = kDims - 1; i >= 0; --i) {
        strides[i] = stride;
        stride *= std::max<int64_t>(shape[i], 1);
    }
    int32_t const code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
    int32_t device_type;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
    AtenTensorHandle handle;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(kDims, shape, strides, code, device_type,
                                                           like.get_device_index(), &handle));
    return Tensor(handle);
}

inline Tensor new_bytes(Tensor const& like, int64_t bytes) { return new_empty(like, {bytes}, ScalarType::Byte); }

// Makes the tensor's device current, for this scope.
class DeviceScope {
public:
    explicit DeviceScope(int index) {
        check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
        changed_ = previous_ != index;
        if (changed_) check_cuda(cudaSetDevice(index), "cudaSetDevice");
    }
    ~DeviceScope() {
        if (changed_) cudaSetDevice(previous_);
    }
    DeviceScope(DeviceScope const&) = delete;
    DeviceScope& operator=(DeviceScope const&) = delete;

private:
    int previous_ = 0;
    bool changed_ = false;
};

// torch's current stream. Looked up at run time: a torch without CUDA lacks the function, and must load this library.
inline cudaStream_t current_stream(int device) {
    using Function = AOTITorchError (*)(int32_t, void**);
    static Function const function =
        reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
    if (!function) throw std::runtime_error("flash_attn: this build of torch has no CUDA");
    void* stream = nullptr;
    if (function(device, &stream) != 0) throw std::runtime_error("flash_attn: no current CUDA stream");
    return static_cast<cudaStream_t>(stream);
}

// (rows, heads, head_dim) with any strides the kernels can use: contiguous last dimension, base and strides multiples of
// 16 bytes, no stride 0 (expanded gradients; TMA has none), rows within kMaxRowStride. Other tensors are copied.
inline Tensor as_operand(Tensor const& x) {
    bool ok = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && (x.stride(2) == 1 || x.size(2) == 1);
    for (int64_t i = 0; i < 2; ++i) ok = ok && (x.size(i) <= 1 || (x.stride(i) > 0 && x.stride(i) % 8 == 0));
    ok = ok && (x.size(0) <= 1 || x.stride(0) < kMaxRowStride);
    if (ok || x.numel() == 0) return x;
    Tensor copy = new_empty(x, {x.size(0), x.size(1), x.size(2)}, x.scalar_type());
    return torch::stable::copy_(copy, x);
}

// (num_heads, total_q) fp32 with contiguous rows.
inline Tensor as_row_values(Tensor const& x) {
    if (x.stride(1) == 1 || x.numel() == 0) return x;
    Tensor copy = new_empty(x, {x.size(0), x.size(1)}, ScalarType::Float);
    return torch::stable::copy_(copy, x);
}

inline void check_operand(Tensor const& x, char const* name, char const* shape, Tensor const& like) {
    FLASH_ATTN_CHECK(x.dim() == 3, name, text("be ", shape), shape_of(x));
    FLASH_ATTN_CHECK(x.is_cuda() && x.get_device_index() == like.get_device_index(), name, "be on the device of q",
          text("device ", int(x.get_device_index())));
    FLASH_ATTN_CHECK(x.scalar_type() == like.scalar_type(), name, "have the dtype of q", "another");
    FLASH_ATTN_CHECK(x.size(2) == like.size(2), name, text("have the head dim of q, ", like.size(2)), shape_of(x));
}

inline void check_table(Tensor const& x, char const* name, int64_t columns, Tensor const& q) {
    bool const ok = x.dim() == 2 && x.size(1) == columns && x.scalar_type() == ScalarType::Int && x.is_contiguous() &&
                    x.is_cuda() && x.get_device_index() == q.get_device_index();
    FLASH_ATTN_CHECK(ok, name, text("be a contiguous int32 (n, ", columns, ") table on the device of q"), shape_of(x));
}

inline DType dtype_of(ScalarType dtype) {
    FLASH_ATTN_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16, "dtype", "be float16 or bfloat16", "another");
    return dtype == ScalarType::Half ? DType::kFloat16 : DType::kBFloat16;
}

}  // namespace flash_attn
