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
from torch.nn import Parameter

from flash_attn import _ops

_FORWARD, _BACKWARD = (
    {device: f for (name, device), f in _ops.IMPLEMENTATIONS.items() if name == which}
    for which in ("fwd", "bwd")
)
# Function.apply without its look for transforms of functorch, which `_is_direct` has excluded: 20 us a call.
_Function = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)
_NUM_TENSORS = 5  # q, k, v, k_context, v_context: the differentiable arguments


def _is_direct(tensors: tuple[Any, ...]) -> bool:
    """Plain tensors of a device with an implementation, and nobody who watches or rewrites operators."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if _functorch.peek_interpreter_stack() is not None:
        return False
    return tensors[0].device.type in _FORWARD and all(
        type(x) is Tensor or type(x) is Parameter for x in tensors if x is not None
    )


class _Attention(_Function):  # type: ignore[misc, valid-type]
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        out, lse = _FORWARD[args[0].device.type](*args)
        _ops._setup_context(ctx, args, (out, lse))
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, k_context, v_context, out, lse, segments, segments_host, *plan = ctx.saved_tensors
        unused = [None] * (_ops._NUM_FWD_ARGS - _NUM_TENSORS)
        if dout is None and dlse is None:
            return (*[None] * _NUM_TENSORS, *unused)
        if dout is None:
            dout = torch.zeros_like(out)
        # create_graph: the op refuses the second derivative by name
        direct = not torch.is_grad_enabled() and _is_direct((q, k, v, dout, dlse))
        backward = _BACKWARD[q.device.type] if direct else torch.ops.flash_attn.bwd
        batch = (segments, segments_host, plan, *ctx.numbers)
        grads = backward(dout, dlse, q, k, v, k_context, v_context, out, lse, *batch)
        needed = ctx.needs_input_grad[:_NUM_TENSORS]
        return (*(g if n else None for g, n in zip(grads, needed, strict=True)), *unused)


def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """torch.ops.flash_attn.fwd(*args)."""
    tensors = args[:_NUM_TENSORS]
    if not _is_direct((*tensors, *args[_NUM_TENSORS:7])):
        return torch.ops.flash_attn.fwd(*args)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _Attention.apply(*args)
    out, lse = _FORWARD[args[0].device.type](*args)
    return out, lse
