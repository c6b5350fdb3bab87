"""flash_attn_with_kvcache: its arguments checked, then the kernels of decoding (_decode.py), or where they do
not take the call (CPUs, many queries, no Triton) the op that trains (_kvcache_op.py).

Both append k, v to the cache in place, rotated by their positions, and return out and log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn import _decode, _decode_again, _kvcache_checks, _kvcache_op, checks
from flash_attn._checked import scale_of


@dataclass(frozen=True)
class Call:
    """Checked arguments. Caches are (sequences, capacity, Hk, D), or with `block_table` pages (num_blocks,
    page_size, Hk, D); lengths and indices are int32 or int64.
    """

    q: Tensor  # (B, Sq, H, D)
    k_cache: Tensor
    v_cache: Tensor  # as k_cache, with Dv
    k: Tensor | None  # (B, added, Hk, D)
    v: Tensor | None  # (B, added, Hk, Dv)
    cos: Tensor | None  # (positions, rotary_dim / 2)
    sin: Tensor | None
    interleaved: bool
    seqlens: int | Tensor  # before k is appended, of all or (B,)
    batch_idx: Tensor | None  # (B,)
    leftpad: Tensor | None  # (B,)
    block_table: Tensor | None  # (B, pages) int32
    scale: float
    causal: bool
    window: tuple[int, int]  # (left, right) as the caller gave it, without causal; negative: unlimited
    softcap: float
    slopes: Tensor | None  # fp32 (H,) or (B, H)
    num_splits: int  # 0: chosen

    @property
    def capacity(self) -> int:
        return _capacity(self.k_cache, self.block_table)

    @property
    def added(self) -> int:
        return 0 if self.k is None else self.k.shape[1]

    @property
    def per_row(self) -> bool:
        """Whether query row o is rotated o places further than the first."""
        return self.causal or self.window[0] >= 0 or self.window[1] >= 0

    def lengths(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys before the call, rows of left padding, keys after it: (B,) int64 each."""
        before = seqlens_of(self.seqlens, self.q.shape[0], self.capacity, self.q.device)
        first = torch.zeros_like(before) if self.leftpad is None else self.leftpad.long()
        return before, first, before + self.added


def _capacity(k_cache: Tensor, block_table: Tensor | None) -> int:
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def _lse_shift(call: Call, slopes: Tensor, first: Tensor, length: Tensor) -> Tensor | float:
    """What flash-attn's lse (B, H, Sq) has more than log sum exp S (`_calls.public_lse_shift`)."""
    (left, right), seqlen_q = _reach(call), call.q.shape[1]
    if (0 if call.causal else right) != 0 or 0 <= left < call.capacity:
        return 0.0
    row = torch.arange(seqlen_q, device=slopes.device)
    position = (length - first)[:, None] - seqlen_q + row
    return slopes.view(-1, slopes.shape[-1], 1) * position[:, None, :]


def seqlens_of(x: int | Tensor | None, batch: int, capacity: int, device: torch.device) -> Tensor:
    """(B,) int64 on `device`; None: the whole cache."""
    if isinstance(x, Tensor):
        return x.long()
    return torch.full((batch,), capacity if x is None else int(x), dtype=torch.int64, device=device)


