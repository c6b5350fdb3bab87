"""Segments cut into rectangles and triangles that ready-made attention kernels can run.

Row o of a segment (Lq rows, P context keys, Lk own keys) stands at pos = P + Lk - Lq + o and sees logical keys
[pos - window_left, pos + right] of 0..P+Lk-1, the context first. In either region that is a band over (row o, key j):
    o + lower <= j < o + upper,   with j counted from the region's first key.
A band is cut into FULL rectangles, CAUSAL squares (row m sees keys 0..m) and, at window edges, BAND pieces.
Used by cpu.py and composed.py; the CUDA kernels read per-row spans instead.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

INFINITE = 1 << 40  # beyond any length


class Kind(enum.Enum):
    FULL = "full"
    CAUSAL = "causal"
    BAND = "band"


@dataclass(frozen=True, slots=True)
class Piece:
    """Absolute rows [q_begin, q_end) against absolute keys [k_begin, k_end) of the context or of k."""

    context: bool
    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    kind: Kind
    lower: int = -INFINITE  # BAND only: row o of the piece sees keys j with o + lower <= j < o + upper
    upper: int = INFINITE

    @property
    def num_rows(self) -> int:
        return self.q_end - self.q_begin

    @property
    def num_keys(self) -> int:
        return self.k_end - self.k_begin


def check_table(table: list[list[int]], total_q: int, total_k: int, total_context: int) -> None:
    """ValueError unless q rows are consecutive from 0, k intervals are in order, and everything lies in the tensors."""
    q_next, k_next = 0, 0
    for index, (q_begin, q_end, c_begin, c_end, k_begin, k_end) in enumerate(table):
        row = table[index]
        if q_begin != q_next or q_end < q_begin:
            raise ValueError(f"segments[{index}] must start at q row {q_next} and not end before it, got {row}")
        if q_end > total_q:
            raise ValueError(f"segments[{index}] must end within the {total_q} rows of q, got {row}")
        if k_begin < k_next or k_end < k_begin or k_end > total_k:
            raise ValueError(f"segments[{index}] must have ordered keys within the {total_k} rows of k, got {row}")
        if c_begin < 0 or c_end < c_begin or c_end > total_context:
            raise ValueError(f"segments[{index}] must have its context within {total_context} rows, got {row}")
        q_next, k_next = q_end, k_end


def decompose(
    segments: list[list[int]], causal: bool, window_left: int, window_right: int, split_bands: bool = True
) -> list[Piece]:
    """Pieces of every segment, in order; pieces of adjacent rows on the same keys are joined where both are FULL.

    `split_bands` False keeps each region of each segment as one BAND (for implementations that mask themselves).
    """
    left = INFINITE if window_left < 0 else window_left
    right = 0 if causal else (INFINITE if window_right < 0 else window_right)
    pieces: list[Piece] = []
    for q_begin, q_end, c_begin, c_end, k_begin, k_end in segments:
        num_rows, num_context, num_keys = q_end - q_begin, c_end - c_begin, k_end - k_begin
        shift = num_context + num_keys - num_rows
        context = Piece(True, q_begin, q_end, c_begin, c_end, Kind.BAND, shift - left, shift + right + 1)
        shift -= num_context
        own = Piece(False, q_begin, q_end, k_begin, k_end, Kind.BAND, shift - left, shift + right + 1)
        for band in (context, own):
            pieces.extend(_cut(band, split_bands))
    return _join(pieces)


def _cut(band: Piece, split: bool) -> Iterable[Piece]:
    """The pieces of one band: nothing where no row sees a key, FULL where no mask is needed."""
    n = band.num_keys
    # Rows that see a key at all: o + upper > 0 and o + lower < n.
    first, last = max(0, 1 - band.upper), min(band.num_rows, n - band.lower)
    if n == 0 or first >= last:
        return []
    band = replace(
        band,
        q_begin=band.q_begin + first,
        q_end=band.q_begin + last,
        lower=band.lower + first,
        upper=band.upper + first,
    )
    num_rows = band.num_rows
    if num_rows - 1 + band.lower <= 0 and band.upper >= n:
        return [replace(band, kind=Kind.FULL, lower=-INFINITE, upper=INFINITE)]
    if not split or num_rows - 1 + band.lower > 0:
        return [band]
    # Only the upper edge cuts: a rectangle, a triangle below it, and full rows under both.
    pieces = []
    stairs = min(num_rows, n - band.upper + 1)  # rows whose last visible key moves with them
    width = band.upper - 1  # keys that all of them see, before the triangle starts
    if stairs > 0:
        rows = {"q_begin": band.q_begin, "q_end": band.q_begin + stairs, "lower": -INFINITE, "upper": INFINITE}
        if width > 0:
            pieces.append(replace(band, k_end=band.k_begin + width, kind=Kind.FULL, **rows))
        begin = band.k_begin + width
        pieces.append(replace(band, k_begin=begin, k_end=begin + stairs, kind=Kind.CAUSAL, **rows))
    if stairs < num_rows:
        rest = band.q_begin + max(stairs, 0)
        pieces.append(replace(band, q_begin=rest, kind=Kind.FULL, lower=-INFINITE, upper=INFINITE))
    return pieces


def _join(pieces: list[Piece]) -> list[Piece]:
    """FULL pieces of consecutive rows on the same keys become one (the responses of a group on their context)."""
    joined: list[Piece] = []
    open_full: dict[tuple[bool, int, int], int] = {}
    for piece in pieces:
        key = (piece.context, piece.k_begin, piece.k_end)
        index = open_full.get(key) if piece.kind is Kind.FULL else None
        if index is not None and joined[index].q_end == piece.q_begin:
            joined[index] = replace(joined[index], q_end=piece.q_end)
            continue
        if piece.kind is Kind.FULL:
            open_full[key] = len(joined)
        joined.append(piece)
    return joined


def table_of(segments: Tensor, segments_host: Tensor | None) -> list[list[int]]:
    """The table as Python ints; a device sync where only the GPU has it."""
    return (segments if segments_host is None else segments_host).tolist()
