"""Shared-prompt attention on torch's own FlashAttention-2, for GPUs on which the compiled library does not
run.

    own keys:  one varlen call over all segments (a prompt's segment is causal on its context)
    context:   one varlen call over all groups, every response row of a group against the group's context
    merged:    out = sum_i out_i exp(lse_i - lse),  lse = log sum_i exp(lse_i)
    backward:  the same calls, each with the merged out and lse
A window that cuts contexts gathers each segment's visible context in front of its own keys: one call, more
memory. fp16 and bf16, head dims up to 256. Called by _ops.py. The table of segments must be known on the
host: layouts and dense calls bring it, others cost one device sync per segments tensor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flash_attn._backend import is_capturing, stream_of
from flash_attn._pieces import Table, check_table

aten = torch.ops.aten
MAX_HEAD_DIM = 256
_MERGE_ROWS = 8192  # rows merged at a time, in fp32

Interval = tuple[int, int]
Rows = slice | Tensor


@dataclass(frozen=True, slots=True)
class Kernels:
    """FlashAttention-2's varlen forward and backward with aten's signatures; tests pass exact ones for the
    CPU."""

    forward: Callable[..., tuple[Tensor, ...]] = aten._flash_attention_forward
    backward: Callable[..., tuple[Tensor, ...]] = aten._flash_attention_backward


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


def _check(q: Tensor, v: Tensor, softcap: float, needs_dlse: bool = False) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"the composed backend runs float16 and bfloat16, got {q.dtype}")
    limit = MAX_HEAD_DIM - 8 if needs_dlse else MAX_HEAD_DIM
    if q.shape[-1] > limit:
        why = " where lse (or a sink) takes a gradient" if needs_dlse else ""
        raise NotImplementedError(f"the composed backend runs head_dim <= {limit}{why}, got {q.shape[-1]}")
    if q.shape[-1] % 8 or v.shape[-1] != q.shape[-1]:
        raise ValueError(f"head dims must be equal multiples of 8 here, got {q.shape[-1]} and {v.shape[-1]}")
    if softcap != 0.0:
        raise NotImplementedError(f"the composed backend has no softcap: softcap must be 0.0, got {softcap}")


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


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
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
        cu_q=_cumulative(q_lens, device),
        cu_k=_cumulative(k_lens, device),
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


def _take(x: Tensor, rows: Rows, dim: int = 0) -> Tensor:
    if isinstance(rows, Tensor):
        return x.index_select(dim, rows)
    return x.narrow(dim, rows.start, rows.stop - rows.start)


def _parts(
    q: Tensor, k: Tensor, k_context: Tensor | None, batch: tuple[Any, ...]
) -> tuple[list[Part], float]:
    """The calls for the op's batch arguments, and the softmax scale."""
    segments, segments_host, _, _, _, scale, causal, left, right, _, _ = batch
    table = _table(segments, segments_host)
    context_rows = None if k_context is None else k_context.shape[0]
    check_table(table, q.shape[0], k.shape[0], context_rows)
    flat = tuple(value for row in table for value in row)
    return _composed_once(flat, context_rows, causal, (left, right), q.device), scale


def _keys(part: Part, k: Tensor, k_context: Tensor | None) -> Tensor:
    if k_context is None:
        return _take(k, part.k_rows)
    if part.window != (-1, -1):  # gathered from both
        return _take(torch.cat([k_context, k]), part.k_rows)
    return _take(k_context if part.context else k, part.k_rows)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_context: Tensor | None,
    v_context: Tensor | None,
    *batch: Any,
    kernels: Kernels = Kernels(),
) -> tuple[Tensor, Tensor]:
    """The op's forward; `batch`: its arguments from `segments` on."""
    _check(q, v, batch[9])
    parts, scale = _parts(q, k, k_context, batch)
    out: Tensor | None = None
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
    for part in parts:
        o, l, *_ = kernels.forward(
            _take(q, part.q_rows), _keys(part, k, k_context), _keys(part, v, v_context), part.cu_q, part.cu_k,
            part.max_q, part.max_k, 0.0, part.causal, False, scale=scale,
            window_size_left=part.window[0], window_size_right=part.window[1],
        )  # fmt: skip
        l = l.masked_fill(l == torch.inf, -torch.inf)  # FlashAttention-2's mark of rows without keys
        if out is None and o.shape[0] == q.shape[0]:
            out, lse = o, l
            continue
        if out is None:
            out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        _merge(out, lse, o, l, part.q_rows)
    if out is None:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    return out.contiguous(), lse.contiguous()


def _merge(out: Tensor, lse: Tensor, o: Tensor, l: Tensor, rows: Rows) -> None:
    """Adds a part of some rows' softmax to what out and lse hold of it, in fp32, a few rows at a time."""
    for begin in range(0, o.shape[0], _MERGE_ROWS):
        end = min(o.shape[0], begin + _MERGE_ROWS)
        if isinstance(rows, Tensor):
            where: Rows = rows[begin:end]
        else:
            where = slice(rows.start + begin, rows.start + end)
        before, after = lse[:, where], l[:, begin:end]
        # Both without keys: the weight is NaN, and the row stays as it is.
        weight = torch.sigmoid(after - before).nan_to_num(0.0).t()[..., None]
        out[where] = torch.lerp(out[where].float(), o[begin:end].float(), weight).to(out.dtype)
        lse[:, where] = torch.logaddexp(before, after)


