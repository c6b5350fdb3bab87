"""Bands of the mask that no ready-made kernel runs (narrow windows, softcap), tile by tile in plain torch.

    S = q k^T * scale  (softcap: c tanh(S / c)),  masked to o + lower <= j < o + upper
Merged into out and lse as in cpu.py. With `options` (_alibi_dropout.py) S takes ALiBi's bias, and dV and
out the dropout's weights.
A tile is 128 rows by as many keys as `_TILE_ELEMENTS` scores allow. All tensors are in the dtype of the
computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn._alibi_dropout import ScoreOptions
from flash_attn._pieces import Piece, Run
from flash_attn._rows import Rows

_TILE_ROWS = 128
_TILE_ELEMENTS = 1 << 21  # 8 MiB of fp32 scores


@dataclass(frozen=True, slots=True)
class _Tile:
    rows: Rows
    keys: Rows
    mask: Tensor | None  # (rows, keys), True where visible; None where everything is

    def options(
        self, options: ScoreOptions | None, num_k: int, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Bias of S and weights of P, (n, Hk, G * rows, keys), or None."""
        if options is None:
            return None, None
        device = options.segments.device
        rows, keys = self.rows.numbers(device), self.keys.numbers(device)
        bias, weights = options.bias(rows, keys, dtype), options.weights(rows, keys, dtype)
        grouped = [None if x is None else x.unflatten(1, (num_k, -1)).flatten(2, 3) for x in (bias, weights)]
        return grouped[0], grouped[1]


def _tiles(run: Run, num_heads: int, device: torch.device) -> Iterator[_Tile]:
    piece: Piece = run.piece
    per_row = num_heads * run.count
    for row_begin in range(0, piece.num_rows, _TILE_ROWS):
        row_end = min(piece.num_rows, row_begin + _TILE_ROWS)
        first, last = max(0, row_begin + piece.lower), min(piece.num_keys, row_end - 1 + piece.upper)
        step = max(_TILE_ROWS, _TILE_ELEMENTS // ((row_end - row_begin) * per_row))
        for begin in range(first, last, step):
            end = min(last, begin + step)
            mask = None
            if row_end - 1 + piece.lower > begin or row_begin + piece.upper < end:
                row = torch.arange(row_begin, row_end, device=device)[:, None]
                key = torch.arange(begin, end, device=device)[None, :]
                mask = (key >= row + piece.lower) & (key < row + piece.upper)
            yield _Tile(
                Rows(piece.q_begin + row_begin, row_end - row_begin, run.count, run.q_step),
                Rows(piece.k_begin + begin, end - begin, run.count, run.k_step),
                mask,
            )


def _grouped(x: Tensor, num_k: int) -> Tensor:
    """(n, rows, H, ...) -> (n, Hk, G * rows, ...): the query heads of a key head side by side, as rows of one
    product."""
    n = x.shape[0]
    return x.unflatten(2, (num_k, -1)).transpose(1, 2).transpose(2, 3).reshape(n, num_k, -1, *x.shape[3:])


def _ungrouped(x: Tensor, rows: int) -> Tensor:
    """The inverse: (n, Hk, G * rows, ...) -> (n, rows, H, ...)."""
    x = x.unflatten(2, (-1, rows))
    return x.movedim(3, 1).flatten(2, 3)


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float, softcap: float, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """S (n, Hk, G * rows, keys) with -inf where masked, and the softcap's derivative."""
    s = (q * scale) @ k.mT
    slope = None
    if softcap > 0.0:
        t = s.div_(softcap).tanh_()
        s, slope = t * softcap, 1.0 - t * t
    if bias is not None:
        s = s + bias
    if mask is not None:
        s.unflatten(2, (-1, mask.shape[0])).masked_fill_(~mask, -torch.inf)
    return s, slope


def forward(
    run: Run, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, out: Tensor, lse: Tensor,
    options: ScoreOptions | None = None,
) -> None:  # fmt: skip
    """Merges the band into out (total_q, H, Dv) and lse (total_q, H)."""
    for tile in _tiles(run, q.shape[1], q.device):
        keys, values = (tile.keys.take(x).transpose(1, 2) for x in (k, v))
        bias, weights = tile.options(options, k.shape[1], q.dtype)
        s, _ = _scores(_grouped(tile.rows.take(q), k.shape[1]), keys, tile.mask, scale, softcap, bias)
        # A row without a key in this tile has the lowest number as its peak, so that its P is 0.
        peak = s.amax(-1, keepdim=True).clamp_min(torch.finfo(s.dtype).min)
        p = s.sub_(peak).exp_()
        total = p.sum(-1, keepdim=True)
        p = p if weights is None else p * weights
        o = _ungrouped((p @ values).div_(total.clamp_min(torch.finfo(s.dtype).tiny)), tile.rows.size)
        l = _ungrouped((peak + total.log())[..., 0], tile.rows.size)
        before = tile.rows.take(lse)
        weight = torch.sigmoid(l - before).masked_fill_(l == -torch.inf, 0.0)
        tile.rows.take(out).lerp_(o, weight[..., None])
        tile.rows.put(lse, torch.logaddexp(before, l))


def backward(
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    softcap: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    options: ScoreOptions | None = None,
) -> None:
    """Adds the band's gradients to dq (total_q, H, D), dk and dv; lse and delta (total_q, H)."""
    num_k = k.shape[1]
    for tile in _tiles(run, q.shape[1], q.device):
        keys, values = (tile.keys.take(x).transpose(1, 2) for x in (k, v))
        bias, weights = tile.options(options, num_k, q.dtype)
        q_tile, dout_tile, lse_tile, delta_tile = (
            _grouped(tile.rows.take(x), num_k) for x in (q, dout, lse, delta)
        )
        s, slope = _scores(q_tile, keys, tile.mask, scale, softcap, bias)
        p = s.sub_(lse_tile.masked_fill(lse_tile == -torch.inf, 0.0)[..., None]).exp_()
        dropped = p if weights is None else p * weights
        tile.keys.add(dv, (dropped.mT @ dout_tile).transpose(1, 2))
        dp = dout_tile @ values.mT
        ds = (dp if weights is None else dp.mul_(weights)).sub_(delta_tile[..., None]).mul_(p)
        ds = ds.mul_(scale) if slope is None else ds.mul_(slope).mul_(scale)
        tile.keys.add(dk, (ds.mT @ q_tile).transpose(1, 2))
        tile.rows.add(dq, _ungrouped(ds @ keys, tile.rows.size))
