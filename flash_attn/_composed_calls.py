"""The varlen calls that attention over a table of segments is made of, and what they read, for composed.py:

    own keys:  one call over all segments (a prompt's segment is causal on its context)
    context:   one call over all groups, every response row of a group against the group's context
A window that cuts contexts gathers each segment's visible context in front of its own keys: one call.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flash_attn._backend import is_capturing, stream_of
from flash_attn._pieces import Table, check_table

Interval = tuple[int, int]
Rows = slice | Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One varlen call: sequence i has q rows and keys i of the cumulative lengths, after the selection of
    rows."""

    q_rows: Rows
    k_rows: Rows
    context: bool  # keys are rows of k_context; False: of k, or of k_context and k together where gathered
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    window: tuple[int, int]


_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _table(segments: Tensor, segments_host: Tensor | None) -> Table:
    """The table as Python ints; where only the GPU has it, one sync, remembered as long as the tensor is
    unchanged."""
    if segments_host is not None:
        return segments_host.tolist()
    if segments.is_inference():  # no version counter
        return segments.tolist()
    known = _tables.get(segments)
    if known is None or known[0] != segments._version:
        known = _tables[segments] = (segments._version, segments.tolist())
    return known[1]


def _select(intervals: list[Interval], device: torch.device) -> Rows:
    """One slice where the intervals follow one another, else the index of their rows."""
    filled = [interval for interval in intervals if interval[0] < interval[1]]
    if all(a[1] == b[0] for a, b in itertools.pairwise(filled)):
        return slice(filled[0][0], filled[-1][1]) if filled else slice(0, 0)
    index = torch.cat([torch.arange(begin, end) for begin, end in filled])
    return _to(index, device)


def _to(x: Tensor, device: torch.device) -> Tensor:
    """On the device without a sync."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return _to(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), device)


def _part(
    entries: list[tuple[Interval, list[Interval]]],
    context: bool,
    causal: bool,
    window: tuple[int, int],
    device: torch.device,
) -> Part:
    """The call for sequences given as (q interval, its key intervals in order)."""
    q_lens = [end - begin for (begin, end), _ in entries]
    k_lens = [sum(end - begin for begin, end in keys) for _, keys in entries]
    # A max_q of 1 would switch to a decoding variant, whose lse lies otherwise.
    max_q, max_k = max(2, *q_lens), max(1, *k_lens)
    if window != (-1, -1) and not causal:
        # The kernel takes a right side of max_k keys for an open one, and an open one for max_k keys: neither
        # is so where rows outnumber keys.
        max_k += max_q
    return Part(
        q_rows=_select([rows for rows, _ in entries], device),
        k_rows=_select([interval for _, keys in entries for interval in keys], device),
        context=context,
        cu_q=cumulative(q_lens, device),
        cu_k=cumulative(k_lens, device),
        max_q=max_q,
        max_k=max_k,
        causal=causal,
        window=window,
    )


def compose(
    flat: tuple[int, ...],
    context_rows: int | None,
    causal: bool,
    window: tuple[int, int],
    device: torch.device,
) -> list[Part]:
    """The calls for a table (flattened); `context_rows`: those of k_context, None where contexts are rows of
    k."""
    table = [list(flat[i : i + 6]) for i in range(0, len(flat), 6)]
    table = [row for row in table if row[1] > row[0]]
    left, right = window[0], 0 if causal else window[1]
    # The last row stands at the last key, the first as many places before it as there are rows.
    longest_k = max((row[3] - row[2] + row[5] - row[4] for row in table), default=0)
    longest_q = max((row[1] - row[0] for row in table), default=0)
    left = -1 if left >= longest_k else left
    right = -1 if right >= longest_q else right
    if left < 0 and (causal or right < 0):
        return _compose_merged(table, context_rows is None, causal, device)
    offset = context_rows or 0
    entries = []
    for q_begin, q_end, context_begin, context_end, k_begin, k_end in table:
        # Keys left of the first row's window are not needed: positions count from the right.
        first_row = (context_end - context_begin) + (k_end - k_begin) - (q_end - q_begin)
        first_key = 0 if left < 0 else max(0, first_row - left)
        begin = min(context_end, context_begin + first_key)
        entries.append(((q_begin, q_end), [(begin, context_end), (offset + k_begin, offset + k_end)]))
    entries = [entry for entry in entries if any(begin < end for begin, end in entry[1])]
    return [_part(entries, False, causal, (left, right), device)] if entries else []


def _compose_merged(table: Table, context_in_k: bool, causal: bool, device: torch.device) -> list[Part]:
    own: list[tuple[Interval, list[Interval]]] = []
    full: list[tuple[Interval, list[Interval]]] = []
    stairs: list[tuple[Interval, list[Interval]]] = []
    for q_begin, q_end, context_begin, context_end, k_begin, k_end in table:
        if context_in_k and k_begin == k_end:  # a prompt's own segment: its context are its keys
            own.append(((q_begin, q_end), [(context_begin, context_end)]))
            continue
        own.append(((q_begin, q_end), [(k_begin, k_end)]))
        if context_begin == context_end:
            continue
        context, begin = (context_begin, context_end), q_begin
        if causal and q_end - q_begin > k_end - k_begin + 1:
            # More rows than keys: the first ones stand inside the context and are causal there.
            begin = q_end - (k_end - k_begin)
            stairs.append(((q_begin, begin), [context]))
        if full and full[-1][1] == [context] and full[-1][0][1] == begin:
            full[-1] = ((full[-1][0][0], q_end), [context])
        elif begin < q_end:
            full.append(((begin, q_end), [context]))
    parts = []
    if any(begin < end for _, keys in own for begin, end in keys):
        parts.append(_part(own, False, causal, (-1, -1), device))
    for entries, is_causal in ((full, False), (stairs, True)):
        if entries:
            parts.append(_part(entries, not context_in_k, is_causal, (-1, -1), device))
    return parts


# compose's arguments -> the stream that wrote the tables of its calls, and they
_composed: dict[tuple[Any, ...], tuple[int, list[Part]]] = {}
_MOST_COMPOSED = 64
_in_graphs: dict[tuple[Any, ...], list[Part]] = {}  # kept: nobody says when a graph ends


def _composed_once(*key: Any) -> list[Part]:
    """`compose`, once for a table on a stream: another might read what this one has not written yet.

    A graph that is captured takes what its warm-up has made, and keeps it: its own copies from the host would
    read, at a replay, memory that has been given back.
    """
    known, device = _composed.get(key), key[-1]
    if is_capturing(device):
        if known is not None:
            _in_graphs.setdefault(key, known[1])
        if key not in _in_graphs:
            raise RuntimeError("composed backend: run a batch once before a CUDA graph of it is captured")
        return _in_graphs[key]
    stream = stream_of(device)
    if known is None or known[0] != stream:
        if len(_composed) >= _MOST_COMPOSED:
            _composed.clear()
        known = _composed[key] = stream, compose(*key)
    return known[1]


def parts_of(
    q: Tensor, k: Tensor, k_context: Tensor | None, batch: tuple[Any, ...]
) -> tuple[list[Part], float]:
    """The calls for the op's arguments from `segments` on, and the softmax scale."""
    segments, segments_host, _, _, _, scale, causal, left, right, _, _ = batch
    table = _table(segments, segments_host)
    context_rows = None if k_context is None else k_context.shape[0]
    check_table(table, q.shape[0], k.shape[0], context_rows)
    flat = tuple(value for row in table for value in row)
    return _composed_once(flat, context_rows, causal, (left, right), q.device), scale