def with_kvcache(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The work of `flash_attn_with_kvcache`: out (B, Sq, H, Dv) and lse (B, H, Sq). `arguments`: all of
    `_checked`, in order."""
    tensors, (scale, causal, window_size, softcap, interleaved, slopes, num_splits) = (
        arguments[:_NUM_TENSORS], arguments[_NUM_TENSORS:]
    )  # fmt: skip
    numbers = (scale, causal, softcap, interleaved, num_splits)
    known = None if slopes is not None else _decode_again.key(tensors, window_size, numbers)
    if known is None:
        return _checked(*arguments)
    results = _decode_again.run(known, tensors)
    if results is None:
        with _decode.listening() as launched:
            results = _checked(*arguments)
        _decode_again.keep(known, tensors, launched, results)
    return results


_NUM_TENSORS = 11  # of the arguments: q to block_table


@torch.no_grad()
def _checked(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None,
    rotary_cos: Tensor | None, rotary_sin: Tensor | None, cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None, block_table: Tensor | None,
    softmax_scale: float | None, causal: bool, window_size: tuple[int, int], softcap: float,
    rotary_interleaved: bool, alibi_slopes: Tensor | None, num_splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`with_kvcache` of arguments of a new kind."""
    _kvcache_checks.shapes(q, k_cache, v_cache, k, v, block_table)
    _kvcache_checks.indices(q, k_cache.shape[0], cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    checks.options(0.0, softcap, window_size, q.dtype)
    capacity = _capacity(k_cache, block_table)
    _kvcache_checks.rotary(rotary_cos, rotary_sin, k, q, capacity)
    call = Call(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, cos=rotary_cos, sin=rotary_sin,
        interleaved=rotary_interleaved, seqlens=_kvcache_checks.seqlens(cache_seqlens, capacity),
        batch_idx=cache_batch_idx, leftpad=cache_leftpad, block_table=block_table,
        scale=scale_of(softmax_scale, q), causal=checks.flag("causal", causal),
        window=(int(window_size[0]), int(window_size[1])), softcap=float(softcap),
        slopes=checks.alibi_slopes(alibi_slopes, q, q.shape[0]),
        num_splits=_kvcache_checks.num_splits(num_splits),
    )  # fmt: skip
    on_kernels = _decode.usable(q, k_cache, v_cache, block_table)
    if not on_kernels or checks.values_are_read(q):
        before, first, length = call.lengths()
        _kvcache_checks.lengths(before, length, capacity, first)
        _kvcache_checks.places(cache_batch_idx, block_table, k_cache.shape[0], k_cache.shape[1], length)
        _kvcache_checks.rows_of_their_own(cache_batch_idx, block_table, k_cache.shape[1], before, call.added)
    elif not isinstance(call.seqlens, Tensor):
        _kvcache_checks.length(call.seqlens, call.added, capacity)
    return _on_kernels(call) if on_kernels else _through_the_op(call)


def _reach(call: Call) -> tuple[int, int]:
    """The window as the kernels' int32 holds it: sides that reach past every key are unlimited."""
    most = call.capacity + call.q.shape[1]
    left, right = (-1 if side >= most else side for side in call.window)
    return left, right


def _on_kernels(call: Call) -> tuple[Tensor, Tensor]:
    window, rotary = _reach(call), None
    seqlens, number = (call.seqlens, 0) if isinstance(call.seqlens, Tensor) else (None, call.seqlens)
    if call.cos is not None and call.sin is not None:
        rotary = _decode.Rotary(call.cos, call.sin, call.interleaved, call.per_row, number)
    keys = _decode.Keys(
        call.k_cache, call.v_cache, seqlens, number + call.added, call.leftpad, call.batch_idx,
        call.block_table, (window[0], 0 if call.causal else window[1]), call.slopes,
    )  # fmt: skip
    if call.k is not None and call.v is not None:
        _decode.append(keys, call.k, call.v, rotary)
    out, lse = _decode.decode(call.q, keys, call.scale, call.softcap, call.num_splits, rotary=rotary)
    if call.slopes is not None:
        _, first, length = call.lengths()
        lse = lse + _lse_shift(call, call.slopes, first, length)
    return out, lse


def _through_the_op(call: Call) -> tuple[Tensor, Tensor]:
    q, k, window = call.q, call.k, _reach(call)
    before, first, length = call.lengths()
    cache = _kvcache_op.open_cache(call.k_cache, call.v_cache, q.shape[0], call.batch_idx, call.block_table)
    if call.cos is not None and call.sin is not None and k is not None:
        tables = call.cos, call.sin, call.interleaved, before
        q, k = _kvcache_op.rotate(q, *tables, call.per_row), _kvcache_op.rotate(k, *tables, True)
    if k is not None and call.v is not None:
        _kvcache_op.append(cache, k, call.v, before)
    length = length.clamp(0, cache.capacity)
    first = torch.minimum(first.clamp(min=0), length)

    options = call.scale, call.causal, window, call.softcap
    if call.slopes is not None:
        out, lse = _kvcache_op.with_alibi(q, cache, first, length, call.slopes, *options)
        return out, lse + _lse_shift(call, call.slopes, first, length)
    if q.shape[1] * (q.shape[2] // cache.k.shape[1]) > _kvcache_op.MAX_PACKED_ROWS:
        return _kvcache_op.many_queries(q, cache, first, length, *options)
    seen = _kvcache_op.visible(first, length, q.shape[1], call.causal, window)
    source = call.seqlens if isinstance(call.seqlens, Tensor) else before
    others, memory = (call.batch_idx, call.leftpad, call.block_table), call.k_cache.stride(0)
    key = (source, others, call.added, call.causal, window, cache.capacity, (call.k_cache.shape[0], memory))
    return _kvcache_op.few_queries(q, cache, seen, key, call.scale, call.softcap, call.num_splits)
