"""`apply_rotary`: rotary embedding without autograd (layers/rotary.py has it with)."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn import _rotary


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """x (B, S, H, D), or (total, H, D) with cu_seqlens, rotated by cos, sin (S, rotary_dim / 2).

    `conjugate` rotates back, `inplace` writes into x.
    """
    _rotary.check(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    with torch.no_grad():
        cos_rows, sin_rows = _rotary.rows(x, cos, sin, seqlen_offsets, cu_seqlens)
        sin_rows = -sin_rows if conjugate else sin_rows
        return _rotary.rotate(x, cos_rows, sin_rows, interleaved, out=x if inplace else None)
