"""Keys of packed sequences that do not simply follow each other: in pages, behind padding, or fewer than
cu_seqlens_k says. Called by _calls.varlen.

Sequence b's keys are rows [leftpad_k[b], seqused_k[b]) of its own: those of its gathered pages (block_table),
or of k from cu_seqlens_k[b] on; none where leftpad_k[b] >= seqused_k[b]. Without leftpad_k from 0, without
seqused_k all. Forward only, as there: tensors that require gradients are taken, gradients are refused.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from flash_attn import checks


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise NotImplementedError("block_table, leftpad_k and seqused_k are forward only: no gradients")


def forward_only(out: Tensor, lse: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse as functions of `inputs` that refuse to be differentiated."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return cast(tuple[Tensor, Tensor], _ForwardOnly.apply(out, lse, *inputs))
    return out, lse


def _check(name: str, x: Any, shape: str, fits: bool, q: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.int32:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be an int32 tensor, got {kind}")
    if not fits or x.device != q.device:
        raise ValueError(f"{name} must be {shape} on {q.device}, got {list(x.shape)} on {x.device}")


def _check_pages(k: Any, v: Any) -> None:
    for name, x in (("k", k), ("v", v)):
        checks.dims(name, x, 4, "(num_blocks, page_size, num_heads_k, head_dim)")
    if k.shape[0] == 0:
        raise ValueError(f"k must have a page, got {list(k.shape)}")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v must have k's {list(k.shape[:2])} pages and rows, got {list(v.shape[:2])}")


def _gathered(x: Tensor, pages: Tensor) -> Tensor:
    return x[pages.clamp(0, x.shape[0] - 1).flatten()].flatten(0, 1)


def _check_used(length: Tensor, max_seqlen_k: int, pages: Tensor, num_blocks: int, page_size: int) -> None:
    """Keys in pages, where values may be read: no more than max_seqlen_k, and in pages that exist. Behind a
    sequence's keys pages may be any."""
    if not checks.values_are_read(length):
        return
    if bool((length > max_seqlen_k).any()):
        raise ValueError(f"seqused_k must be at most max_seqlen_k = {max_seqlen_k}, got {length.tolist()}")
    used = torch.arange(pages.shape[1], device=length.device) * page_size < length[:, None]
    if bool((used & ((pages < 0) | (pages >= num_blocks))).any()):
        raise ValueError(
            f"block_table must be within k's {num_blocks} pages where keys are, got {pages.tolist()}"
        )


def _zeros_between(v: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """v with zeros in the rows of no sequence: a tile of several short sequences spans the rows between them,
    and a weight of 0 does not remove NaN."""
    edges = torch.zeros(v.shape[0] + 1, dtype=torch.int32, device=v.device)
    for rows, step in ((begin, 1), (end, -1)):
        rows = rows.long().clamp(0, v.shape[0])
        edges.index_add_(0, rows, torch.full_like(rows, step, dtype=torch.int32))
    used = edges.cumsum(0)[:-1] > 0
    return v.where(used[:, None, None], 0)


def _paged_rows(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, length: Tensor, max_seqlen_k: int
) -> tuple[Tensor, Tensor, int]:
    """k and v (rows, Hk, D), the pages of each sequence gathered, and how many rows a sequence has there."""
    batch = length.shape[0]
    fits = getattr(block_table, "ndim", 0) == 2 and block_table.shape[0] == batch
    _check("block_table", block_table, f"(batch, pages) = [{batch}, *]", fits, q)
    _check_pages(k, v)
    pages, num_blocks, page_size = block_table.long(), k.shape[0], k.shape[1]
    _check_used(length, max_seqlen_k, pages, num_blocks, page_size)
    return _gathered(k, pages), _gathered(v, pages), pages.shape[1] * page_size


def _check_lengths(shift: Tensor, length: Tensor, most: Tensor) -> None:
    """Where values may be read: [shift, length) of each sequence within its `most` rows."""
    if not checks.values_are_read(length):
        return
    for name, x in (("leftpad_k", shift), ("seqused_k", length)):
        if bool((x < 0).any()):
            raise ValueError(f"{name} must be >= 0, got {x.tolist()}")
    length = (length - shift).clamp(min=0)
    if bool((shift + length > most).any()):
        raise ValueError(
            f"keys must be within the {most.tolist()} rows of their sequences, "
            f"got {length.tolist()} behind {shift.tolist()}"
        )


def find(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int,
    block_table: Tensor | None, leftpad_k: Tensor | None, seqused_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """k and v as rows (n, Hk, D), v's zero between the sequences, and their segments, (batch, 6) int32.

    Without gradients: `forward_only` ties the results to the tensors given."""
    batch = cu_seqlens_q.shape[0] - 1
    k, v = (x.detach() if isinstance(x, Tensor) else x for x in (k, v))
    for name, x in (("leftpad_k", leftpad_k), ("seqused_k", seqused_k)):
        if x is not None:
            _check(name, x, f"(batch,) = [{batch}]", getattr(x, "shape", None) == (batch,), q)
    begin, most = cu_seqlens_k[:-1].long(), cu_seqlens_k.diff().long()
    length = most if seqused_k is None else seqused_k.long()
    if block_table is not None:
        if leftpad_k is not None:
            raise NotImplementedError("block_table cannot be combined with leftpad_k")
        k, v, capacity = _paged_rows(q, k, v, block_table, length, max_seqlen_k)
        begin = torch.arange(batch, device=q.device) * capacity
        most = torch.full_like(length, capacity)
    shift = torch.zeros_like(begin) if leftpad_k is None else leftpad_k.long()
    _check_lengths(shift, length, most)
    length = (length - shift).clamp(min=0)  # a sequence that is all padding has no keys
    if block_table is not None:
        length = torch.minimum(length, most)
    zero = torch.zeros_like(cu_seqlens_q[1:])
    begin = (begin + shift).int()
    end = begin + length.int()
    columns = (cu_seqlens_q[:-1], cu_seqlens_q[1:], zero, zero, begin, end)
    return k, _zeros_between(v, begin, end), torch.stack(columns, 1)
