// The kernels in this library. kernels.py writes the table; flash_api.cpp looks functions up here and calls them.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "params.h"

namespace flash_attn {

enum class DType { kFloat16, kBFloat16 };

using FwdFunction = cudaError_t (*)(FwdParams const&, cudaStream_t);
using BwdFunction = cudaError_t (*)(BwdParams const&, cudaStream_t);

// Functions of one arch, head dim and dtype. A pass that is not built is null.
struct Kernels {
    int arch;            // 80: mma.sync + cp.async, any GPU since Ampere; 90: sm_90a
    int head_dim;        // of the kernels; tensors of a smaller one run in them
    DType dtype;
    TileSizes (*tile)(int shared_memory);  // what plans are built for, by the bytes that a block may use
    bool pass_wise;      // gradients by one pass each: bwd is dv and dk alone, no dq_accum, no splits, no bwd_post
    FwdFunction fwd;
    BwdFunction bwd, bwd_dq, bwd_post;
    FwdFunction fwd_extras;  // with ALiBi or dropout (Extras); arch 80, head dims up to 256
    BwdFunction bwd_extras, bwd_dq_extras;
};

extern Kernels const kKernels[];
extern int const kNumKernels;
extern char const* const kBuildId;  // commit of the sources

struct Device {
    int index, capability;  // 80, 86, 90, ...
    int num_sms;
};

// Facts of a device, read once.
Device const& device_of(int index);

// Smallest kernels for this head dim: sm_90a ones on compute capability 9.0 where they are built, otherwise the sm_80
// path. FLASH_ATTN_FORCE_ARCH=80|90 forces one. `extras`: those with ALiBi and dropout, which the sm_80 path alone has.
// Null where nothing fits.
Kernels const* find_kernels(Device const& device, int64_t head_dim, DType dtype, bool extras = false);

// "" where kernels run, else what is built and how to build what is missing.
std::string why_not(Device const& device, int64_t head_dim, DType dtype, bool extras = false);

// "sm90 fwd bf16 head_dim 128"
std::string name_of(Kernels const& kernels, char const* pass);

// "sm80: bf16 64 128, fp16 64; sm90: bf16 128"
std::string built_kernels();

}  // namespace flash_attn
