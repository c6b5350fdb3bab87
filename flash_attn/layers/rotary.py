"""Rotary position embeddings with flash-attn's names, in plain PyTorch: any device, differentiable.

Tensors are (batch, seqlen, num_heads, head_dim), or (total, num_heads, head_dim) with cu_seqlens; cos and
sin are (seqlen, rotary_dim / 2), and the first rotary_dim columns of a head are rotated. `interleaved`: pairs
are columns (0, 1), (2, 3), ... as in GPT-J; else (i, i + rotary_dim / 2) as in GPT-NeoX. The formula is in
../_rotary.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn import _rotary

Offsets = int | Tensor


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Pairs (a, b) of the last dim to (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x (B, S, H, D) rotated by cos, sin (S, rotary_dim / 2) or (B, S, rotary_dim / 2)."""
    return _rotary.rotate(x, cos[..., None, :], sin[..., None, :], interleaved)


def _split_heads(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor]:
    """Views of the queries and the keys, each (B, S, heads, D)."""
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        return qkv[:, :, 0], qkv[:, :, 1]
    if (
        qkv.dim() != 4
        or num_heads_q is None
        or num_heads_q > qkv.shape[2]
        or (qkv.shape[2] - num_heads_q) % 2
    ):
        raise ValueError(
            "qkv must be (batch, seqlen, 3, num_heads, head_dim), or (batch, seqlen, num_heads_q + "
            f"2 num_heads_k, head_dim) with num_heads_q, got {list(qkv.shape)}, num_heads_q = {num_heads_q}"
        )
    num_heads_k = (qkv.shape[2] - num_heads_q) // 2
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + num_heads_k]


class _Rotate(torch.autograd.Function):
    """Rotates parts of a tensor in place; the gradient is rotated back. `parts(x)` gives views of x, one for
    each cos.

    A leaf that requires a gradient is written to as well, as flash-attn does: its gradient is then that of
    the values it had, and the result is another tensor on its memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: bool, parts: Any, interleaved: bool, *tables: Tensor) -> Tensor:
        ctx.parts, ctx.interleaved = parts, interleaved
        ctx.save_for_backward(*tables)
        if not leaf:
            ctx.mark_dirty(x)
        for part, cos, sin in zip(parts(x), tables[0::2], tables[1::2], strict=True):
            _rotary.rotate(part, cos, sin, interleaved, out=part)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.clone()
        tables = ctx.saved_tensors
        for part, cos, sin in zip(ctx.parts(grad), tables[0::2], tables[1::2], strict=True):
            _rotary.rotate(part, cos, -sin, ctx.interleaved, out=part)
        return (grad, None, None, None, *[None] * len(tables))


def _in_place(x: Tensor, parts: Any, interleaved: bool, *tables: Tensor) -> Tensor:
    if torch.is_grad_enabled() and any(table.requires_grad for table in tables):
        raise NotImplementedError(
            "gradients of cos and sin are not supported in place: detach them, or call apply_rotary_emb "
            "without inplace"
        )
    leaf = x.is_leaf and x.requires_grad
    if torch.compiler.is_compiling():
        return _traced(x, leaf, parts, interleaved, *tables)
    return _Rotate.apply(x, leaf, parts, interleaved, *tables)


def _traced(x: Tensor, leaf: bool, parts: Any, interleaved: bool, *tables: Tensor) -> Tensor:
    """_Rotate by operations that torch.compile follows: of a graph's input that a Function writes to, it
    drops the Function's gradient without a word."""
    rotated = x.clone()
    for part, cos, sin in zip(parts(rotated), tables[0::2], tables[1::2], strict=True):
        _rotary.rotate(part, cos, sin, interleaved, out=part)
    if not leaf:
        return x.copy_(rotated)
    with torch.no_grad():
        x.copy_(rotated)
    return rotated


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """x (B, S, H, D), or (total, H, D) with cu_seqlens (B + 1,) and max_seqlen, with its pairs rotated.

    cos and sin (positions, rotary_dim / 2): row i of sequence b takes their row i + seqlen_offsets (an int,
    or (B,)). Pairs are columns (i, i + rotary_dim / 2), or (2 i, 2 i + 1) where `interleaved`. `inplace`
    writes into x (a leaf's gradient is that of the values it had) and has no gradients of cos and sin.
    Values of cu_seqlens are checked where reading them is free (on the CPU, or with FLASH_ATTN_CHECK=1).
    Returns x's shape and dtype.
    """
    _rotary.check(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    cos_rows, sin_rows = _rotary.rows(x, cos, sin, seqlen_offsets, cu_seqlens)
    if inplace:
        return _in_place(x, lambda y: (y,), interleaved, cos_rows, sin_rows)
    return _rotary.rotate(x, cos_rows, sin_rows, interleaved)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates queries and keys of qkv in place: (B, S, 3, H, D), or (B, S, num_heads_q + 2 Hk, D) with
    `num_heads_q`.

    Keys take cos_k, sin_k where given, else cos, sin. Returns qkv.
    """
    q, k = _split_heads(qkv, num_heads_q)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    for part, c, s in ((q, cos, sin), (k, cos_k, sin_k)):
        _rotary.check(part, c, s, seqlen_offsets, None, None)
    tables = (*_rotary.rows(q, cos, sin, seqlen_offsets), *_rotary.rows(k, cos_k, sin_k, seqlen_offsets))
    return _in_place(qkv, lambda x: _split_heads(x, num_heads_q), interleaved, *tables)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Offsets = 0
) -> Tensor:
    """Rotates the keys of kv (B, S, 2, Hk, D) in place. Returns kv."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv must be (batch, seqlen, 2, num_heads_k, head_dim), got {list(kv.shape)}")
    _rotary.check(kv[:, :, 0], cos, sin, seqlen_offsets, None, None)
    tables = _rotary.rows(kv[:, :, 0], cos, sin, seqlen_offsets)
    return _in_place(kv, lambda x: (x[:, :, 0],), interleaved, *tables)


