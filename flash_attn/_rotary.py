"""Rotary position embedding: pairs (a, b) of a head's first `rotary_dim` columns are turned by their row's
angle,

    (a, b) -> (a cos - b sin, a sin + b cos)        RoFormer, arXiv 2104.09864
computed in fp32 (fp64 for fp64 rows). Shared by layers/rotary.py and ops/triton/rotary.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    if cu_seqlens is not None and max_seqlen is None:
        raise ValueError("max_seqlen must be given with cu_seqlens, got None")
    seqlen = x.shape[1] if cu_seqlens is None else int(max_seqlen or 0)
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if isinstance(seqlen_offsets, Tensor):
        if seqlen_offsets.shape != (batch,):
            raise ValueError(
                f"seqlen_offsets must be an int or (batch,) = [{batch}], got {list(seqlen_offsets.shape)}"
            )
    elif seqlen_offsets < 0 or seqlen_offsets + seqlen > cos.shape[0]:
        raise ValueError(
            f"cos must have rows for {seqlen_offsets} + {seqlen} positions, got {cos.shape[0]} rows"
        )


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
    """cos and sin of every row of x, (..., 1, rotary_dim / 2). Rows beyond the tables are not turned."""
    position = _positions(x, seqlen_offsets, cu_seqlens)
    known = ((position >= 0) & (position < cos.shape[0]))[..., None]
    position = position.clamp(0, max(cos.shape[0] - 1, 0))
    one = torch.ones((), dtype=cos.dtype, device=cos.device)
    cos_rows, sin_rows = torch.where(known, cos[position], one), torch.where(known, sin[position], one - 1)
    return cos_rows[..., None, :], sin_rows[..., None, :]


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor | None = None) -> Tensor:
    """x (..., num_heads, head_dim) turned by the rows' angles; into `out` (x itself, say) where given."""
    half = cos.shape[-1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    turned = x[..., : 2 * half].to(dtype)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    first, second = a * cos - b * sin, a * sin + b * cos
    pairs = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    if out is None:
        return torch.cat((pairs.to(x.dtype), x[..., 2 * half :]), -1)
    out[..., : 2 * half] = pairs.to(x.dtype)
    return out
