"""Rotary position embedding: pairs (a, b) of a head's first `rotary_dim` columns are rotated by the angle of
their row's position,

    (a, b) -> (a cos - b sin, a sin + b cos)        RoFormer, arXiv 2104.09864
computed in fp32 (fp64 for fp64 rows). Shared by layers/rotary.py and ops/triton/rotary.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn import checks


def check(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> None:
    """Raises for arguments that do not belong together."""
    num_dims, form = (
        (4, "(batch, seqlen, num_heads, head_dim)")
        if cu_seqlens is None
        else (3, "(total, num_heads, head_dim)")
    )
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    if x.dim() != num_dims:
        raise ValueError(f"x must be {form}, got {list(x.shape)}")
    if cos.dim() != 2 or cos.shape != sin.shape:
        raise ValueError(
            f"cos and sin must be (seqlen, rotary_dim / 2), got {list(cos.shape)}, {list(sin.shape)}"
        )
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"cos must have at most head_dim / 2 = {x.shape[-1] // 2} columns, got {cos.shape[1]}"
        )
    seqlen, batch = (x.shape[1], x.shape[0]) if cu_seqlens is None else _packed(x, cu_seqlens, max_seqlen)
    if isinstance(seqlen_offsets, Tensor):
        if seqlen_offsets.shape != (batch,):
            raise ValueError(
                f"seqlen_offsets must be an int or (batch,) = [{batch}], got {list(seqlen_offsets.shape)}"
            )
        if seqlen_offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"seqlen_offsets must be int32 or int64, got {seqlen_offsets.dtype}")
        return
    seqlen_offsets = checks.integer("seqlen_offsets", seqlen_offsets)
    if seqlen_offsets < 0 or seqlen_offsets + seqlen > cos.shape[0]:
        raise ValueError(
            f"cos must have rows for {seqlen_offsets} + {seqlen} positions, got {cos.shape[0]} rows"
        )


def _packed(x: Tensor, cu_seqlens: Any, max_seqlen: Any) -> tuple[int, int]:
    """Longest length and number of the sequences of x (total, num_heads, head_dim), checked."""
    if max_seqlen is None:
        raise ValueError("max_seqlen must be given with cu_seqlens, got None")
    checks.dims("cu_seqlens", cu_seqlens, 1, "(batch + 1,)")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must be (batch + 1,) with batch >= 1, got {list(cu_seqlens.shape)}")
    seqlen = checks.length("max_seqlen", max_seqlen)
    if checks.values_are_read(cu_seqlens):
        checks.cu_seqlens_values("cu_seqlens", cu_seqlens, x.shape[0], "max_seqlen", seqlen)
    return seqlen, cu_seqlens.shape[0] - 1


def _positions(x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The position of every row of x: (seqlen,), (batch, seqlen) or (total,)."""
    if cu_seqlens is None:
        row = torch.arange(x.shape[1], device=x.device)
        return row + (seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets)
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    sequence = sequence.clamp(max=cu_seqlens.shape[0] - 2)
    position = row - cu_seqlens[sequence]
    return position + (seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets)


def rows(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of every row of x, (..., 1, rotary_dim / 2). Rows beyond the tables are not rotated."""
    position = _positions(x, seqlen_offsets, cu_seqlens)
    known = ((position >= 0) & (position < cos.shape[0]))[..., None]
    position = position.clamp(0, max(cos.shape[0] - 1, 0))
    one = torch.ones((), dtype=cos.dtype, device=cos.device)
    cos_rows, sin_rows = torch.where(known, cos[position], one), torch.where(known, sin[position], one - 1)
    return cos_rows[..., None, :], sin_rows[..., None, :]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor | None = None) -> Tensor:
    """x (..., num_heads, head_dim) rotated by the rows' angles; into `out` (x itself, say) where given."""
    half = cos.shape[-1]
    wide = x[..., : 2 * half].to(checks.arithmetic(x.dtype))
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    first, second = a * cos - b * sin, a * sin + b * cos
    pairs = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    if out is None:
        return torch.cat((pairs.to(x.dtype), x[..., 2 * half :]), -1)
    out[..., : 2 * half] = pairs.to(x.dtype)
    return out
