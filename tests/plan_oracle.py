"""The plan in plain Python: what `csrc/flash_attn/src/common/plan.cu` must compute, number for number.

`segments` (see `flash_attn.shared_prompt.layout`) -> row_span, block_span, query_items, key_items, the tables
of `csrc/flash_attn/params.h`. Slow and explicit: spans are looked up row by row, where the kernel uses closed
forms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

Rows = tuple[int, int]
KeyTiles = tuple[Rows, list[list[int]]]
BLOCK_ROWS = 64
CHUNK_SEGMENTS = 64  # tiles end where a segment's index is a multiple: one thread walks one chunk
COST_QUANTUM = 128  # a tile of keys (rows) is paid whole
ITEM_COST = 128  # fixed cost of an item, in key columns: loading the stationary tile, epilogue
MAX_SPLITS = 4
FEW_ITEMS_PER_SM = (
    32  # entries of the key list for all kv heads; up to so many are sorted one by one (sm_90a)
)
SPLIT_ROWS = 16384  # a split made to shorten an item has at least as many rows


@dataclass
class TileSizes:
    fwd_block_m: int = 128  # rows of a QueryItem
    bwd_block_n: int = 128  # keys of a KeyItem


@dataclass
class Plan:
    row_span: torch.Tensor  # (total_q, 4) int32
    block_span: torch.Tensor  # (ceil(total_q / 64), 8)
    query_items: torch.Tensor  # (capacity, 12)
    key_items: torch.Tensor  # (capacity, 8)

    def tensors(self, device: str | torch.device = "cpu") -> list[torch.Tensor]:
        return [t.to(device) for t in (self.row_span, self.block_span, self.query_items, self.key_items)]


def query_capacity(total_q: int, num_segments: int, tile: TileSizes) -> int:
    return total_q // tile.fwd_block_m + num_segments + 1


def key_capacity(
    total_k: int,
    total_context: int,
    context_in_k: bool,
    num_segments: int,
    tile: TileSizes,
    num_splits: int = 1,
) -> int:
    """Every run of keys ends in one partial tile: at most S + 1 decoded runs, S contexts inside k."""
    n, s = tile.bwd_block_n, num_segments
    if context_in_k:
        return total_k // n + 2 * s + 1 + (num_splits - 1) * (total_k // n + s)
    return total_k // n + s + 1 + num_splits * -(-total_context // n)


def choose_splits(
    context_rows: int, total_q: int, num_heads_k: int, num_sms: int, tile: TileSizes, path: int
) -> int:
    """Row splits of context items that are too few to fill the GPU, or few and long. `path`: 80, 90."""
    if context_rows == 0:
        return 1
    items = -(-context_rows // tile.bwd_block_n) * num_heads_k
    enough = max(2, (num_sms + items // 2) // items) if path == 90 else MAX_SPLITS
    to_fill = min((2 * num_sms + items // 2) // items, enough)
    to_shorten = min(4 * num_sms // items, total_q // SPLIT_ROWS)
    return min(max(to_fill, to_shorten, 1), MAX_SPLITS)


class _Table:
    """The clamped segment table, and the keys that each row sees."""

    def __init__(
        self,
        segments: np.ndarray,
        total_q: int,
        total_k: int,
        total_context: int,
        causal: bool,
        window: tuple[int, int],
    ) -> None:
        seg = segments.astype(np.int64).reshape(-1, 6).copy()
        for begin, limit in ((0, total_q), (2, total_context), (4, total_k)):
            seg[:, begin] = seg[:, begin].clip(0, limit)
            seg[:, begin + 1] = np.maximum(seg[:, begin + 1].clip(0, limit), seg[:, begin])
        seg[seg[:, 2] == seg[:, 3], 2:4] = 0
        self.seg = seg
        self.num_segments = len(seg)
        self.total_q, self.total_k, self.total_context = total_q, total_k, total_context
        left = np.inf if window[0] < 0 else window[0]
        right = 0 if causal else (np.inf if window[1] < 0 else window[1])
        span = np.zeros((total_q, 4), np.int64)
        for qb, qe, cb, ce, kb, ke in seg:
            p, lk, lq = ce - cb, ke - kb, qe - qb
            pos = p + lk - lq + np.arange(lq)
            lo = np.maximum(pos - left, 0)
            hi = np.minimum(pos + right + 1, p + lk)  # exclusive
            context = np.stack([np.minimum(lo, p), np.clip(hi, 0, p)], 1)
            decoded = np.stack([np.clip(lo - p, 0, lk), np.clip(hi - p, 0, lk)], 1)
            for column, part, base in ((0, context, cb), (2, decoded, kb)):
                part = part.astype(np.int64) + base
                part[part[:, 0] >= part[:, 1]] = 0
                span[qb:qe, column : column + 2] = part
        self.span = span

    def context_head(self, s: int) -> bool:
        """Segment s is the first of a group with a context."""
        cb, ce = self.seg[s, 2:4]
        return ce > cb and (s == 0 or tuple(self.seg[s - 1, 2:4]) != (cb, ce))


def _hull(span: np.ndarray) -> tuple[int, int]:
    """Union of the non-empty intervals of `span` (n, 2), as one interval; (0, 0) when there is none."""
    span = span[span[:, 0] < span[:, 1]]
    return (int(span[:, 0].min()), int(span[:, 1].max())) if len(span) else (0, 0)


def _key_span(span: np.ndarray) -> list[int]:
    """KeySpan of the rows in `span` (n, 2): begin, full_begin, full_end, end."""
    begin, end = _hull(span)
    full_begin, full_end = int(span[:, 0].max()), int(span[:, 1].min())
    if (span[:, 0] >= span[:, 1]).any() or full_begin >= full_end:
        full_begin = full_end = begin
    return [begin, full_begin, full_end, end]


def _union(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    if a[0] >= a[1]:
        return b
    if b[0] >= b[1]:
        return a
    return min(a[0], b[0]), max(a[1], b[1])


def _cost(hulls: list[tuple[int, int]]) -> int:
    return ITEM_COST + sum(-(-(e - b) // COST_QUANTUM) * COST_QUANTUM for b, e in hulls)


def _runs(pieces: list[tuple[int, int]], joinable, hulls, block: int, spanning: str) -> list[tuple[int, int]]:
    """Joins pieces (one per segment, in order) to runs that are cut into tiles of `block`.

    At a border inside a tile: take the head of the next piece into the tile when that costs less than 3/4 of
    its share in a tile of its own. (3/4: equal work in fewer items is worse, they run in parallel.)
    `hulls(s, begin, end)`: what that part of piece s visits.
    """
    runs: list[tuple[int, int]] = []
    head = -1  # start of the current run
    previous = -1
    run_end = filled = 0  # rows in the last, unfinished tile of the run
    tile: list[tuple[int, int]] = []
    for s, (begin, end) in enumerate(pieces):
        length = end - begin
        if length <= 0:
            continue
        join = head >= 0 and s // CHUNK_SEGMENTS == previous // CHUNK_SEGMENTS and joinable(previous, s)
        if join and filled and spanning == "auto":
            taken, own = min(length, block - filled), min(length, block)
            union = [_union(a, b) for a, b in zip(tile, hulls(s, begin, begin + taken), strict=True)]
            whole = _cost(hulls(s, begin, begin + own))
            extra = _cost(union) - _cost(tile)
            if taken < length:  # the other tiles of the piece move off the diagonal of a causal mask
                shifted = _cost(hulls(s, begin + taken, min(begin + taken + block, end)))
                extra += -(-(length - taken) // block) * max(shifted - whole, 0)
            join = 4 * extra * own <= 3 * taken * whole
        elif join and filled:
            join = spanning == "always"
        if not join:
            if head >= 0:
                runs.append((head, run_end))
            head, filled = begin, 0
        room = block - filled
        if length < room:
            new = hulls(s, begin, end)
            tile = [_union(a, b) for a, b in zip(tile, new, strict=True)] if filled else new
            filled += length
        else:
            filled = (length - room) % block
            tile = hulls(s, end - filled, end) if filled else []
        run_end, previous = end, s
    if head >= 0:
        runs.append((head, run_end))
    return runs


def _tiles(runs: list[tuple[int, int]], block: int) -> list[tuple[int, int]]:
    return [(b, min(b + block, end)) for begin, end in runs for b in range(begin, end, block)]


def _query_tiles(t: _Table, block: int, spanning: str) -> list[tuple[int, int]]:
    def joinable(a: int, b: int) -> bool:
        same = (t.seg[a + 1 : b + 1, 2:4] == t.seg[a, 2:4]).all()  # empty segments in between count
        return bool(same) and t.seg[a, 1] == t.seg[b, 0]

    def hulls(s: int, begin: int, end: int) -> list[tuple[int, int]]:
        return [_hull(t.span[begin:end, 0:2]), _hull(t.span[begin:end, 2:4])]

    pieces = [(int(s[0]), int(s[1])) for s in t.seg]
    runs = _runs(pieces, joinable, hulls, block, spanning)
    tail = int(t.seg[-1, 1]) if t.num_segments else 0
    if tail < t.total_q:
        runs.append((tail, t.total_q))
    return _tiles(runs, block)


def _rows_seeing(t: _Table, rows: tuple[int, int], column: int, begin: int, end: int) -> tuple[int, int]:
    """Rows of the interval `rows` that see a key of [begin, end), as one interval."""
    span = t.span[rows[0] : rows[1], column : column + 2]
    seen = (span[:, 0] < end) & (span[:, 1] > begin) & (span[:, 0] < span[:, 1])
    index = np.flatnonzero(seen)
    return (rows[0] + int(index[0]), rows[0] + int(index[-1]) + 1) if len(index) else (0, 0)


def _decoded_pieces(t: _Table, context_in_k: bool) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Keys that segment s covers: its own and the gap behind them (unseen rows, whose gradients are zeros).
    Before the first piece lies the part that no segment can cover."""
    count = t.num_segments
    if count == 0:
        return (0, t.total_k), []
    head = [context_in_k and t.context_head(s) for s in range(count)]
    begin = [int(t.seg[s, 3]) if head[s] else (0 if s == 0 else int(t.seg[s, 4])) for s in range(count)]
    before = [int(t.seg[s, 2]) if head[s] else begin[s] for s in range(count)] + [t.total_k]
    pieces = [(begin[s], max(begin[s], before[s + 1])) for s in range(count)]
    return (0, before[0]), pieces


