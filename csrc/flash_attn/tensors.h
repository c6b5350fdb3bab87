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

inline bool same_shape(Tensor const& x, Tensor const& y) {
    if (x.dim() != y.dim()) return false;
    for (int64_t i = 0; i < x.dim(); ++i)
        if (x.size(i) != y.size(i)) return false;
    return true;
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

// Contiguous, of the shape of `like`.
inline Tensor new_like(Tensor const& like) {
    return like.dim() == 4 ? new_empty(like, {like.size(0), like.size(1), like.size(2), like.size(3)}, like.scalar_type())
                           : new_empty(like, {like.size(0), like.size(1), like.size(2)}, like.scalar_type());
}

// A tensor (rows, heads, head_dim), or (batch, seqlen, heads, head_dim) whose first two dimensions are the rows.
struct Operand {
    Tensor tensor;
    void* data = nullptr;
    int64_t rows = 0, heads = 0, head_dim = 0, row_stride = 0, head_stride = 0;
    bool fits = false;  // the kernels can read it as it lies

    Operand() = default;
    explicit Operand(Tensor const& x) : tensor(x), data(x.data_ptr()) {
        int64_t const heads_at = x.dim() - 2, batch = heads_at == 2 ? x.size(0) : 1, seqlen = x.size(heads_at - 1);
        rows = batch * seqlen, heads = x.size(heads_at), head_dim = x.size(heads_at + 1);
        row_stride = seqlen == 1 && batch > 1 ? x.stride(0) : x.stride(heads_at - 1), head_stride = x.stride(heads_at);
        // Base and strides multiples of 16 bytes; no stride 0 (expanded gradients; TMA has none).
        auto const strided = [](int64_t count, int64_t stride) { return count <= 1 || (stride > 0 && stride % 8 == 0); };
        fits = reinterpret_cast<uintptr_t>(data) % 16 == 0 && (x.stride(heads_at + 1) == 1 || head_dim == 1) &&
               strided(rows, row_stride) && strided(heads, head_stride) && (rows <= 1 || row_stride < kMaxRowStride) &&
               (batch <= 1 || seqlen <= 1 || x.stride(0) == seqlen * row_stride);
    }
};

// With strides that the kernels can use; other tensors are copied.
inline Operand as_operand(Tensor const& x) {
    Operand const operand(x);
    if (operand.fits || x.numel() == 0) return operand;
    Tensor copy = new_like(x);
    return Operand(torch::stable::copy_(copy, x));
}

// (num_heads, total_q) fp32 with contiguous rows.
inline Tensor as_row_values(Tensor const& x) {
    if (x.stride(1) == 1 || x.numel() == 0) return x;
    Tensor copy = new_empty(x, {x.size(0), x.size(1)}, ScalarType::Float);
    return torch::stable::copy_(copy, x);
}

// (rows, heads, head_dim) or, where `like` is, (batch, seqlen, heads, head_dim).
inline void check_operand(Tensor const& x, char const* name, char const* shape, Tensor const& like) {
    FLASH_ATTN_CHECK(x.dim() == like.dim(), name, text("be ", shape), shape_of(x));
    FLASH_ATTN_CHECK(x.is_cuda() && x.get_device_index() == like.get_device_index(), name, "be on the device of q",
          text("device ", int(x.get_device_index())));
    FLASH_ATTN_CHECK(x.scalar_type() == like.scalar_type(), name, "have the dtype of q", "another");
    FLASH_ATTN_CHECK(x.size(x.dim() - 1) == like.size(like.dim() - 1), name, text("have the head dim of q, ", like.size(like.dim() - 1)), shape_of(x));
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
