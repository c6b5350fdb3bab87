"""Log-probabilities and entropies of response tokens straight from hidden states, without the (tokens,
vocabulary) logits.

z = softcap(hidden W^T + b) / temperature,  log_prob = z[label] - lse(z),  entropy = lse(z) - sum softmax(z)
z. Rows and vocabulary are walked in tiles, forward (online log-sum-exp) and backward (tiles recomputed from
the saved one); nothing of the size of the logits is kept. Reads a `PackedBatch`'s maps; the last step of a
packed forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from flash_attn import checks
from flash_attn.shared_prompt._log_probs_checks import (
    check_options,
    check_pack_rows,
    check_tensors,
    check_values,
)
from flash_attn.shared_prompt.packing import IGNORE_INDEX, PackedBatch

MAX_TILE_ROWS = 8192
TILE_ELEMENTS = 2**25  # fp32 logits of a tile: 128 MiB
# Stands for -inf and all that lies below it inside a tile: exp gives 0, and 0 * (z - lse) stays 0 where
# -inf would make NaN.
_LOWEST = -1e30


class LogProbs(NamedTuple):
    """fp32 (fp64 for fp64 inputs), both in the shape of the labels; `entropy` is None where it was not asked
    for.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None


def log_probs(
    hidden: torch.Tensor,
    labels: torch.Tensor | PackedBatch,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    pred_index: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = IGNORE_INDEX,
    compute_entropy: bool = True,
    tile_elements: int = TILE_ELEMENTS,
) -> LogProbs:
    """Log-probability and entropy at every label, in memory of one tile of logits beside the gradients
    themselves.

    `hidden` (T, hidden_size) or (1, T, hidden_size) with the LM head's `weight` (vocab_size, hidden_size) and
    `bias` (vocab_size,), or without `weight` the logits themselves (T, vocab_size). `labels` is a
    `PackedBatch` (T = layout.num_rows; every response token, first ones included, both boundaries: results
    (n,) in the order of its labels, for `unpack_responses`), or an int64 tensor: (T,) or (1, T), the label
    that each row predicts, or with `pred_index` (n,) the label that row `pred_index[j]` predicts (rows may
    repeat; gradients of repeated hidden rows add up in fp32).

    `temperature` > 0, a number or one per label, flat or in the labels' shape (constants: no gradient);
    `softcap` is the model's final logit softcap (applied before the temperature); both are normal numbers of
    fp32 (fp64 for fp64 inputs). Nothing is changed in place. bf16 and fp16 logits are cast to fp32 before
    anything else happens. Labels equal to `ignore_index` give exactly 0 and no gradient. Logits of -inf have
    probability 0.

    Label values are checked on the CPU; on a GPU (no host sync, unless FLASH_ATTN_CHECK=1) a wrong label
    gives NaN. Gradients of both results flow to `hidden`, `weight` and `bias`, whichever require them; that
    of `weight` is added up in its own dtype, block by block of up to 8192 labels.
    """
    unique = False
    if isinstance(labels, PackedBatch):
        if pred_index is not None:
            raise ValueError("pred_index must not be given with a PackedBatch, which has its own")
        packed, unique = labels, labels.layout.boundary == "fork"
        labels, pred_index = packed.labels, packed.pred_index
        check_pack_rows(hidden, packed.layout.num_rows)
    rows = check_tensors(hidden, labels, weight, bias, pred_index)
    vocab_size = rows.shape[1] if weight is None else weight.shape[0]
    check_options(labels, vocab_size, temperature, softcap, ignore_index, tile_elements, rows.dtype)
    check_values(labels, pred_index, vocab_size, rows.shape[0], ignore_index)
    if torch.is_autocast_enabled(rows.device.type) and weight is not None and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    softcap = None if softcap is None else float(softcap)
    options = _Options(softcap, int(ignore_index), compute_entropy, int(tile_elements), unique)
    flat = labels.reshape(-1)
    scale = temperature.reshape(-1) if isinstance(temperature, torch.Tensor) else float(temperature)
    with torch.autocast(rows.device.type, enabled=False):
        values, entropy = _LogProbs.apply(rows, weight, bias, flat, pred_index, scale, options)
    return LogProbs(values.view(labels.shape), entropy.view(labels.shape) if compute_entropy else None)


class _Options(NamedTuple):
    """What is no tensor of one call. `unique_rows`: no row predicts two labels."""

    softcap: float | None
    ignore_index: int
    compute_entropy: bool
    tile_elements: int
    unique_rows: bool


