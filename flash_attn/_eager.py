"""The op in eager mode, without torch.library's wrapper around autograd, whose Python takes longer than the
kernels of a short batch.

The same implementations, and so the same values, gradients and errors, as torch.ops.flash_attn.fwd. Tracing,
modes, transforms and tensor subclasses get the op itself, which is what they know. Called by _calls.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.nn import Parameter

from flash_attn import _ops
from flash_attn._ops import Batch

# Function.apply without its look for transforms of functorch, which `is_direct` has excluded: 20 us a call.
_Function = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)


def is_direct(*tensors: Any) -> bool:
    """Plain tensors of a device with an implementation, and nobody who watches or rewrites operators or asks
    for forward-mode derivatives."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    for x in tensors:
        if x is not None and type(x) is not Tensor and type(x) is not Parameter:
            return False
    return tensors[0].is_cuda or tensors[0].is_cpu


class _Attention(_Function):  # type: ignore[misc, valid-type]
    """`results`, out and lse, are there before: autograd makes its node while the kernel runs."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, k_context: Tensor | None, v_context: Tensor | None,
        batch: Batch, results: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.batch = batch  # its segments also among the tensors: nobody may write to them before backward
        ctx.save_for_backward(q, k, v, k_context, v_context, *results, batch.segments)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, k_context, v_context, out, lse, _ = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 7
        if dout is None:
            dout = torch.zeros_like(out)
        # create_graph: the op refuses the second derivative by name
        direct = not torch.is_grad_enabled() and is_direct(q, k, v, dout, dlse)
        backward = _ops.backward if direct else _ops.backward_op
        if not direct:
            _ops.tell_watchers()
        grads = backward(dout, dlse, q, k, v, k_context, v_context, out, lse, ctx.batch)
        wanted = zip(grads, ctx.needs_input_grad, strict=False)
        return (*(g if needed else None for g, needed in wanted), None, None)


def forward(
    q: Tensor, k: Tensor, v: Tensor, k_context: Tensor | None, v_context: Tensor | None, batch: Batch
) -> tuple[Tensor, Tensor]:
    """torch.ops.flash_attn.fwd(q, k, v, k_context, v_context, *batch) of tensors that are `is_direct` and a
    batch that is `_ops.planned`. Without a context the rows of q, k, v and so of out may stand in two
    dimensions, (batch, seqlen)."""
    wanted = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (k_context is not None and k_context.requires_grad)
        or (v_context is not None and v_context.requires_grad)
    )
    if not wanted:
        return _ops.forward(q, k, v, k_context, v_context, batch)
    torch._C._set_grad_enabled(False)  # torch.no_grad takes 1.5 us
    try:
        results = _ops.forward(q, k, v, k_context, v_context, batch)
    finally:
        torch._C._set_grad_enabled(True)
    return _Attention.apply(q, k, v, k_context, v_context, batch, results)
