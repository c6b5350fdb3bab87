"""flash-attn's private functions, which sequence-parallel libraries call with gradients of their own.

They take and return what flash-attn 2.8's do: dense tensors (B, S, H, D) with lse (B, H, Sq), packed ones
(total, H, D) with lse (H, total_q); nothing is differentiable here. In the backward, `out` and `softmax_lse`
may belong to more keys than `k` holds (ring attention): P = exp(q k^T softmax_scale - softmax_lse). Forward
and backward run in their tensors' dtype under torch.autocast too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from flash_attn import _alibi_dropout, _calls, checks

_Forward = tuple[Tensor, Tensor, Tensor, Tensor]
_Function = TypeVar("_Function", bound=Callable[..., object])


def _without_gradients(function: _Function) -> _Function:
    """`torch.no_grad()`, with the function's own parameters for those who ask for them by getfullargspec,
    which does not look behind decorators: ring-flash-attn."""
    wrapped = torch.no_grad()(function)
    wrapped.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return wrapped


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x with a unit last stride."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    """x rounded up to a multiple of m."""
    return (x + m - 1) // m * m


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys of a column block of flash-attn's dropout mask on this GPU, by which its own tests read it."""
    if head_dim > 256:
        raise ValueError(f"head_dim must be at most 256, got {head_dim}")
    if head_dim <= 32:
        return 128
    if head_dim <= 64:
        return 64 if is_dropout else 128
    if head_dim <= 128:
        return 32 if is_dropout else 64
    return 64


def _new_rng_state(dropout_p: float, like: Tensor) -> Tensor:
    """Seed and offset for a dropout, zeros without."""
    if dropout_p > 0.0:
        return _alibi_dropout.new_state(like.device)
    return torch.zeros(2, dtype=torch.int64, device=like.device)


def _extras(
    q: Tensor,
    batch: int,
    dropout_p: float,
    alibi_slopes: Tensor | None,
    softcap: float,
    rng_state: Tensor | None,
) -> _calls.Extras | None:
    """A backward's ALiBi and dropout, of which the forward drew the state."""
    if dropout_p > 0.0 and rng_state is None:
        raise ValueError("rng_state must be the forward's where dropout_p > 0, got None")
    return _calls.extras_of(q, batch, dropout_p, alibi_slopes, softcap, rng_state)


@_without_gradients
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> _Forward:
    """out (B, Sq, H, Dv), lse (B, H, Sq) fp32, with dropout and `return_softmax` the probabilities, negative
    where dropped (for tests), else an empty tensor; and the dropout's state (2,) int64, else zeros."""
    checks.qkv(q, k, v, 4)
    checks.options(dropout_p, softcap, (window_size_left, window_size_right), q.dtype)
    rng_state = _new_rng_state(dropout_p, q)
    out, lse, probabilities = _calls.dense(
        q, k, v, dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap,
        alibi_slopes, False, True, rng_state, return_softmax, casts=False,
    )  # fmt: skip
    return out, lse, probabilities, rng_state


@_without_gradients
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> _Forward:
    """out (total_q, H, Dv), lse (H, total_q) fp32, probabilities and state as `_flash_attn_forward`."""
    _calls.check_packed(q, k, v, block_table)
    checks.options(dropout_p, softcap, (window_size_left, window_size_right), q.dtype)
    rng_state = _new_rng_state(dropout_p, q)
    out, lse, probabilities = _calls.varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        (window_size_left, window_size_right), softcap, alibi_slopes, False, True, block_table, rng_state,
        return_softmax, leftpad_k, seqused_k, casts=False,
    )  # fmt: skip
    return out, lse, probabilities, rng_state


def _dot_rows(dout: Tensor, out: Tensor) -> Tensor:
    """sum over D of dout * out, fp32: (..., H)."""
    return (dout.float() * out.float()).sum(-1)