def _with_dlse(q: Tensor, dout: Tensor, out: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """dout and out with 8 more columns that add -dlse to rowsum(dout * out), exact to fp32.

    The kernel knows no dlse. Columns with v = 0, dout = 1 and out = -dlse change nothing else; dlse needs
    three numbers of the input dtype.
    """
    rest, columns = -dlse.t().float(), []
    for _ in range(3):
        columns.append(rest.to(q.dtype))
        rest = rest - columns[-1].float()
    extra = torch.stack(columns, -1)
    ones = torch.nn.functional.pad(torch.ones_like(extra), (0, 5))
    return torch.cat([dout, ones], -1), torch.cat([out, torch.nn.functional.pad(extra, (0, 5))], -1)


@contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    """torch's FlashAttention-2 (and index_add_) are deterministic under this global setting only."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted and not before:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if wanted and not before:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)


@functools.cache
def _rng_state(
    device: torch.device, forward_kernel: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor]:
    """The backward's two dropout arguments, as a forward without dropout returns them."""
    x = torch.zeros(2, 1, 8, dtype=torch.float16, device=device)
    cu = _cumulative([2], device)
    _, _, rng_state, unused, *_ = forward_kernel(x, x, x, cu, cu, 2, 2, 0.0, False, False, scale=1.0)
    return rng_state, unused


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_context: Tensor | None,
    v_context: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *batch: Any,
    kernels: Kernels = Kernels(),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op's backward: every part with the merged out and lse, gradients summed in fp32."""
    _check(q, v, batch[9], dlse is not None)
    parts, scale = _parts(q, k, k_context, batch)
    head_dim = q.shape[-1]
    pad = 0 if dlse is None else 8
    if dlse is not None:
        dout, out = _with_dlse(q, dout, out, dlse)
    dout, out = dout.contiguous(), out.contiguous()
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # rows without keys: P = exp(S - inf) = 0
    offset = 0 if k_context is None else k_context.shape[0]
    sums = _Sums(q, k, v, offset)
    for part in parts:
        columns = [_take(q, part.q_rows), _keys(part, k, k_context), _keys(part, v, v_context)]
        if pad:
            columns = [torch.nn.functional.pad(x, (0, pad)) for x in columns]
        with _determinism(batch[10]):
            grads = kernels.backward(
                _take(dout, part.q_rows), *columns, _take(out, part.q_rows),
                _take(lse, part.q_rows, 1).contiguous(), part.cu_q, part.cu_k, part.max_q, part.max_k, 0.0,
                part.causal, *_rng_state(q.device, kernels.forward), scale=scale,
                window_size_left=part.window[0], window_size_right=part.window[1],
            )  # fmt: skip
            sums.add(part, *(x[..., :head_dim] for x in grads))
    return sums.result(k_context is not None)


class _Sums:
    """Gradients of the parts, summed in fp32; a single part's are taken as they are."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, num_context: int) -> None:
        self.dtype, self.num_context = q.dtype, num_context
        self.shapes = [q.shape, *((num_context + x.shape[0], *x.shape[1:]) for x in (k, v))]
        self.device = q.device
        self.totals: list[Tensor | None] = [None, None, None]

    def add(self, part: Part, *grads: Tensor) -> None:
        # Keys count from the context's first row where it has tensors of its own.
        k_rows = part.k_rows
        if self.num_context and not part.context and part.window == (-1, -1):
            k_rows = self._moved(k_rows)
        for i, (rows, grad) in enumerate(zip((part.q_rows, k_rows, k_rows), grads, strict=True)):
            total = self.totals[i]
            if total is None and grad.shape == self.shapes[i] and isinstance(rows, slice):
                self.totals[i] = grad
                continue
            if total is None:
                total = torch.zeros(self.shapes[i], dtype=torch.float32, device=self.device)
            total = self.totals[i] = total.float()
            if isinstance(rows, slice):
                total[rows] += grad
            else:
                total.index_add_(0, rows, grad.float())

    def _moved(self, rows: Rows) -> Rows:
        if isinstance(rows, slice):
            return slice(rows.start + self.num_context, rows.stop + self.num_context)
        return rows + self.num_context

    def result(self, has_context: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        dq, dk, dv = (
            torch.zeros(shape, dtype=self.dtype, device=self.device)
            if total is None
            else total.to(self.dtype).contiguous()
            for total, shape in zip(self.totals, self.shapes, strict=True)
        )
        n = self.num_context
        if not has_context:
            return dq, dk, dv, dk.new_empty(0, *dk.shape[1:]), dv.new_empty(0, *dv.shape[1:])
        return dq, dk[n:].clone(), dv[n:].clone(), dk[:n].clone(), dv[:n].clone()
