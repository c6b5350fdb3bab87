"""Values between a pack and the caller's rows: per pack row or per response token, in both directions.

Gathers and scatters through the maps of a `PackedBatch`: differentiable, no host synchronisation.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence

import torch

from flash_attn.shared_prompt.packing import PackedBatch


def _check_fill(fill: float, dtype: torch.dtype) -> None:
    """Raises unless `dtype` holds `fill` (floating point: rounded, but not to infinity)."""
    if not isinstance(fill, numbers.Real):
        raise TypeError(f"fill must be a number, got {type(fill).__name__}")
    is_finite = abs(fill) < math.inf  # torch.compile takes it with dynamic shapes, math.isfinite it does not
    if dtype.is_floating_point or dtype.is_complex:
        held = not is_finite or abs(fill) <= torch.finfo(dtype).max
    else:
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        held = is_finite and fill == int(fill) and low <= fill <= high
    if not held:
        raise ValueError(f"fill must be a value of {dtype} like values, got {fill}")


def _gather_grid(values: torch.Tensor, index: torch.Tensor, fill: float) -> torch.Tensor:
    _check_fill(fill, values.dtype)
    if values.shape[0] == 0:
        return values.new_full((*index.shape, *values.shape[1:]), fill)
    grid = values.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, *values.shape[1:])
    # Not torch.where: it would promote integers to the dtype of the fill.
    return grid.masked_fill((index < 0).view(*index.shape, *[1] * (values.dim() - 1)), fill)


def _sized(
    name: str, values: torch.Tensor | Sequence[torch.Tensor], sizes: tuple[int, ...], what: str
) -> torch.Tensor:
    """`values`; raises unless they are a tensor whose first sizes are `sizes`."""
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{name} must be a tensor here, got {type(values).__name__}")
    if tuple(values.shape[: len(sizes)]) != sizes:
        raise ValueError(f"{name} must be ({what}, ...) = {sizes} first, got {list(values.shape)}")
    return values


def unpack(
    values: torch.Tensor, packed: PackedBatch, *, fill: float = 0.0
) -> torch.Tensor | list[torch.Tensor]:
    """Per-pack-row values (T, ...) at the caller's tokens: (B, W, ...), or for lists one (tokens of row, ...)
    per row.

    `fill` stands at masked tokens; the result has the dtype of `values`, which must hold it (ValueError).
    Rows of a group receive the same value at shared tokens; gradients add up there.
    """
    values = _sized("values", values, (packed.layout.num_rows,), "num_rows")
    grid = _gather_grid(values, packed.grid_to_packed, fill)
    if packed.list_lens is None:
        return grid
    width = packed.grid_to_packed.shape[1] - packed.grid_to_response.shape[1]
    return [
        torch.cat([row[:p], row[width : width + r]])
        for row, (p, r) in zip(grid, packed.list_lens, strict=True)
    ]


def unpack_responses(
    values: torch.Tensor, packed: PackedBatch, *, fill: float = 0.0
) -> torch.Tensor | list[torch.Tensor]:
    """Per-response-token values (n, ...), as `log_probs` gives them: (B, response width, ...), or for lists
    one per row. `fill` as in `unpack`.
    """
    values = _sized("values", values, (packed.labels.shape[0],), "num_response_tokens")
    grid = _gather_grid(values, packed.grid_to_response, fill)
    if packed.list_lens is None:
        return grid
    return [row[:r] for row, (_, r) in zip(grid, packed.list_lens, strict=True)]


def _as_grid(name: str, values: torch.Tensor | Sequence[torch.Tensor], lens: list[int]) -> torch.Tensor:
    """The values of a batch of lists as (num_rows, longest row, ...), right-padded."""
    if isinstance(values, torch.Tensor):
        return _sized(name, values, (len(lens), max(lens, default=0)), "num_rows, longest row")
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        raise TypeError(f"{name} must be a tensor or one sequence per row, got {type(values).__name__}")
    rows = [torch.as_tensor(v) for v in values]
    got = [len(row) if row.dim() else None for row in rows]
    if got != lens:
        raise ValueError(f"{name} must have one value per token of each row {lens}, got {got}")
    if not rows:
        return torch.zeros(0, 0)
    # pad_sequence would cast to the first row's dtype, and an empty list is float32 whatever it stands for.
    dtypes = [row.dtype for row in rows if len(row)] or [rows[0].dtype]
    dtype = functools.reduce(torch.promote_types, dtypes)
    return torch.nn.utils.rnn.pad_sequence([row.to(dtype) for row in rows], batch_first=True)


def pack_tokens(values: torch.Tensor | Sequence[torch.Tensor], packed: PackedBatch) -> torch.Tensor:
    """Per-token values of the caller (B, W, ...), or lists, as (T, ...).

    For a batch packed from lists, a tensor is (B, longest row, ...), right-padded. A shared row takes the
    value of its group's first row; rows behind `layout.total` that of the grid's first token.
    """
    shape = packed.grid_to_packed.shape
    if packed.list_lens is not None:
        lens = [p + r for p, r in packed.list_lens]
        rows = _as_grid("values", values, lens)
        width = shape[1] - packed.grid_to_response.shape[1]
        columns = torch.zeros(shape, dtype=torch.int64)
        for i, (p, r) in enumerate(packed.list_lens):
            columns[i, :p], columns[i, width : width + r] = torch.arange(p), torch.arange(p, p + r)
        columns = columns.to(rows.device)
        values = rows[torch.arange(shape[0], device=rows.device)[:, None], columns]
    values = _sized("values", values, tuple(shape), "num_rows, width")
    if shape.numel() == 0:
        return values.new_zeros((packed.layout.num_rows, *values.shape[2:]))
    return values.flatten(0, 1).index_select(0, packed.packed_to_grid)


def pack_responses(values: torch.Tensor | Sequence[torch.Tensor], packed: PackedBatch) -> torch.Tensor:
    """Per-response-token values of the caller (B, response width, ...), or lists, in the order of `labels`:
    (n, ...).

    For advantages, old log-probs and weights. With capacities, 0 behind the batch's own tokens.
    """
    shape = packed.grid_to_response.shape
    if packed.list_lens is not None:
        values = _as_grid("values", values, [r for _, r in packed.list_lens])
    values = _sized("values", values, tuple(shape), "num_rows, response width")
    out = values.new_zeros((packed.labels.shape[0] + 1, *values.shape[2:]))
    slot = packed.grid_to_response.flatten()
    slot = slot.where(slot >= 0, packed.labels.shape[0])  # masked tokens fall into one row that is cut off
    index = slot.view(-1, *[1] * (values.dim() - 2)).expand(values.flatten(0, 1).shape)
    return out.scatter(0, index, values.flatten(0, 1))[:-1]
