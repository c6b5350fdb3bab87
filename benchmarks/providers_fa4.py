"""FlashAttention-4 (CuTe DSL) on the same problems, where the flash-attn-4 package is installed.

Its module is flash_attn.cute; it is found next to our package through FLASH_ATTN_4_SITE (the folder that
holds flash_attn/cute) or sys.path. Ways: two-call, K and V gathered per response, mask with block sparsity.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from providers_fa4_sparse import fa4_block_sparse
from providers_gather import gathered
from torch import Tensor

import flash_attn


def find_site() -> Path | None:
    for folder in [os.environ.get("FLASH_ATTN_4_SITE", ""), *sys.path]:
        if folder and (Path(folder) / "flash_attn" / "cute" / "interface.py").exists():
            return Path(folder)
    return None


def _functions():  # type: ignore[no-untyped-def]
    site = find_site()
    if site is None:
        raise NotImplementedError("flash-attn-4 is not installed")
    package = str(site / "flash_attn")
    if package not in flash_attn.__path__:
        flash_attn.__path__.append(package)
    if str(site) not in sys.path:
        sys.path.append(str(site))
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # type: ignore[import-not-found]

    return _flash_attn_fwd, _flash_attn_bwd


def _varlen(scale: float):  # type: ignore[no-untyped-def]
    """forward(q, k, v, shape) -> out, lse and backward(dout, q, k, v, out, lse, shape) of FA4's varlen call.

    shape: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal.
    """
    fa4_forward, fa4_backward = _functions()

    def options(shape: tuple) -> dict:
        cu_q, cu_k, max_q, max_k, causal = shape
        sizes = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k)
        return sizes | dict(softmax_scale=scale, causal=causal)

    def forward(q: Tensor, k: Tensor, v: Tensor, shape: tuple) -> tuple[Tensor, Tensor]:
        return fa4_forward(q, k, v, return_lse=True, **options(shape))[:2]

    def backward(dout, q, k, v, out, lse, shape):  # type: ignore[no-untyped-def]
        return fa4_backward(q, k, v, out, dout, lse, **options(shape))[:3]

    return forward, backward


def fa4_replicated(problem):  # type: ignore[no-untyped-def]
    from providers import _steps

    n, p, r = problem.one_group()
    call, grad = _varlen(problem.scale)
    q, k, v, dout = (
        problem.replicate(x).flatten(0, 1) for x in (problem.q, problem.k, problem.v, problem.dout)
    )
    if n > 1:
        dout.unflatten(0, (n, p + r))[1:, :p] = 0
    cu = _steps(n, p + r)
    shape = (cu, cu, p + r, p + r, True)
    out, lse = call(q, k, v, shape)

    def forward() -> Tensor:
        return call(q, k, v, shape)[0]

    def backward() -> tuple[Tensor, ...]:
        return grad(dout, q, k, v, out, lse, shape)

    forward.packed = lambda x: problem.unreplicate(x.unflatten(0, (n, p + r)))  # type: ignore[attr-defined]
    backward.packed = lambda g: [problem.fold(x.unflatten(0, (n, p + r))) for x in g]  # type: ignore[attr-defined]
    return forward, backward


def fa4_two_call(problem):  # type: ignore[no-untyped-def]
    from providers import _compiled_merge, _cu, cumulative

    p, lens = problem.group()
    call, grad = _varlen(problem.scale)
    (qc, qd), (kc, kd), (vc, vd), (dc, dd) = (
        (x[:p], x[p:]) for x in (problem.q, problem.k, problem.v, problem.dout)
    )
    rows, longest = sum(lens), max(lens)
    prompt, flat, each = _cu(0, p), _cu(0, rows), cumulative(lens)
    on_self, on_prompt = (prompt, prompt, p, p, True), (flat, prompt, rows, p, False)
    on_own = (each, each, longest, longest, True)

    def run() -> tuple:
        a = call(qc, kc, vc, on_self)
        x = call(qd, kc, vc, on_prompt)
        y = call(qd, kd, vd, on_own)
        return a, *_compiled_merge(x[0], x[1].t().unsqueeze(-1), y[0], y[1].t().unsqueeze(-1))

    a, out, lse = run()
    lse = lse.squeeze(-1).t().contiguous()

    def forward() -> tuple[Tensor, Tensor]:
        first, second, _ = run()
        return first[0], second

    def backward() -> tuple[tuple[Tensor, Tensor], ...]:
        g = grad(dc, qc, kc, vc, *a, on_self)
        g1 = grad(dd, qd, kc, vc, out, lse, on_prompt)
        g2 = grad(dd, qd, kd, vd, out, lse, on_own)
        return (g[0], g1[0] + g2[0]), (g[1] + g1[1], g2[1]), (g[2] + g1[2], g2[2])

    forward.packed = torch.cat  # type: ignore[attr-defined]
    backward.packed = lambda g: [torch.cat(x) for x in g]  # type: ignore[attr-defined]
    return forward, backward


def fa4_gather(problem):  # type: ignore[no-untyped-def]
    return gathered(problem, *_varlen(problem.scale))


FA4_PROVIDERS = {
    "fa4-replicated": fa4_replicated,
    "fa4-two-call": fa4_two_call,
    "fa4-gather": fa4_gather,
    "fa4-block-sparse": fa4_block_sparse,
}
