"""Ways that copy K and V for every response and leave the queries packed.

Rows gathered for one varlen call (what TRL's tree rows do), and the prefix-grouper package, if installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from providers_varlen import Varlen, cumulative
from torch import Tensor

aten = torch.ops.aten


def fa2_varlen(scale: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The varlen call of torch's FA2, as providers_varlen.py takes it."""
    state: dict[str, Any] = {}  # the unused seeds of dropout

    def forward(q: Tensor, k: Tensor, v: Tensor, shape: tuple) -> tuple[Tensor, Tensor]:
        *sizes, causal = shape
        found = aten._flash_attention_forward(q, k, v, *sizes, 0.0, causal, False, scale=scale)
        state.setdefault("seeds", found[2:4])
        return found[0], found[1]

    def backward(dout, q, k, v, out, lse, shape):  # type: ignore[no-untyped-def]
        *sizes, causal = shape
        seeds = state["seeds"]
        return aten._flash_attention_backward(
            dout, q, k, v, out, lse, *sizes, 0.0, causal, *seeds, scale=scale
        )

    return forward, backward


def gather_rows(p: int, lens: list[int], device: torch.device | str = "cuda") -> tuple[Tensor, tuple]:
    """Rows of K and V in the order [prompt, (prompt, response 1), ...], and the varlen call's shape."""
    prompt = torch.arange(p)
    ends = torch.tensor([p, *lens]).cumsum(0).tolist()
    own = [torch.arange(end - r, end) for end, r in zip(ends[1:], lens, strict=True)]
    index = torch.cat([prompt, *(torch.cat([prompt, rows]) for rows in own)])
    steps = cumulative([p, *lens], device), cumulative([p, *(p + r for r in lens)], device)
    return index.to(device), (*steps, max(p, *lens), p + max(lens), True)


def gathered(problem: Any, call: Varlen, grad: Varlen | None) -> Any:
    """K and V gathered to [prompt, response n], one varlen call; gradients index_add'ed back."""
    index, shape = gather_rows(*problem.group(), problem.q.device)

    def run() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k, v = problem.k.index_select(0, index), problem.v.index_select(0, index)
        return *call(problem.q, k, v, shape), k, v

    def forward() -> Tensor:
        return run()[0]

    if grad is None:
        return forward, None
    out, lse, k, v = run()  # the gathered copies are kept for the backward, as autograd keeps them

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = grad(problem.dout, problem.q, k, v, out, lse, shape)
        zeros = torch.zeros_like
        return dq, zeros(problem.k).index_add_(0, index, dk), zeros(problem.v).index_add_(0, index, dv)

    return forward, backward


def gather_varlen(problem: Any) -> Any:
    return gathered(problem, *fa2_varlen(problem.scale))


def prefix_grouper(problem: Any) -> Any:
    """The package's own split, repeat and join around torch's FlashAttention-2.

    Its index tensors are built outside the timing.
    """
    try:
        from prefix_grouper import AttentionForward, PrefixGrouper  # type: ignore[import-not-found]
    except ImportError:
        raise NotImplementedError("prefix-grouper is not installed") from None
    p, lens = problem.group()
    grouper = PrefixGrouper([[p, *lens]], device=problem.q.device)
    call = AttentionForward(padded_fa2(problem.scale))
    leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]

    def forward() -> Tensor:
        return call(grouper, *(x.unsqueeze(0).transpose(1, 2) for x in leaves))

    out = forward()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, problem.dout.unsqueeze(0), retain_graph=True)

    forward.packed = lambda x: x[0]  # type: ignore[attr-defined]
    return forward, backward


def padded_fa2(scale: float) -> Callable[..., Tensor]:
    """torch's FlashAttention-2 for prefix-grouper: (batch, heads, rows, d) to (batch, rows, heads, d).

    The masks say nothing that causality, aligned bottom-right, does not: prompts are padded on the left (here
    there is one), responses on the right, queries and keys alike.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        batch, rows = q.shape[0], [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        steps = [
            torch.arange(0, (batch + 1) * x.shape[2], x.shape[2], device=q.device, dtype=torch.int32)
            for x in (q, k)
        ]
        sizes = (*steps, q.shape[2], k.shape[2])
        out = aten._flash_attention_forward(*rows, *sizes, 0.0, True, False, scale=scale)[0]
        return out.unflatten(0, (batch, q.shape[2]))

    return attend


GATHER_PROVIDERS = {"gather-varlen": gather_varlen, "prefix-grouper": prefix_grouper}