def _key_tiles(t: _Table, block: int, context_in_k: bool, spanning: str, few_items: bool) -> list[KeyTiles]:
    """Decoded tiles one by one, then context tiles in pairs of neighbours, one for each block of a cluster.

    (begin, end), [[region, key_begin, num_keys, row_begin, row_end], ...]: first the rows of the pair, of a
    decoded tile those of its run's first tile, or, of few items, its own.
    """
    lead, pieces = _decoded_pieces(t, context_in_k)

    def rows(s: int, begin: int, end: int) -> tuple[int, int]:
        return _rows_seeing(t, (int(t.seg[s, 0]), int(t.seg[s, 1])), 2, begin, end)

    def joinable(a: int, b: int) -> bool:
        return pieces[a][1] == pieces[b][0]

    runs = _runs(pieces, joinable, lambda s, b, e: [rows(s, b, e)], block, spanning)
    items: list[KeyTiles] = []
    for begin, end in _tiles([lead] if lead[0] < lead[1] else [], block):
        items.append(((0, 0), [[0, begin, end - begin, 0, 0]]))
    for run in runs:
        first: tuple[int, int] | None = None
        for begin, end in _tiles([run], block):
            hull = (0, 0)
            for s, (pb, pe) in enumerate(pieces):
                if pb < end and pe > begin:
                    hull = _union(hull, rows(s, max(pb, begin), min(pe, end)))
            first = hull if few_items else first or hull
            items.append((first, [[0, begin, end - begin, *hull]]))

    heads = [s for s in range(t.num_segments) if t.context_head(s)]
    groups: list[tuple[int, int, int, int]] = []  # key range, row range
    for s in heads:
        last = s
        while last + 1 < t.num_segments and (t.seg[last + 1, 2:4] == t.seg[s, 2:4]).all():
            last += 1
        groups.append((int(t.seg[s, 2]), int(t.seg[s, 3]), int(t.seg[s, 0]), int(t.seg[last, 1])))
    if not context_in_k:  # a tensor of its own is covered as a whole, seen or not
        groups = [(0, t.total_context, 0, t.total_q)]
    for kb, ke, rb, re in groups:
        for pair_begin, pair_end in _tiles([(kb, ke)] if kb < ke else [], 2 * block):
            pair = [
                [1, begin, end - begin, *_rows_seeing(t, (rb, re), 0, begin, end)]
                for begin, end in _tiles([(pair_begin, pair_end)], block)
            ]
            items.append((_rows_seeing(t, (rb, re), 0, pair_begin, pair_end), pair))
    return items


