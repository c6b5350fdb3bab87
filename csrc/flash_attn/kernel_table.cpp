// Look-up in the table that kernels.py writes (kernel_table.h).
#include "kernel_table.h"

#include <array>
#include <cstdlib>
#include <mutex>

#include "check.h"

namespace flash_attn {
namespace {

constexpr int kMaxDevices = 64;

Device read_device(int index) {
    auto const attribute = [index](cudaDeviceAttr which) {
        int value = 0;
        check_cuda(cudaDeviceGetAttribute(&value, which, index), "cudaDeviceGetAttribute");
        return value;
    };
    Device d;
    d.index = index;
    d.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
    d.num_sms = attribute(cudaDevAttrMultiProcessorCount);
    return d;
}

std::string forced_arch() {
    char const* value = std::getenv("FLASH_ATTN_FORCE_ARCH");
    std::string const arch = value ? value : "";
    FLASH_ATTN_CHECK(arch.empty() || arch == "80" || arch == "90", "FLASH_ATTN_FORCE_ARCH", "be 80 or 90", arch);
    return arch;
}

Kernels const* find_in_arch(int arch, int64_t head_dim, DType dtype, bool extras = false) {
    Kernels const* best = nullptr;
    for (int i = 0; i < kNumKernels; ++i) {
        Kernels const& k = kKernels[i];
        bool const fits = k.arch == arch && k.dtype == dtype && k.head_dim >= head_dim && (!extras || k.fwd_extras);
        if (fits && (best == nullptr || k.head_dim < best->head_dim)) best = &k;
    }
    return best;
}

char const* name_of(DType dtype) { return dtype == DType::kFloat16 ? "fp16" : "bf16"; }

}  // namespace

Device const& device_of(int index) {
    static std::array<Device, kMaxDevices> devices;
    static std::array<std::once_flag, kMaxDevices> read;
    FLASH_ATTN_CHECK(index >= 0 && index < kMaxDevices, "device index", text("be below ", kMaxDevices), index);
    std::call_once(read[index], [index] { devices[index] = read_device(index); });
    return devices[index];
}

Kernels const* find_kernels(Device const& device, int64_t head_dim, DType dtype, bool extras) {
    std::string const forced = forced_arch();
    if (device.capability < 80) return nullptr;
    if (extras) return find_in_arch(80, head_dim, dtype, true);
    if (device.capability == 90 && forced != "80") {
        Kernels const* found = find_in_arch(90, head_dim, dtype);
        if (found || forced == "90") return found;
    }
    return find_in_arch(80, head_dim, dtype);
}

std::string why_not(Device const& device, int64_t head_dim, DType dtype, bool extras) {
    if (find_kernels(device, head_dim, dtype, extras)) return "";
    if (device.capability < 80)
        return text("flash_attn needs a GPU of compute capability 8.0 or newer, got ", device.capability / 10, ".",
                    device.capability % 10);
    if (extras && find_kernels(device, head_dim, dtype))
        return text("no flash_attn kernel with ALiBi and dropout for head_dim ", head_dim, " in ", name_of(dtype),
                    " in this library: they are made for head dims up to 256, with the sm_80 path");
    return text("no flash_attn kernel for head_dim ", head_dim, " in ", name_of(dtype), " on compute capability ",
                device.capability / 10, ".", device.capability % 10, " in this library (built: ", built_kernels(),
                "). Rebuild with FLASH_ATTN_CUDA_ARCHS, FLASH_ATTN_HEAD_DIMS and FLASH_ATTN_DTYPES, or use "
                "FLASH_ATTN_BACKEND=composed");
}

std::string name_of(Kernels const& k, char const* pass) {
    return text("sm", k.arch, " ", pass, " ", name_of(k.dtype), " head_dim ", k.head_dim);
}

std::string built_kernels() {
    std::string out;
    int arch = 0;
    DType dtype{};
    for (int i = 0; i < kNumKernels; ++i) {
        Kernels const& k = kKernels[i];
        if (k.arch != arch) out += text(arch ? "; sm" : "sm", k.arch, ": ", name_of(k.dtype));
        else if (k.dtype != dtype) out += text(", ", name_of(k.dtype));
        out += text(" ", k.head_dim);
        arch = k.arch, dtype = k.dtype;
    }
    return out.empty() ? "nothing" : out;
}

}  // namespace flash_attn
