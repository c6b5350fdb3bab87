"""Ways that copy K and V for every response and leave the queries packed.

Rows gathered for one varlen call (what TRL's tree rows do), and the prefix-grouper package, if installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def fa2_varlen(scale: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """forward(q, k, v, shape) -> out, lse; backward(dout, q, k, v, out, lse, shape): of torch's FA2.

    shape: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal (aligned bottom-right).
    """
    state: dict[str, Any] = {}  # the unused seeds of dropout

    def forward(q: Tensor, k: Tensor, v: Tensor, shape: tuple) -> tuple[Tensor, Tensor]:
        *sizes, causal = shape
        found = aten._flash_attention_forward(q, k, v, *sizes, 0.0, causal, False, scale=scale)
        state["seeds"] = found[2:4]
        return found[0], found[1]

    def backward(dout, q, k, v, out, lse, shape):  # type: ignore[no-untyped-def]
        *sizes, causal = shape
        seeds = state["seeds"]
        return aten._flash_attention_backward(
            dout, q, k, v, out, lse, *sizes, 0.0, causal, *seeds, scale=scale
        )

    return forward, backward


def gathered(problem: Any, call: Callable[..., Any], grad: Callable[..., Any]) -> Any:
    """K and V gathered to [prompt, response n], one varlen call; gradients index_add'ed back."""
    n, p, r = problem.one_group()
    prompt = torch.arange(p)
    rows = [prompt, *(torch.cat([prompt, torch.arange(p + i * r, p + (i + 1) * r)]) for i in range(n))]
    index = torch.cat(rows).cuda()

    def cu(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()

    shape = (cu([p] + [r] * n), cu([p] + [p + r] * n), max(p, r), p + r, True)

    def run() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k, v = problem.k.index_select(0, index), problem.v.index_select(0, index)
        return *call(problem.q, k, v, shape), k, v

    out, lse, k, v = run()  # the gathered copies are kept for the backward, as autograd keeps them

    def forward() -> Tensor:
        return run()[0]

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = grad(problem.dout, problem.q, k, v, out, lse, shape)
        zeros = torch.zeros_like
        return dq, zeros(problem.k).index_add_(0, index, dk), zeros(problem.v).index_add_(0, index, dv)

    return forward, backward


def gather_varlen(problem: Any) -> Any:
    return gathered(problem, *fa2_varlen(problem.scale))


def prefix_grouper(problem: Any) -> Any:
    """The package's own split, repeat and join around torch's FlashAttention-2.

    Its index tensors are built outside the timing. Without padding its masks say nothing, so that causal
    attention aligned bottom-right is exact.
    """
    try:
        from prefix_grouper import AttentionForward, PrefixGrouper  # type: ignore[import-not-found]
    except ImportError:
        raise NotImplementedError("prefix-grouper is not installed") from None
    n, p, r = problem.one_group()
    grouper = PrefixGrouper([[p, *[r] * n]], device=problem.q.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        batch, rows = q.shape[0], [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        steps = [
            torch.arange(0, (batch + 1) * x.shape[2], x.shape[2], device=q.device, dtype=torch.int32)
            for x in (q, k)
        ]
        sizes = (*steps, q.shape[2], k.shape[2])
        out = aten._flash_attention_forward(*rows, *sizes, 0.0, True, False, scale=problem.scale)[0]
        return out.unflatten(0, (batch, q.shape[2]))

    call = AttentionForward(attend)
    leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]

    def forward() -> Tensor:
        return call(grouper, *(x.unsqueeze(0).transpose(1, 2) for x in leaves))

    out = forward()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, problem.dout.unsqueeze(0), retain_graph=True)

    forward.packed = lambda x: x[0]  # type: ignore[attr-defined]
    return forward, backward


GATHER_PROVIDERS = {"gather-varlen": gather_varlen, "prefix-grouper": prefix_grouper}