def _split_rows(begin: int, end: int, part: int, num_parts: int) -> tuple[int, int]:
    """Part of a row range, cut on the 64-row grid."""
    if begin >= end:
        return 0, 0
    first, count = begin // BLOCK_ROWS, -(-end // BLOCK_ROWS) - begin // BLOCK_ROWS
    lo = max(begin, (first + count * part // num_parts) * BLOCK_ROWS)
    hi = min(end, (first + count * (part + 1) // num_parts) * BLOCK_ROWS)
    return (lo, hi) if lo < hi else (0, 0)


def _sorted(items: list[list[int]], cost_column: int, capacity: int, width: int) -> torch.Tensor:
    assert len(items) <= capacity, (len(items), capacity)
    table = np.zeros((capacity, width), np.int64)
    for i, item in enumerate(sorted(items, key=lambda x: -x[cost_column])):  # stable
        table[i] = item
    return torch.from_numpy(table).to(torch.int32)


def build_plan(
    segments: torch.Tensor,
    total_q: int,
    total_k: int,
    total_context: int | None = None,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    tile: TileSizes | None = None,
    num_splits: int = 1,
    few_items: bool = False,
    spanning: str = "auto",
) -> Plan:
    """`total_context` None: context rows are rows of k (packed shared-prompt call, and plain calls)."""
    tile = tile or TileSizes()
    context_in_k = total_context is None
    context_limit = total_k if total_context is None else total_context
    t = _Table(segments.cpu().numpy(), total_q, total_k, context_limit, causal, window_size)

    blocks = [t.span[i : i + BLOCK_ROWS] for i in range(0, total_q, BLOCK_ROWS)]
    block_span = np.array([_key_span(b[:, 0:2]) + _key_span(b[:, 2:4]) for b in blocks], np.int64).reshape(
        -1, 8
    )

    queries: list[list[int]] = []
    for begin, end in _query_tiles(t, tile.fwd_block_m, spanning):
        context, decoded = _key_span(t.span[begin:end, 0:2]), _key_span(t.span[begin:end, 2:4])
        cost = context[3] - context[0] + decoded[3] - decoded[0]
        queries.append([begin, end - begin, cost, 0, *context, *decoded])

    keys: list[list[int]] = []
    for pair_rows, pair in _key_tiles(t, tile.bwd_block_n, context_in_k, spanning, few_items):
        for part in range(num_splits) if pair[0][0] == 1 and num_splits > 1 else [-1]:
            cut = pair_rows if part < 0 else _split_rows(*pair_rows, part, num_splits)
            for region, key_begin, num_keys, rb, re in pair:
                lo, hi = (rb, re) if part < 0 else (max(rb, cut[0]), min(re, cut[1]))
                rows = (lo, hi) if lo < hi else (0, 0)
                keys.append([region, key_begin, num_keys, *rows, cut[1] - cut[0], part, 0])

    if window_size[0] >= 0 and (causal or window_size[1] >= 0):
        longest = 2 * (window_size[0] + (0 if causal else window_size[1]) + 1 + 2 * tile.bwd_block_n)
        num_long = sum(item[5] > longest for item in keys)
        for item in keys:
            item[7] = num_long

    num_segments = t.num_segments
    return Plan(
        row_span=torch.from_numpy(t.span).to(torch.int32),
        block_span=torch.from_numpy(block_span).to(torch.int32),
        query_items=_sorted(queries, 2, query_capacity(total_q, num_segments, tile), 12),
        key_items=_sorted(
            keys, 5, key_capacity(total_k, context_limit, context_in_k, num_segments, tile, num_splits), 8
        ),
    )


def shared_prompt_segments(prompt_lens: list[int], response_lens: list[list[int]]) -> torch.Tensor:
    """Packed groups [prompt, responses...], each response on its whole prompt."""
    rows: list[list[int]] = []
    at = 0
    for p, responses in zip(prompt_lens, response_lens, strict=True):
        context = [at, at + p]
        rows.append([at, at + p, *context, at + p, at + p])
        at += p
        for r in responses:
            rows.append([at, at + r, *context, at, at + r])
            at += r
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 6)


def varlen_segments(q_lens: list[int], k_lens: list[int], context: int = 0) -> torch.Tensor:
    """Sequences on one context of `context` rows (a separate tensor), 0: plain attention."""
    rows: list[list[int]] = []
    q = k = 0
    for lq, lk in zip(q_lens, k_lens, strict=True):
        rows.append([q, q + lq, 0, context, k, k + lk])
        q, k = q + lq, k + lk
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 6)
