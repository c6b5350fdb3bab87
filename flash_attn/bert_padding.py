"""Padded batches to packed rows and back: x (B, S, ...) with a mask (B, S) <-> rows (total, ...) and their
indices.

The names, argument orders and return values are flash-attn's, which transformers and trainers import.
Everything is differentiable by plain indexing.
"""

from __future__ import annotations

import torch
from einops import rearrange  # noqa: F401 (imported from here by trainers)
from torch import Tensor

_Unpadded = tuple[Tensor, Tensor, Tensor, int, Tensor]


def _check_mask(name: str, mask: Tensor, like: Tensor) -> None:
    if mask.dim() != 2 or mask.shape != like.shape[:2]:
        raise ValueError(f"{name} must be (batch, seqlen) = {list(like.shape[:2])}, got {list(mask.shape)}")


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` (n,) of x (rows, ...): (n, ...)."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse: values (n, ...) at rows `indices`, distinct, of a zero tensor (first_axis_dim, ...).

    `indices` may be int32: transformers passes cu_seqlens when it decodes a padded batch.
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and x itself for a residual connection."""
    return index_first_axis(x, indices), x


class IndexFirstAxis:
    """flash-attn's autograd class of `index_first_axis`, which some models call by its `apply`."""

    apply = staticmethod(index_first_axis)


class IndexPutFirstAxis:
    """Likewise of `index_put_first_axis`."""

    apply = staticmethod(index_put_first_axis)


class IndexFirstAxisResidual:
    """Likewise of `index_first_axis_residual`."""

    apply = staticmethod(index_first_axis_residual)


def _cu_seqlens(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> _Unpadded:
    """The rows of hidden_states (B, S, ...) that a mask keeps.

    `attention_mask` (B, S): not 0 marks a token. `unused_mask` (B, S): rows that are allocated without being
    attended to; they are kept too. Returns (rows (total, ...), indices (total,) int64 into B * S,
    cu_seqlens (B + 1,) int32 of the kept rows, max_seqlen as a Python int, seqused (B,) int32: attended rows
    per sequence).
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    attended = kept = attention_mask != 0
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        kept = attended | (unused_mask != 0)
    lengths = kept.sum(-1, dtype=torch.int32)
    seqused = attended.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        _cu_seqlens(lengths),
        max_seqlen,
        seqused,
    )


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` for rows that hold several sequences one after the other.

    `attention_mask_in_length` (B, S): row b lists the lengths of its sequences, followed by zeros. Returns
    (rows, indices int64, cu_seqlens int32 of every sequence, max_seqlen).
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    used = attention_mask_in_length.sum(-1)
    position = torch.arange(hidden_states.shape[1], device=used.device)
    indices = (position < used[:, None]).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length > 0].to(torch.int32)
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _cu_seqlens(lengths), max_seqlen


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """rows (total, ...) back to (batch, seqlen, ...), zeros where the mask kept nothing."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
