"""Checks of flash_attn_with_kvcache's arguments: "{name} must {rule}, got {value}". Called by _kvcache.py."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from flash_attn import checks


def length(before: int, added: int, capacity: int) -> None:
    """A length for all sequences, which costs no wait to read."""
    if not 0 <= before <= capacity - added:
        raise ValueError(
            f"cache_seqlens plus the new keys must be within the cache's {capacity} rows, "
            f"got {before} + {added}"
        )


def seqlens(x: Any, capacity: int) -> int | Tensor:
    """cache_seqlens: a tensor as it is, a number of any integer kind as an int; None: the whole cache."""
    if x is None:
        return capacity
    return x if isinstance(x, Tensor | int | torch.SymInt) else operator.index(x)  # type: ignore[return-value]


MAX_SPLITS = 128  # parts of a sequence's keys, asked for or chosen


def num_splits(x: Any) -> int:
    """Parts of the keys; 0: as many as fill the GPU."""
    number = checks.length("num_splits", x)
    if number > MAX_SPLITS:
        raise ValueError(f"num_splits must be at most {MAX_SPLITS} (0: chosen), got {number}")
    return number


def lengths(before: Tensor, length: Tensor, capacity: int, first: Tensor) -> None:
    """Where values may be read: within the cache."""
    if not checks.values_are_read(length):
        return
    if length.numel() and (int(before.min()) < 0 or int(length.max()) > capacity):
        raise ValueError(
            f"cache_seqlens plus the new keys must be within the cache's {capacity} rows, "
            f"got {length.tolist()}"
        )
    if bool(((first < 0) | (first > length)).any()):
        raise ValueError(f"cache_leftpad must be within the sequences, got {first.tolist()}")


def places(
    batch_idx: Tensor | None, block_table: Tensor | None, num_blocks: int, page_size: int, length: Tensor
) -> None:
    """Where values may be read: sequences and pages that exist. Behind a sequence's keys pages may be any."""
    if not checks.values_are_read(length):
        return
    if batch_idx is not None and bool(((batch_idx < 0) | (batch_idx >= num_blocks)).any()):
        raise ValueError(
            f"cache_batch_idx must be within the cache's {num_blocks} sequences, got {batch_idx.tolist()}"
        )
    if block_table is None:
        return
    used = torch.arange(block_table.shape[1], device=length.device) * page_size < length[:, None]
    if bool((used & ((block_table < 0) | (block_table >= num_blocks))).any()):
        raise ValueError(
            f"block_table must be within the cache's {num_blocks} pages where keys are, "
            f"got {block_table.tolist()}"
        )


def rows_of_their_own(
    batch_idx: Tensor | None, block_table: Tensor | None, page_size: int, before: Tensor, added: int
) -> None:
    """Where values may be read: no two sequences append to one row. `places` has been checked."""
    if added == 0 or (batch_idx is None and block_table is None) or not checks.values_are_read(before):
        return
    if batch_idx is not None and batch_idx.unique().numel() < batch_idx.numel():
        raise ValueError(
            f"cache_batch_idx must name each sequence once where keys are appended, got {batch_idx.tolist()}"
        )
    if block_table is not None:
        position = before[:, None] + torch.arange(added, device=before.device)
        rows = block_table.gather(1, position // page_size) * page_size + position % page_size
        if rows.unique().numel() < rows.numel():
            raise ValueError(
                "block_table must give each sequence rows of its own where keys are appended, "
                f"got {block_table.tolist()} from {before.tolist()}"
            )


def shapes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    block_table: Tensor | None,
) -> None:
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    paged = block_table is not None
    form = (
        "(num_blocks, page_size, num_heads_k, head_dim)"
        if paged
        else "(batch, seqlen, num_heads_k, head_dim)"
    )
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be {form}, got {list(x.shape)}")
    if k_cache.shape[0] == 0 and q.dim() == 4 and q.shape[0] > 0:
        raise ValueError(f"k_cache must have a {'page' if paged else 'sequence'}, got {list(k_cache.shape)}")
    one = min(q.shape[0], 1) if q.dim() == 4 else 1  # sequences of the cache need not be those of q
    first = (q[:one] if q.dim() == 4 else q, k_cache[:one], v_cache[:one])
    checks.qkv(*first, 4, ("q", "k_cache", "v_cache"))
    if k_cache.shape[:2] != v_cache.shape[:2]:
        raise ValueError(
            f"v_cache must have k_cache's {list(k_cache.shape[:2])} rows, got {list(v_cache.shape[:2])}"
        )
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together")
    for name, new, like in (("k", k, k_cache), ("v", v, v_cache)):
        if new is None:
            continue
        if not isinstance(new, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(new).__name__}")
        if new.dim() != 4 or new.shape[0] != q.shape[0] or new.shape[2:] != like.shape[2:]:
            raise ValueError(
                f"{name} must be (batch, seqlen_new, num_heads_k, head_dim) = [{q.shape[0]}, *, "
                f"{', '.join(map(str, like.shape[2:]))}], got {list(new.shape)}"
            )
    if k is None or v is None:
        return
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        shared = any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True))
        if k.shape[1] and shared:
            raise ValueError(
                f"{name} must have memory for each sequence, row and head to append to, "
                f"got strides {x.stride()}"
            )
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"v must have k's {k.shape[1]} rows, got {v.shape[1]}")
    for name, new in (("k", k), ("v", v)):
        if new.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {new.dtype}")
        if new.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {new.device}")