class _Tiles:
    """The logits of one call, cut into blocks of rows (one per label) and of vocabulary."""

    def __init__(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        pred_index: torch.Tensor | None,
        temperature: float | torch.Tensor,
        options: _Options,
    ) -> None:
        self.rows, self.weight, self.bias = rows, weight, bias
        self.labels, self.pred_index, self.temperature = labels, pred_index, temperature
        self.tempered = isinstance(temperature, torch.Tensor) or temperature != 1.0
        self.softcap, self.ignore_index = options.softcap, options.ignore_index
        self.vocab_size = rows.shape[1] if weight is None else weight.shape[0]
        self.num_labels = labels.shape[0]
        self.num_rows = max(min(self.num_labels, MAX_TILE_ROWS, options.tile_elements), 1)
        self.num_columns = max(options.tile_elements // self.num_rows, 1)
        self.dtype = torch.promote_types(rows.dtype, torch.float32)

    def row_blocks(self) -> Iterator[slice]:
        for begin in range(0, self.num_labels, self.num_rows):
            yield slice(begin, min(begin + self.num_rows, self.num_labels))

    def column_blocks(self) -> Iterator[slice]:
        for begin in range(0, self.vocab_size, self.num_columns):
            yield slice(begin, min(begin + self.num_columns, self.vocab_size))

    def ignored(self, block: slice) -> torch.Tensor:
        return self.labels[block] == self.ignore_index

    def gather(self, block: slice) -> torch.Tensor:
        """Hidden rows of a block in the head's dtype; 0 for ignored labels, so that junk there reaches no
        gradient.
        """
        assert self.weight is not None
        rows = (
            self.rows[block] if self.pred_index is None else self.rows.index_select(0, self.pred_index[block])
        )
        return rows.to(self.weight.dtype).masked_fill(self.ignored(block)[:, None], 0)

    def raw(self, block: slice, columns: slice, gathered: torch.Tensor | None) -> torch.Tensor:
        """A fresh tile of logits in fp32, as the model gives them."""
        if self.weight is None:
            part = self.rows[:, columns]
            tile = part[block] if self.pred_index is None else part.index_select(0, self.pred_index[block])
            return tile.to(self.dtype, copy=True).masked_fill_(self.ignored(block)[:, None], 0)
        assert gathered is not None
        head = self.weight[columns].t()
        tile = gathered @ head if self.bias is None else torch.addmm(self.bias[columns], gathered, head)
        return tile.to(self.dtype)

    def row_temperature(self, block: slice) -> float | torch.Tensor:
        if isinstance(self.temperature, float):
            return self.temperature
        return self.temperature[block, None].to(self.dtype)

    def tile(self, block: slice, columns: slice, gathered: torch.Tensor | None) -> torch.Tensor:
        """z of the module's formula."""
        z = self.raw(block, columns, gathered)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z.div_(self.row_temperature(block)) if self.tempered else z

    def label_columns(self, block: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Column of each label in this tile (clamped) and whether it lies there."""
        column = self.labels[block] - columns.start
        inside = (column >= 0) & (column < columns.stop - columns.start)
        return column.clamp(0, columns.stop - columns.start - 1)[:, None], inside


def _forward_block(tiles: _Tiles, block: slice, with_entropy: bool) -> tuple[torch.Tensor, ...]:
    """Of one block of rows: log-probs, largest z, log-sum-exp relative to it, entropy.

    Sums are relative to the running maximum, and the parts of the log-sum-exp stay apart: their sum would
    round off what logits of 100 have behind the fifth decimal.
    """
    gathered = None if tiles.weight is None else tiles.gather(block)
    size = block.stop - block.start
    maximum = torch.full((size, 1), _LOWEST, dtype=tiles.dtype, device=tiles.rows.device)
    total, weighted, at_label = (
        torch.zeros_like(maximum),
        torch.zeros_like(maximum),
        torch.zeros_like(maximum),
    )
    for columns in tiles.column_blocks():
        z = tiles.tile(block, columns, gathered)
        column, inside = tiles.label_columns(block, columns)
        at_label = torch.where(inside[:, None], z.gather(1, column), at_label)
        z.clamp_(min=_LOWEST)
        new_maximum = torch.maximum(maximum, z.amax(1, keepdim=True))
        scale = (maximum - new_maximum).exp()
        z.sub_(new_maximum)
        exponentials = z.exp()
        if with_entropy:
            weighted = scale * (weighted + total * (maximum - new_maximum)) + z.mul_(exponentials).sum(
                1, keepdim=True
            )
        total = scale * total + exponentials.sum(1, keepdim=True)
        maximum = new_maximum
    # A row that lies below _LOWEST as a whole is flat, at its label too; -inf there stays impossible.
    at_label = at_label.masked_fill((maximum <= _LOWEST) & (at_label > -torch.inf), _LOWEST)
    log_total = total.log()
    entropy = log_total - weighted / total
    return tuple(x[:, 0] for x in (at_label - maximum - log_total, maximum, log_total, entropy))


def _backward_tile(
    tiles: _Tiles,
    block: slice,
    columns: slice,
    gathered: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    grads: tuple[torch.Tensor | None, torch.Tensor | None],
) -> torch.Tensor:
    """Gradient of the raw logits of a tile: d log_prob = onehot - p, d entropy = -p (z - lse + entropy)."""
    maximum, log_total, entropy = (s[block, None] for s in saved)
    grad, grad_entropy = (None if g is None else g[block, None] for g in grads)
    z = tiles.tile(block, columns, gathered).clamp_(min=_LOWEST)
    slope = None
    if tiles.softcap is not None:  # d softcap(x) = 1 - tanh(x / softcap)**2
        slope = (z * (tiles.row_temperature(block) / tiles.softcap)).square_().neg_().add_(1)
    probabilities = (z.sub_(maximum) - log_total).exp_()
    if grad_entropy is not None:
        z.sub_(log_total - entropy).mul_(grad_entropy)
        dz = (z if grad is None else z.add_(grad)).mul_(probabilities).neg_()
    else:
        assert grad is not None
        dz = probabilities.mul_(-grad)
    if grad is not None:
        column, inside = tiles.label_columns(block, columns)
        dz.scatter_add_(1, column, grad.where(inside[:, None], 0))
    if slope is not None:
        dz.mul_(slope)
    return dz.div_(tiles.row_temperature(block)) if tiles.tempered else dz


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        pred_index: torch.Tensor | None,
        temperature: float | torch.Tensor,
        options: _Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tiles = _Tiles(rows, weight, bias, labels, pred_index, temperature, options)
        blocks = [_forward_block(tiles, block, options.compute_entropy) for block in tiles.row_blocks()]
        empty = rows.new_zeros(0, dtype=tiles.dtype)
        parts = list(zip(*blocks, strict=True)) or [()] * 4
        values, maximum, log_total, entropy = (torch.cat([empty, *part]) for part in parts)
        ignored = labels == tiles.ignore_index
        wrong = ((labels < 0) | (labels >= tiles.vocab_size)) & ~ignored
        values = values.masked_fill(ignored, 0).masked_fill(wrong, float("nan"))
        is_tensor = isinstance(temperature, torch.Tensor)
        given = (rows, weight, bias, labels, pred_index, temperature if is_tensor else None)
        ctx.save_for_backward(*given, maximum, log_total, entropy)
        ctx.temperature = None if is_tensor else temperature
        ctx.options = options
        ctx.set_materialize_grads(False)
        return values, entropy.masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        checks.no_double_backward("log_probs")
        rows, weight, bias, labels, pred_index, temperature, *saved = ctx.saved_tensors
        temperature = ctx.temperature if temperature is None else temperature
        tiles = _Tiles(rows, weight, bias, labels, pred_index, temperature, ctx.options)
        if grad is None and grad_entropy is None:
            return (None,) * 7
        ignored = labels == tiles.ignore_index
        grad, grad_entropy = (
            None if g is None else g.to(tiles.dtype).masked_fill(ignored, 0) for g in (grad, grad_entropy)
        )
        grads = (grad, grad_entropy)
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if weight is None:
            return _logits_gradient(tiles, saved, grads), *(None,) * 6
        d_weight = torch.zeros_like(weight) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=tiles.dtype) if needs_bias else None
        # Where rows repeat, their gradients are added in fp32.
        repeats = pred_index is not None and not ctx.options.unique_rows
        d_rows = torch.zeros_like(rows, dtype=tiles.dtype if repeats else rows.dtype) if needs_rows else None
        for block in tiles.row_blocks():
            gathered = tiles.gather(block)
            d_block = torch.zeros_like(gathered, dtype=tiles.dtype) if needs_rows else None
            for columns in tiles.column_blocks():
                dz32 = _backward_tile(tiles, block, columns, gathered, saved, grads)
                if d_bias is not None:
                    d_bias[columns] += dz32.sum(0)
                dz = dz32.to(weight.dtype)
                del dz32
                if d_weight is not None:
                    d_weight[columns].addmm_(dz.t(), gathered)
                if d_block is not None:
                    d_block += dz @ weight[columns]
            if d_rows is not None and d_block is not None:
                if pred_index is None:
                    d_rows[block] = d_block
                else:
                    d_rows.index_add_(0, pred_index[block], d_block.to(d_rows.dtype))
        return (
            None if d_rows is None else d_rows.to(rows.dtype),
            d_weight,
            None if d_bias is None else d_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _logits_gradient(
    tiles: _Tiles, saved: Sequence[torch.Tensor], grads: tuple[torch.Tensor | None, torch.Tensor | None]
) -> torch.Tensor:
    """Gradient of given logits; rows that repeat are added in the logits' dtype."""
    d_logits = torch.zeros_like(tiles.rows)
    for block in tiles.row_blocks():
        for columns in tiles.column_blocks():
            dz = _backward_tile(tiles, block, columns, None, saved, grads).to(d_logits.dtype)
            if tiles.pred_index is None:
                d_logits[block, columns] = dz
            else:
                d_logits[:, columns].index_add_(0, tiles.pred_index[block], dz)
    return d_logits
