"""Decoding through the op that trains shared prompts: on CPUs, for many queries and where Triton is missing.

    rotate q and k -> append k, v to the cache in place -> attention of every query row on its cache rows
A cache is rows of the op's context tensor, so nothing is copied and pages may lie anywhere. Few queries: the
query heads of a kv head become rows of one tile, the keys are cut in parts that run side by side, and the
parts are merged by log-sum-exp (split-KV). Called by _kvcache.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flash_attn import _ops, _rotary
from flash_attn._backend import backend
from flash_attn._calls import unit_stride_rows
from flash_attn._checked import kernel_head_dim, op_head_dims
from flash_attn._kvcache_checks import MAX_SPLITS

MAX_PACKED_ROWS = 64  # query rows of a kv head that go into one tile; longer queries run as a prefill does
_MIN_SPLIT_KEYS = 256


@dataclass(frozen=True)
class Cache:
    """k, v (rows, Hk, D): sequence b's position i is row `base[b] + i`, or lies in its pages."""

    k: Tensor
    v: Tensor
    capacity: int  # positions of a sequence
    base: Tensor  # (B,) int64
    pages: Tensor | None  # (B, pages of a sequence) int64
    page_size: int

    def row(self, position: Tensor) -> Tensor:
        """Rows of positions (B, n), clamped to the cache."""
        position = position.clamp(0, max(self.capacity - 1, 0))
        if self.pages is None:
            return self.base[:, None] + position
        return self.pages.gather(1, position // self.page_size) * self.page_size + position % self.page_size


def _step(x: Tensor) -> int | None:
    """Rows from one block of x (blocks, rows of a block, Hk, D) to the next, 0 where expanded; None: no whole
    number of them, or the blocks' rows lie between each other."""
    blocks, length = x.shape[:2]
    if blocks > 1 and x.stride(0) == 0:
        return 0
    if blocks <= 1 or length == 0:
        return length
    row = x.stride(1)
    if row == 0 or x.stride(0) % row:  # no divmod: torch.compile does not know it of symbolic numbers
        return None
    step = x.stride(0) // row
    return None if step < length else step


def readable(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v at strides that `open_cache` takes: copies, to which nothing may be appended, where they lie
    otherwise."""
    if _step(k) is not None and _step(k) == _step(v):
        return k, v
    # A contiguous tensor may have any stride where it has one row: a clone has the usual ones.
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in (k, v))  # type: ignore[return-value]


def _as_rows(x: Tensor, name: str) -> tuple[Tensor, int]:
    """(blocks, rows of a block, Hk, D) as (rows, Hk, D), a view; and the rows from one block to the next."""
    blocks, length, heads, head_dim = x.shape
    step = _step(x)
    if blocks > 1 and x.stride(0) == 0:  # expanded: one for all
        return x[0], 0
    if blocks <= 1 or length == 0:
        return x.flatten(0, 1), length
    if step is None:
        raise ValueError(
            f"{name} must have a batch stride that is a multiple of its row stride, got {x.stride()}"
        )
    rows = (blocks - 1) * step + length
    return x.as_strided((rows, heads, head_dim), (x.stride(1), x.stride(2), x.stride(3))), step


def open_cache(
    k_cache: Tensor, v_cache: Tensor, batch: int, batch_idx: Tensor | None, block_table: Tensor | None
) -> Cache:
    k, step = _as_rows(k_cache, "k_cache")
    v, step_v = _as_rows(v_cache, "v_cache")
    if step != step_v:
        raise ValueError(f"v_cache must have k_cache's rows between sequences, {step}, got {step_v}")
    length = k_cache.shape[1]
    if block_table is None:
        index = torch.arange(batch, device=k.device) if batch_idx is None else batch_idx.long()
        base = index.clamp(0, max(k_cache.shape[0] - 1, 0)) * step
        return Cache(k, v, length, base, None, length)
    if step != length and k_cache.shape[0] > 1:
        raise ValueError(f"k_cache must be contiguous over its pages, got strides {k_cache.stride()}")
    pages = block_table.long().clamp(0, max(k_cache.shape[0] - 1, 0))
    base = torch.zeros(batch, dtype=torch.int64, device=k.device)
    return Cache(k, v, pages.shape[1] * length, base, pages, length)


def append(cache: Cache, k: Tensor, v: Tensor, seqlens: Tensor) -> None:
    """Writes k, v (B, n, Hk, D) behind each sequence's `seqlens` rows; nothing outside the cache."""
    if k.numel() == 0:
        return
    position = seqlens[:, None] + torch.arange(k.shape[1], device=k.device)
    there = ((position >= 0) & (position < cache.capacity)).flatten()
    rows = cache.row(position).flatten()
    # What must not be written writes what another row does: the first that is, or, of none, what is there.
    first = there.int().argmax(0, keepdim=True)
    rows = torch.where(there, rows, rows.index_select(0, first))
    any_there, row = there.index_select(0, first)[:, None, None], rows.index_select(0, first)
    for rows_of, new in ((cache.k, k.flatten(0, 1)), (cache.v, v.flatten(0, 1))):
        instead = torch.where(any_there, new.index_select(0, first), rows_of.index_select(0, row))
        rows_of[rows] = torch.where(there[:, None, None], new, instead)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, offsets: Tensor, per_row: bool) -> Tensor:
    """x (B, S, H, D) rotated at positions offsets + row, or all at `offsets` where not `per_row`."""
    if per_row:
        return _rotary.rotate(x, *_rotary.rows(x, cos, sin, offsets), interleaved)
    return _rotary.rotate(x, *_rotary.rows(x[:, :1], cos, sin, offsets), interleaved)


@dataclass(frozen=True)
class Visible:
    """Positions [begin, end) that each query row sees, (B, Sq) int64."""

    begin: Tensor
    end: Tensor


def visible(
    first: Tensor, length: Tensor, seqlen_q: int, causal: bool, window_size: tuple[int, int]
) -> Visible:
    """Row o of a sequence with keys [first, length) stands at length - Sq + o."""
    left, right = window_size[0], 0 if causal else window_size[1]
    position = length[:, None] - seqlen_q + torch.arange(seqlen_q, device=length.device)
    begin = first[:, None].expand_as(position)
    end = length[:, None].expand_as(position)
    if left >= 0:
        begin = torch.maximum(begin, position - left)
    if right >= 0:
        end = torch.minimum(end, position + right + 1)
    return Visible(begin, torch.maximum(begin, end))


def choose_splits(batch: int, num_heads_k: int, capacity: int, num_units: int) -> int:
    """Parts of every sequence's keys: as many as fill the GPU twice, none shorter than 256 keys."""
    wanted = -(-2 * num_units // max(batch * num_heads_k, 1))
    return max(1, min(wanted, capacity // _MIN_SPLIT_KEYS, MAX_SPLITS))


def _segments(cache: Cache, rows: Visible, num_parts: int, part: int, group: int) -> Tensor:
    """A segment for each (sequence, part of its keys, query row), `group` query heads each: (S, 6) int32."""
    begin = torch.arange(num_parts, device=rows.begin.device)[:, None] * part
    low = torch.maximum(rows.begin[:, None, :], begin)
    high = torch.minimum(rows.end[:, None, :], begin + part)
    length = (high - low).clamp(min=0)
    if cache.pages is None:
        start = cache.base[:, None, None] + low
    else:
        start = cache.pages[:, :, None] * cache.page_size + (low - begin)
    start = torch.where(length > 0, start, 0).flatten()
    q_begin = torch.arange(start.numel(), device=start.device) * group
    zero = torch.zeros_like(start)
    columns = (q_begin, q_begin + group, start, start + length.flatten(), zero, zero)
    return torch.stack(columns, 1).int()


# cache_seqlens -> key, segments and plan, the tensors of the key: for the layers of a step
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _remembered(seqlens: Any, others: tuple[Any, ...], numbers: tuple[Any, ...], make: Any) -> Any:
    """make(), or what it gave for the same tensors in the same state."""
    if torch.compiler.is_compiling():
        return make()
    tensors = [x for x in (seqlens, *others) if x is not None]
    plain = all(type(x) is Tensor and not x.is_inference() for x in tensors)
    capturing = seqlens.is_cuda and torch.cuda.is_current_stream_capturing()
    if not plain or not seqlens.is_cuda or capturing:
        return make()
    stream = torch.cuda.current_stream(seqlens.device).cuda_stream
    key = (*numbers, stream, *((id(x), x._version) if x is not None else None for x in (seqlens, *others)))
    found = _known.get(seqlens)
    if found is None or found[0] != key:
        found = _known[seqlens] = (key, make(), others)
    return found[1]


def _run(
    q: Tensor, cache: Cache, segments: Tensor, plan: list[Tensor], options: Any
) -> tuple[Tensor, Tensor]:
    """The op on rows q (rows, heads, D): out (rows, heads, Dv), lse (heads, rows)."""
    padded, padded_v = op_head_dims(q, cache.v)
    q, k = unit_stride_rows(q, padded), unit_stride_rows(cache.k, padded)
    v = unit_stride_rows(cache.v, padded_v)
    scale, causal, window, softcap, max_seqlen_q = options
    _ops.tell_watchers()
    out, lse = torch.ops.flash_attn.fwd(
        q, k, v, k, v, segments, None, plan, max_seqlen_q, 0, scale, causal, *window, softcap, False
    )
    return out[..., : cache.v.shape[-1]], lse


def _plan(q: Tensor, cache: Cache, segments: Tensor, causal: bool, window: tuple[int, int]) -> list[Tensor]:
    return _ops.plan_tables(
        segments, q.shape[0], cache.k.shape[0], cache.k.shape[0], 0, num_heads_k=cache.k.shape[1],
        head_dim=kernel_head_dim(q.shape[-1]), dtype=q.dtype, causal=causal, window_size=window,
        forward_only=True,
    )  # fmt: skip


def few_queries(
    q: Tensor,
    cache: Cache,
    seen: Visible,
    key: tuple[Any, ...],
    scale: float,
    softcap: float,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """Split-KV: q (B, Sq, H, D) -> out (B, Sq, H, Dv), lse (B, H, Sq)."""
    batch, seqlen_q, num_heads, head_dim = q.shape
    num_heads_k = cache.k.shape[1]
    group = num_heads // num_heads_k
    if cache.pages is not None:
        parts, part = cache.pages.shape[1], cache.page_size
    else:
        num_units = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        parts = num_splits or choose_splits(batch, num_heads_k, cache.capacity, num_units)
        part = -(-cache.capacity // parts)
    # (B, parts, Sq, heads of a group, Hk, D): the heads of a group are rows that see the same keys.
    packed = q.unflatten(2, (num_heads_k, group)).transpose(2, 3)[:, None]
    packed = packed.expand(batch, parts, seqlen_q, group, num_heads_k, head_dim)
    rows = packed.reshape(-1, num_heads_k, head_dim)

    def tables() -> tuple[Tensor, list[Tensor]]:
        segments = _segments(cache, seen, parts, part, group)
        return segments, _plan(rows, cache, segments, False, (-1, -1))

    seqlens, others = key[0], key[1]
    numbers = (parts, part, group, q.shape, q.dtype, cache.k.shape, backend(q.device), *key[2:])
    segments, plan = _remembered(seqlens, others, numbers, tables)
    out, lse = _run(rows, cache, segments, plan, (scale, False, (-1, -1), softcap, group))
    shape = (batch, parts, seqlen_q, group, num_heads_k)
    out, lse = out.unflatten(0, shape[:-1]), lse.t().unflatten(0, shape[:-1])
    merged = lse.logsumexp(1)
    if parts == 1:
        out = out[:, 0]
    else:
        weight = (lse - merged[:, None]).exp().masked_fill((merged == -torch.inf)[:, None], 0.0)
        out = (out * weight[..., None]).sum(1).to(q.dtype)
    out = out.transpose(2, 3).flatten(2, 3)
    return out, merged.permute(0, 3, 2, 1).flatten(1, 2)


def many_queries(
    q: Tensor, cache: Cache, first: Tensor, length: Tensor, scale: float, causal: bool,
    window_size: tuple[int, int], softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Prefill: one segment a sequence. Pages are gathered first."""
    batch, seqlen_q = q.shape[:2]
    if cache.pages is not None:
        pages = cache.pages.flatten()
        k = cache.k.unflatten(0, (-1, cache.page_size))[pages].flatten(0, 1)
        v = cache.v.unflatten(0, (-1, cache.page_size))[pages].flatten(0, 1)
        base = torch.arange(batch, device=q.device) * cache.capacity
        cache = Cache(k, v, cache.capacity, base, None, cache.capacity)
    q_begin = torch.arange(batch, device=q.device) * seqlen_q
    zero = torch.zeros_like(q_begin)
    columns = (q_begin, q_begin + seqlen_q, cache.base + first, cache.base + length, zero, zero)
    segments = torch.stack(columns, 1).int()
    rows = q.flatten(0, 1)
    plan = _plan(rows, cache, segments, causal, window_size)
    out, lse = _run(rows, cache, segments, plan, (scale, causal, window_size, softcap, seqlen_q))
    return out.unflatten(0, (batch, seqlen_q)), lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)


def with_alibi(
    q: Tensor, cache: Cache, first: Tensor, length: Tensor, slopes: Tensor, scale: float, causal: bool,
    window_size: tuple[int, int], softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Through the op with ALiBi, which knows no contexts: the caches are gathered first."""
    batch, seqlen_q = q.shape[:2]
    rows = cache.row(torch.arange(cache.capacity, device=q.device).expand(batch, -1)).flatten()
    padded, padded_v = op_head_dims(q, cache.v)
    k, v = unit_stride_rows(cache.k[rows], padded), unit_stride_rows(cache.v[rows], padded_v)
    sequence = torch.arange(batch, device=q.device)
    q_begin, k_begin, zero = sequence * seqlen_q, sequence * cache.capacity, torch.zeros_like(sequence)
    columns = (q_begin, q_begin + seqlen_q, zero, zero, k_begin + first, k_begin + length)
    _ops.tell_watchers()
    out, lse = torch.ops.flash_attn.fwd_extras(
        unit_stride_rows(q.flatten(0, 1), padded), k, v, torch.stack(columns, 1).int(), seqlen_q,
        cache.capacity, scale, causal, *window_size, softcap, False, slopes, 0.0, None,
    )  # fmt: skip
    out = out[..., : cache.v.shape[-1]].unflatten(0, (batch, seqlen_q))
    return out, lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)
