"""FlashAttention-4 (CuTe DSL) on the same problems, where the flash-attn-4 package is installed.

Its module is flash_attn.cute; it is found next to our package through FLASH_ATTN_4_SITE (the folder that
holds flash_attn/cute) or sys.path. Ways: two-call, K and V gathered per response, mask with block sparsity.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from providers_fa4_sparse import fa4_block_sparse
from providers_gather import gathered
from providers_varlen import replicated, two_call
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
    """FA4's varlen call, as providers_varlen.py takes it."""
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
    return replicated(problem, *_varlen(problem.scale))


def fa4_two_call(problem):  # type: ignore[no-untyped-def]
    return two_call(problem, *_varlen(problem.scale))


def fa4_gather(problem):  # type: ignore[no-untyped-def]
    return gathered(problem, *_varlen(problem.scale))


FA4_PROVIDERS = {
    "fa4-replicated": fa4_replicated,
    "fa4-two-call": fa4_two_call,
    "fa4-gather": fa4_gather,
    "fa4-block-sparse": fa4_block_sparse,
}