def is_number(x: Any) -> bool:
    """Whether x is one integer, Python's or NumPy's, and no tensor (reading one may wait for the GPU)."""
    if isinstance(x, int | torch.SymInt):
        return True
    if isinstance(x, Tensor) or getattr(x, "ndim", 0) != 0:
        return False
    try:
        operator.index(x)
    except TypeError:  # NumPy's arrays have the method and decide by their dtype
        return False
    return True


def index(name: str, x: Any, form: str, count: int, device: torch.device) -> None:
    """A whole number for each of `count` things, as `form` calls them."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be an int32 tensor, got {kind}")
    if x.shape != (count,) or x.device != device:
        raise ValueError(
            f"{name} must be ({form},) = [{count}] on {device}, got {list(x.shape)} on {x.device}"
        )


def indices(
    q: Tensor, num_blocks: int, cache_seqlens: Any, batch_idx: Any, leftpad: Any, block_table: Any
) -> None:
    batch = q.shape[0]
    for name, x in (
        ("cache_seqlens", cache_seqlens),
        ("cache_batch_idx", batch_idx),
        ("cache_leftpad", leftpad),
    ):
        if x is None:
            continue
        if name == "cache_seqlens" and is_number(x):
            checks.integer(name, x)
            continue
        index(name, x, "batch", batch, q.device)
    if block_table is None:
        if batch_idx is None and num_blocks != batch:
            raise ValueError(
                f"k_cache must have q's batch size {batch} without cache_batch_idx, got {num_blocks}"
            )
        return
    if batch_idx is not None or leftpad is not None:
        raise NotImplementedError("block_table cannot be combined with cache_batch_idx or cache_leftpad")
    if not isinstance(block_table, Tensor) or block_table.dtype != torch.int32:
        kind = block_table.dtype if isinstance(block_table, Tensor) else type(block_table).__name__
        raise TypeError(f"block_table must be an int32 tensor, got {kind}")
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(f"block_table must be (batch, pages) = [{batch}, *], got {list(block_table.shape)}")
    if block_table.device != q.device:
        raise ValueError(f"block_table must be on q's device {q.device}, got {block_table.device}")


def rotary(cos: Any, sin: Any, k: Tensor | None, q: Tensor, capacity: int) -> None:
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together")
    if cos is None:
        return
    if k is None:
        raise ValueError("rotary_cos must come with k and v: what is in the cache has been rotated")
    tables(cos, sin, q, capacity)


def tables(cos: Any, sin: Any, q: Tensor, capacity: int) -> None:
    """Angles for every position of the cache: rows behind the tables would not be rotated."""
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        if x.dim() != 2 or x.shape != cos.shape or x.shape[0] < capacity or 2 * x.shape[1] > q.shape[-1]:
            raise ValueError(
                f"{name} must be (positions, rotary_dim / 2) with the cache's {capacity} positions or more "
                f"and a rotary_dim of at most {q.shape[-1]}, got {list(x.shape)}"
            )
