// First kernel of the backward, for the query heads of one chunk of kv heads:
//   dout_dot_out = rowsum(dout * out) - dlse     (that subtraction is the whole gradient of the LSE)
//   lse_log2 = lse * log2(e), +inf where the row sees no key, so that its P = exp2(S - lse) is 0
// and zeros in dq_accum. Rows [total_q, rows_padded) get 0, +inf and zeros.
#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"

namespace flash_attn {

// accum_head_dim: head dim of dq_accum (the main kernel's own).
cudaError_t run_bwd_preprocess(BwdParams const& p, bool is_bf16, int accum_head_dim, cudaStream_t stream);

}  // namespace flash_attn
