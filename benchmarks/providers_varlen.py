"""Ways that are made of a library's varlen call: the prompt replicated, or two calls merged by log-sum-exp.

The call: forward(q, k, v, shape) -> out, lse (heads, rows); backward(dout, q, k, v, out, lse, shape) -> dq,
dk, dv, or None where the library has none. shape: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
causal (aligned bottom-right). K and V copied for each response instead: providers_gather.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Varlen = Callable[..., Any]


def cumulative(lengths: list[int], device: torch.device | str = "cuda") -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of a softmax to the whole; lse (rows, heads, 1)."""
    lse = torch.logaddexp(lse_a, lse_b)
    out = out_a.float() * (lse_a - lse).exp() + out_b.float() * (lse_b - lse).exp()
    return out.to(out_a.dtype), lse


_compiled_merge = torch.compile(_merge, dynamic=True)


def replicated(problem: Any, call: Varlen, grad: Varlen | None) -> Any:
    """Whole sequences, a prompt for each response. Replication itself is not timed."""
    n, p, r = problem.one_group()
    q, k, v, dout = (
        problem.replicate(x).flatten(0, 1) for x in (problem.q, problem.k, problem.v, problem.dout)
    )
    if n > 1:  # the prompt's queries count once
        dout.unflatten(0, (n, p + r))[1:, :p] = 0
    cu = cumulative([p + r] * n, q.device)
    shape = (cu, cu, p + r, p + r, True)

    def forward() -> Tensor:
        return call(q, k, v, shape)[0]

    forward.packed = lambda x: problem.unreplicate(x.unflatten(0, (n, p + r)))  # type: ignore[attr-defined]
    if grad is None:
        return forward, None
    out, lse = call(q, k, v, shape)

    def backward() -> tuple[Tensor, ...]:
        return grad(dout, q, k, v, out, lse, shape)

    backward.packed = lambda g: [problem.fold(x.unflatten(0, (n, p + r))) for x in g]  # type: ignore[attr-defined]
    return forward, backward


def two_call(problem: Any, call: Varlen, grad: Varlen | None) -> Any:
    """Prompt causal, responses on the prompt, responses on themselves; backward with the whole softmax."""
    p, lens = problem.group()
    (qc, qd), (kc, kd), (vc, vd), (dc, dd) = (
        (x[:p], x[p:]) for x in (problem.q, problem.k, problem.v, problem.dout)
    )
    rows, longest = sum(lens), max(lens)
    prompt, flat, each = (cumulative(lengths, qc.device) for lengths in ([p], [rows], lens))
    on_self, on_prompt = (prompt, prompt, p, p, True), (flat, prompt, rows, p, False)
    on_own = (each, each, longest, longest, True)

    def run() -> tuple:
        a = call(qc, kc, vc, on_self)
        x = call(qd, kc, vc, on_prompt)
        y = call(qd, kd, vd, on_own)
        return a, *_compiled_merge(x[0], x[1].t().unsqueeze(-1), y[0], y[1].t().unsqueeze(-1))

    def forward() -> tuple[Tensor, Tensor]:
        first, second, _ = run()
        return first[0], second

    forward.packed = torch.cat  # type: ignore[attr-defined]
    if grad is None:
        return forward, None
    a, out, lse = run()
    lse = lse.squeeze(-1).t().contiguous()

    def backward() -> tuple[tuple[Tensor, Tensor], ...]:
        g = grad(dc, qc, kc, vc, *a, on_self)
        g1 = grad(dd, qd, kc, vc, out, lse, on_prompt)
        g2 = grad(dd, qd, kd, vd, out, lse, on_own)
        return (g[0], g1[0] + g2[0]), (g[1] + g1[1], g2[1]), (g[2] + g1[2], g2[2])

    backward.packed = lambda g: [torch.cat(x) for x in g]  # type: ignore[attr-defined]
    return forward, backward