class ApplyRotaryEmb:
    """flash-attn's autograd class of `apply_rotary_emb`, which older models call by its `apply`."""

    apply = staticmethod(apply_rotary_emb)


class ApplyRotaryEmbQKV_:
    """Likewise of `apply_rotary_emb_qkv_`."""

    apply = staticmethod(apply_rotary_emb_qkv_)


class ApplyRotaryEmbKV_:
    """Likewise of `apply_rotary_emb_kv_`."""

    apply = staticmethod(apply_rotary_emb_kv_)


class RotaryEmbedding(torch.nn.Module):
    """Rotates queries and keys by their positions, in place; keeps the tables of the longest sequence seen.

    `dim`: columns rotated. `base`: of the frequencies base ** (-2 i / dim). `scale_base`: XPos' decay where
    given (arXiv 2212.10554): queries times s ** ((t - T // 2) / scale_base), keys divided by it.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._inv_freq(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._scale(device), persistent=False)
        self._tables: tuple[Tensor, ...] = ()

    def _inv_freq(self, device: torch.device | str | None) -> Tensor:
        return self.base ** (-torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _scale(self, device: torch.device | str | None) -> Tensor:
        column = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return (column + 0.4 * self.dim) / (1.4 * self.dim)

    def _tables_for(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """cos, sin of the queries, then of the keys: (at least seqlen, dim / 2), angles taken in fp32."""
        known = self._tables
        fits = known and known[0].shape[0] >= seqlen and known[0].device == device and known[0].dtype == dtype
        if fits and (torch.compiler.is_compiling() or not (self.training and known[0].is_inference())):
            return known
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        # model.half() rounds buffers: then they are made again
        exact = self.inv_freq.dtype == torch.float32
        angle = torch.outer(position, (self.inv_freq if exact else self._inv_freq(device)).to(device))
        cos, sin = angle.cos(), angle.sin()
        tables: tuple[Tensor, ...] = (cos, sin, cos, sin)
        if self.scale is not None and self.scale_base is not None:
            scale = (self.scale if exact else self._scale(device)).to(device)
            decay = scale ** ((position - seqlen // 2) / self.scale_base)[:, None]
            tables = (cos * decay, sin * decay, cos / decay, sin / decay)
        self._tables = tuple(x.to(dtype) for x in tables)
        return self._tables

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: Offsets = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates qkv (B, S, 3, H, D) or (B, S, num_heads_q + 2 Hk, D), or q (B, S, H, D) and
        kv (B, S, 2, Hk, D) given as `qkv` and `kv`. Returns what it was given.

        `seqlen_offset`: rows before the first, an int, or (B,) with `max_seqlen`, the longest sequence with
        its offset; without it (B,) reach as far as the tables of calls before, behind which rows stay as
        they are.
        """
        if isinstance(seqlen_offset, int):
            seqlen = max(qkv.shape[1] + seqlen_offset, max_seqlen or 0)
        elif max_seqlen is not None:
            seqlen = max_seqlen
        elif self._tables:
            seqlen = self._tables[0].shape[0]
        else:
            raise ValueError("max_seqlen must be given where seqlen_offset is a tensor, got None")
        cos, sin, cos_k, sin_k = self._tables_for(seqlen, qkv.device, qkv.dtype)
        interleaved, offset = self.interleaved, seqlen_offset
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, interleaved, offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, interleaved, inplace=True, seqlen_offsets=offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, interleaved, offset)