def _check_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, into: tuple[Tensor | None, ...]
) -> None:
    """dout and out as q with v's head dim; dq, dk, dv, where given, as q, k, v."""
    shape = (*q.shape[:-1], v.shape[-1])
    for name, x, expected in zip(
        ("dout", "out", "dq", "dk", "dv"),
        (dout, out, *into),
        (shape, shape, q.shape, k.shape, v.shape),
        strict=True,
    ):
        given = name in ("dout", "out")
        if x is None and not given:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.shape != expected:
            raise ValueError(f"{name} must be {list(expected)}, got {list(x.shape)}")
        if given and x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")


def _store(gradients: tuple[Tensor, ...], into: tuple[Tensor | None, ...]) -> None:
    for gradient, target in zip(gradients, into, strict=True):
        if target is not None:
            target.copy_(gradient.view_as(target))


@_without_gradients
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes dq, dk, dv where given; returns sum(dout * out) as (B, H, Sq rounded up to 128) fp32."""
    checks.qkv(q, k, v, 4)
    checks.options(dropout_p, softcap, (window_size_left, window_size_right), q.dtype)
    extras = _extras(q, q.shape[0], dropout_p, alibi_slopes, softcap, rng_state)
    _check_gradients(q, k, v, dout, out, (dq, dk, dv))
    batch, seqlen_q, num_heads = q.shape[:3]
    if softmax_lse.shape != (batch, num_heads, seqlen_q):
        raise ValueError(f"softmax_lse must be (batch, num_heads, seqlen_q), got {list(softmax_lse.shape)}")
    segments, host = _calls.segments_of_dense(batch, seqlen_q, k.shape[1], q)
    gradients = _calls.gradients(
        dout.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), out.flatten(0, 1),
        softmax_lse.transpose(0, 1).flatten(1), segments, host, seqlen_q, k.shape[1],
        softmax_scale, causal, (window_size_left, window_size_right), softcap, deterministic, extras,
    )  # fmt: skip
    _store(gradients, (dq, dk, dv))
    softmax_d = q.new_zeros(batch, num_heads, round_multiple(seqlen_q, 128), dtype=torch.float32)
    softmax_d[..., :seqlen_q] = _dot_rows(dout, out).transpose(1, 2)
    return softmax_d


@_without_gradients
def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes dq, dk, dv where given; returns sum(dout * out) as (H, total_q + 128 B) fp32, rows first."""
    checks.qkv(q, k, v, 3)
    checks.options(dropout_p, softcap, (window_size_left, window_size_right), q.dtype)
    _check_gradients(q, k, v, dout, out, (dq, dk, dv))
    max_seqlen_q = checks.length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = checks.length("max_seqlen_k", max_seqlen_k)
    checks.cu_seqlens_pair(
        ("cu_seqlens_q", cu_seqlens_q, q.shape[0], "max_seqlen_q", max_seqlen_q),
        ("cu_seqlens_k", cu_seqlens_k, k.shape[0], "max_seqlen_k", max_seqlen_k),
        q.device,
    )
    extras = _extras(q, cu_seqlens_q.shape[0] - 1, dropout_p, alibi_slopes, softcap, rng_state)
    if softmax_lse.shape != (q.shape[1], q.shape[0]):
        raise ValueError(f"softmax_lse must be (num_heads, total_q), got {list(softmax_lse.shape)}")
    gradients = _calls.gradients(
        dout, q, k, v, out, softmax_lse, _calls.varlen_segments(cu_seqlens_q, cu_seqlens_k), None,
        max_seqlen_q, max_seqlen_k, softmax_scale, causal, (window_size_left, window_size_right), softcap,
        deterministic, extras,
    )  # fmt: skip
    _store(gradients, (dq, dk, dv))
    batch = cu_seqlens_q.shape[0] - 1
    softmax_d = q.new_zeros(q.shape[1], q.shape[0] + 128 * batch, dtype=torch.float32)
    softmax_d[:, : q.shape[0]] = _dot_rows(dout, out).t()
    return softmax_d
