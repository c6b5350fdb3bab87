"""Segments cut into rectangles and triangles that ready-made attention kernels can run.

Row o of a segment (Lq rows, P context keys, Lk own keys) stands at pos = P + Lk - Lq + o and sees logical
keys [pos - window_left, pos + right] of 0..P+Lk-1, the context first. In either region that is a band over
(row o, key j), with j counted from the region's first key:

    o + lower <= j < o + upper

A band is cut into FULL rectangles, CAUSAL squares (row m sees keys 0..m) and REVERSED squares (row m sees
keys m..n-1). Used by cpu.py and composed.py; the CUDA kernels read per-row spans instead.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

INFINITE = 1 << 40  # beyond any length
Table = list[list[int]]


class Kind(enum.Enum):
    FULL = "full"
    CAUSAL = "causal"
    REVERSED = "reversed"
    BAND = "band"


@dataclass(frozen=True, slots=True)
class Piece:
    """Absolute rows [q_begin, q_begin + num_rows) against absolute keys [k_begin, k_begin + num_keys) of one
    region."""

    context: bool
    kind: Kind
    q_begin: int
    num_rows: int
    k_begin: int
    num_keys: int
    lower: int = -INFINITE  # BAND: row o of the piece sees keys j with o + lower <= j < o + upper
    upper: int = INFINITE


@dataclass(frozen=True, slots=True)
class Run:
    """`count` pieces of one shape at equal distances: piece i is `piece` moved by i * q_step rows and i *
    k_step keys."""

    piece: Piece
    count: int
    q_step: int
    k_step: int


def check_table(table: Table, total_q: int, total_k: int, total_context: int | None) -> None:
    """ValueError unless q rows are consecutive from 0, k intervals are in order, and all lies in the tensors.

    `total_context` None: contexts are rows of k itself, and a segment must not meet a key twice.
    """
    q_next, k_next = 0, 0
    context_rows = total_k if total_context is None else total_context
    for index, row in enumerate(table):
        q_begin, q_end, context_begin, context_end, k_begin, k_end = row
        problem = None
        if q_begin != q_next or q_end < q_begin:
            problem = f"must start at q row {q_next} and not end before it"
        elif q_end > total_q:
            problem = f"must end within the {total_q} rows of q"
        elif k_begin < k_next or k_end < k_begin or k_end > total_k:
            problem = f"must have ordered keys within the {total_k} rows of k"
        elif context_begin < 0 or context_end < context_begin or context_end > context_rows:
            problem = f"must have its context within {context_rows} rows"
        elif total_context is None and max(context_begin, k_begin) < min(context_end, k_end):
            problem = "must not have context rows among its own keys"
        if problem:
            raise ValueError(f"segments[{index}] {problem}, got {row}")
        q_next, k_next = q_end, k_end


def bands(table: Table, causal: bool, window_left: int, window_right: int) -> Iterator[Piece]:
    """Both regions of every segment as BAND pieces, without the rows that see nothing of the region."""
    left = INFINITE if window_left < 0 else window_left
    right = 0 if causal else (INFINITE if window_right < 0 else window_right)
    for q_begin, q_end, context_begin, context_end, k_begin, k_end in table:
        num_rows, num_context, num_keys = q_end - q_begin, context_end - context_begin, k_end - k_begin
        shift = num_context + num_keys - num_rows
        lower, upper = shift - left, shift + right + 1
        yield from _trim(Piece(True, Kind.BAND, q_begin, num_rows, context_begin, num_context, lower, upper))
        lower, upper = lower - num_context, upper - num_context
        yield from _trim(Piece(False, Kind.BAND, q_begin, num_rows, k_begin, num_keys, lower, upper))


def cut(
    table: Table, causal: bool, window_left: int, window_right: int, min_band_width: int = 128
) -> list[Piece]:
    """Pieces of every segment without BANDs, except where the band is narrower than `min_band_width` keys.

    FULL pieces of consecutive rows on the same keys are joined: the responses of a group on their context.
    """
    pieces: list[Piece] = []
    for band in bands(table, causal, window_left, window_right):
        cuts_both = band.upper < band.num_keys and band.lower + band.num_rows - 1 > 0
        if cuts_both and band.upper - band.lower < min_band_width:
            pieces.append(band)
        else:
            pieces.extend(_cut(band))
    return _join(pieces)


def _rows(band: Piece, begin: int, end: int) -> Piece:
    return replace(
        band,
        q_begin=band.q_begin + begin,
        num_rows=end - begin,
        lower=band.lower + begin,
        upper=band.upper + begin,
    )


def _keys(band: Piece, begin: int, end: int) -> Piece:
    return replace(
        band,
        k_begin=band.k_begin + begin,
        num_keys=end - begin,
        lower=band.lower - begin,
        upper=band.upper - begin,
    )


def _trim(band: Piece) -> list[Piece]:
    """The band without rows that see no key and keys that no row sees; nothing where it is empty."""
    begin, end = max(0, 1 - band.upper), min(band.num_rows, band.num_keys - band.lower)
    if begin >= end:
        return []
    band = _rows(band, begin, end)
    begin, end = max(0, band.lower), min(band.num_keys, band.num_rows - 1 + band.upper)
    return [_keys(band, begin, end)] if begin < end else []


def _cut(band: Piece) -> Iterator[Piece]:
    """The pieces of a band that may be cut by either edge."""
    for part in _trim(band):
        if part.lower + part.num_rows - 1 <= 0:
            yield from _cut_upper(part)
        elif part.upper >= part.num_keys:
            yield from _cut_lower(part)
        else:
            # The first row's last key is seen by the next upper - lower - 1 rows too. Split them there: left
            # of it only the lower edge cuts, from it on only the upper one.
            num_rows = min(part.num_rows, part.upper - part.lower)
            block, key = _rows(part, 0, num_rows), part.upper - 1
            yield from _cut(_keys(block, 0, key))
            yield from _cut(_keys(block, key, part.num_keys))
            yield from _cut(_rows(part, num_rows, part.num_rows))


def _full(band: Piece) -> Iterable[Piece]:
    if band.num_rows > 0 and band.num_keys > 0:
        yield replace(band, kind=Kind.FULL, lower=-INFINITE, upper=INFINITE)


def _cut_upper(band: Piece) -> Iterator[Piece]:
    """Row o sees keys [0, o + upper): a rectangle, a triangle beside it, and full rows below both."""
    stairs = 0
    if band.upper < band.num_keys:
        stairs = min(band.num_rows, band.num_keys - band.upper + 1)
        width = band.upper - 1
        yield from _full(replace(band, num_rows=stairs, num_keys=width))
        yield Piece(band.context, Kind.CAUSAL, band.q_begin, stairs, band.k_begin + width, stairs)
    yield from _full(_rows(band, stairs, band.num_rows))


def _cut_lower(band: Piece) -> Iterator[Piece]:
    """Row o sees keys [o + lower, n): the mirror image of `_cut_upper` in both rows and keys."""
    n, m = band.num_keys, band.num_rows
    mirrored = replace(band, q_begin=0, k_begin=0, lower=-INFINITE, upper=n - band.lower - m + 1)
    for piece in _cut_upper(mirrored):
        kind = Kind.REVERSED if piece.kind is Kind.CAUSAL else piece.kind
        q_begin = band.q_begin + m - piece.q_begin - piece.num_rows
        k_begin = band.k_begin + n - piece.k_begin - piece.num_keys
        yield replace(piece, kind=kind, q_begin=q_begin, k_begin=k_begin)


def _join(pieces: list[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    open_full: dict[tuple[bool, int, int], int] = {}
    for piece in pieces:
        key = (piece.context, piece.k_begin, piece.num_keys)
        index = open_full.get(key) if piece.kind is Kind.FULL else None
        if index is not None and joined[index].q_begin + joined[index].num_rows == piece.q_begin:
            joined[index] = replace(joined[index], num_rows=joined[index].num_rows + piece.num_rows)
            continue
        if piece.kind is Kind.FULL:
            open_full[key] = len(joined)
        joined.append(piece)
    return joined


def runs(pieces: list[Piece]) -> list[Run]:
    """Pieces of one shape at equal distances, put together, so that one kernel call does all of them."""
    shapes: dict[tuple[object, ...], list[Piece]] = defaultdict(list)
    for p in pieces:
        shapes[(p.context, p.kind, p.num_rows, p.num_keys, p.lower, p.upper)].append(p)
    found: list[Run] = []
    for same in shapes.values():
        begin = 0
        while begin < len(same):
            first, count, steps = same[begin], 1, (0, 0)
            while begin + count < len(same):
                a, b = same[begin + count - 1], same[begin + count]
                step = (b.q_begin - a.q_begin, b.k_begin - a.k_begin)
                # Rows, and keys, of one call must not overlap: its gradients are added in one go.
                if (count > 1 and step != steps) or step[0] < first.num_rows or step[1] < first.num_keys:
                    break
                steps, count = step, count + 1
            found.append(Run(first, count, *steps))
            begin += count
    return found
