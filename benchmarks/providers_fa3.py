"""FlashAttention-3 on the same problems, where PyPI's `fa3-fwd` is installed: its forward (bf16, sm_90a).

The wheel has no backward, so these ways have rows of the forward only.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from providers_gather import gathered
from providers_varlen import Varlen, replicated, two_call
from torch import Tensor


def is_installed() -> bool:
    return find_spec("fa3_fwd_interface") is not None


def _varlen(scale: float) -> tuple[Varlen, None]:
    from fa3_fwd_interface import _flash_attn_forward  # type: ignore[import-not-found]

    def forward(q: Tensor, k: Tensor, v: Tensor, shape: tuple) -> tuple[Tensor, Tensor]:
        cu_q, cu_k, max_q, max_k, causal = shape
        sizes = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k)
        return _flash_attn_forward(q, k, v, **sizes, softmax_scale=scale, causal=causal)[:2]

    return forward, None


def fa3_replicated(problem: Any) -> Any:
    return replicated(problem, *_varlen(problem.scale))


def fa3_two_call(problem: Any) -> Any:
    return two_call(problem, *_varlen(problem.scale))


def fa3_gather(problem: Any) -> Any:
    return gathered(problem, *_varlen(problem.scale))


FA3_PROVIDERS = {"fa3-replicated": fa3_replicated, "fa3-two-call": fa3_two_call, "fa3-gather": fa3_gather}
