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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn._composed_calls import Part, Rows, cumulative, parts_of

aten = torch.ops.aten
MAX_HEAD_DIM = 256
_MERGE_ROWS = 8192  # rows merged at a time, in fp32


@dataclass(frozen=True, slots=True)
class Kernels:
    """FlashAttention-2's varlen forward and backward with aten's signatures; tests pass exact ones for the
    CPU."""

    forward: Callable[..., tuple[Tensor, ...]] = aten._flash_attention_forward
    backward: Callable[..., tuple[Tensor, ...]] = aten._flash_attention_backward


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


def _take(x: Tensor, rows: Rows, dim: int = 0) -> Tensor:
    if isinstance(rows, Tensor):
        return x.index_select(dim, rows)
    return x.narrow(dim, rows.start, rows.stop - rows.start)


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
    parts, scale = parts_of(q, k, k_context, batch)
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
    cu = cumulative([2], device)
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
    parts, scale = parts_of(q, k, k_context, batch)
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
