// Launch of the plan kernels (plan.cu).
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace flash_attn {

// Bytes behind PlanParams' scratch pointers, which set_plan_scratch lays out in one allocation (16-byte aligned).
int64_t plan_scratch_bytes(PlanParams const& p);
void set_plan_scratch(PlanParams& p, void* scratch);

cudaError_t run_plan(PlanParams const& p, cudaStream_t stream);

}  // namespace flash_attn
