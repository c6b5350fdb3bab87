"""Decoding on GPUs by three launches of Triton kernels (_decode_kernel.py): append, read the cache, merge.

Bytes are what counts: few query rows read every key and value once. Splits of the keys fill the GPU; each
sequence is cut by its own length, which stays on the GPU, so a call never waits and a CUDA graph of it holds
for later lengths. Called by _kvcache.py where Triton is installed; without it the op decodes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_attn import _triton
from flash_attn._kvcache_checks import MAX_SPLITS
from flash_attn._triton import interpreted

MAX_HEAD_DIM = 256
MAX_ROWS = 64  # query rows of a sequence and kv head that are decoded here
_BLOCK_ROWS = 64  # of them in a tile
_MIN_SPLIT_KEYS = 240  # so that 8192 keys of 4 heads may go to all of 132 SMs
_WAVE_KEYS = 256
_MERGE_COLUMNS = 32  # of a row, by one program of the merge at least
_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    keys: int
    warps: int
    stages: int
    per_sm: int  # programs that an SM holds


# (more than 16 rows, head dim above 128) -> tile; for GPUs whose blocks may use 160 KB of shared memory, and
# for others (99 KB). About 128 KB of keys in flight keep an H200's memory busy.
_TILES = {
    (False, False): Tile(64, 4, 5, 1), (False, True): Tile(64, 4, 3, 1),
    (True, False): Tile(64, 4, 3, 2), (True, True): Tile(64, 8, 2, 1),
}  # fmt: skip
_SMALL_TILES = {
    (False, False): Tile(64, 4, 3, 1), (False, True): Tile(32, 4, 3, 1),
    (True, False): Tile(64, 4, 2, 1), (True, True): Tile(32, 8, 2, 1),
}  # fmt: skip
_WITH_160_KB = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0))
MOST_TILE_KEYS = 64  # pages must hold whole tiles


def tile_of(rows: int, head_dim: int, paged: bool, device: torch.device) -> Tile:
    """Loads that wait for the number of their page take twice the stages."""
    tile = _tiles(device)[rows > 16, head_dim > 128]
    if rows <= 16 and head_dim <= 64:  # half the bytes in flight
        tile = replace(tile, per_sm=2)
    return replace(tile, stages=2 * tile.stages - 1) if paged else tile


@functools.cache
def _tiles(device: torch.device) -> dict[tuple[bool, bool], Tile]:
    large = device.type != "cuda" or torch.cuda.get_device_capability(device) in _WITH_160_KB
    return _TILES if large else _SMALL_TILES


@functools.cache
def kernels() -> Any:
    """The kernels' module, or None without Triton; said once."""
    return _triton.load("_decode_kernel", " decodes through the op", not interpreted())


def usable(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> bool:
    """Whether the kernels take this call: 16-bit, head dims to 256, few query rows, pages of whole tiles."""
    if not (q.is_cuda or interpreted()) or torch.compiler.is_compiling():
        return False
    choice = os.environ.get("FLASH_ATTN_DECODE", "")
    if choice not in ("", "op"):
        raise ValueError(f"FLASH_ATTN_DECODE must be 'op' or not set, got {choice!r}")
    if choice:
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) and not interpreted():
        return False
    if any(x.stride(-1) != 1 for x in (q, k_cache, v_cache)) or q.numel() == 0 or k_cache.numel() == 0:
        return False
    head_dim, rows = max(q.shape[-1], v_cache.shape[-1]), q.shape[1] * q.shape[2] // k_cache.shape[2]
    if head_dim > MAX_HEAD_DIM or rows > MAX_ROWS:
        return False
    if block_table is not None and k_cache.shape[1] % MOST_TILE_KEYS:
        return False
    return kernels() is not None


def most_splits(keys: int) -> int:
    """How many parts of at least 240 keys there are; capacities beyond 30720 are alike to `choose_splits`."""
    return max(1, min(keys // _MIN_SPLIT_KEYS, MAX_SPLITS))


@functools.lru_cache(maxsize=1024)
def choose_splits(programs: int, most: int, slots: int) -> int:
    """Parts of every sequence's keys, up to `most`: those that take the least time.

    `programs` times the parts run in waves of `slots`. A wave lasts as long as one part is read, and as much
    as _WAVE_KEYS more keys would take: until the first keys arrive, and to write the results.
    """

    def keys(splits: int) -> float:
        return -(-programs * splits // slots) * (most * _MIN_SPLIT_KEYS / splits + _WAVE_KEYS)

    return min(range(1, most + 1), key=keys)


def _merge_blocks(columns: int, rows: int, num_sms: int) -> int:
    """Programs that merge one row's columns: two an SM in all, which run beside what they wait for."""
    return min(max(columns // _MERGE_COLUMNS, 1), _power(max(2 * num_sms // rows, 1) + 1) // 2)


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one in front of it ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _unit_stride(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _on(device: torch.device) -> Any:
    """Triton launches on the current GPU, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Keys:
    """Keys that queries attend: `seqlens[b] + length_or_added` rows of sequence b's part of the caches."""

    k_cache: Tensor  # (blocks, rows, Hk, D)
    v_cache: Tensor
    seqlens: Tensor | None  # (B,)
    length_or_added: int
    leftpad: Tensor | None = None
    batch_idx: Tensor | None = None
    block_table: Tensor | None = None
    window: tuple[int, int] = (-1, -1)  # (left, right) of rows aligned to the last key; causal: right = 0
    alibi_slopes: Tensor | None = None  # fp32 (H,) or (B, H)

    def vectors(self) -> tuple[Tensor | None, ...]:
        """seqlens, leftpad, batch_idx and block_table, as the kernels read them."""
        return tuple(_unit_stride(x) for x in (self.seqlens, self.leftpad, self.batch_idx, self.block_table))

    @property
    def slopes_stride(self) -> int:
        slopes = self.alibi_slopes
        return slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0

    @property
    def capacity(self) -> int:
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return self.k_cache.shape[1] * pages


@dataclass(frozen=True)
class Rotary:
    """Tables (positions, rotary_dim / 2). Queries stand at their sequence's `seqlens`, or at `begin`; row o
    is rotated o places further where `per_row`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    per_row: bool
    begin: int

    def __post_init__(self) -> None:
        if self.cos.stride(-1) != 1 or self.cos.stride() != self.sin.stride():
            object.__setattr__(self, "cos", self.cos.contiguous())
            object.__setattr__(self, "sin", self.sin.contiguous())

    def arguments(self) -> tuple[int, int]:
        return self.cos.stride(0), self.cos.shape[0]


def _rotary_options(rotary: Rotary | None) -> dict[str, Any]:
    if rotary is None:
        return dict(ROTARY_DIM=0, INTERLEAVED=False)
    return dict(ROTARY_DIM=2 * rotary.cos.shape[1], INTERLEAVED=rotary.interleaved)


# Kernel, device, kinds of its arguments and its constants -> what Triton compiled
_compiled: dict[tuple[Any, ...], tuple[Any, list[str]]] = {}
_MOST_COMPILED = 4096


@dataclass(frozen=True)
class Launched:
    launcher: Any  # takes all of a kernel's arguments
    arguments: tuple[Any, ...]


_listener = threading.local()


@contextlib.contextmanager
def listening() -> Iterator[list[Launched]]:
    """What this thread launches meanwhile."""
    launched: list[Launched] = []
    _listener.launched = launched
    try:
        yield launched
    finally:
        _listener.launched = None


def _kind(x: Any) -> Any:
    """What Triton compiles anew for: types, alignment, and integers that are 1, multiples of 16 or long."""
    if type(x) is int:
        return ((x >> 31) << 2) + ((x == 1) << 1) + (x & 15 == 0)
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & 15 == 0
    return type(x)


def _launch(
    name: str, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any],
    **options: Any,
) -> None:  # fmt: skip
    """Runs a kernel. Triton's own look-up of what it has compiled takes longer than a short kernel runs."""
    kernel, device = getattr(kernels(), name), arguments[0].device
    options |= dict(launch_pdl=True) if constants["OVERLAP"] else {}
    key = (name, device, *map(_kind, arguments), *constants.values(), *options.values())
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[grid](*arguments, **constants, **options)
        if compiled is None:  # interpreted
            return
        known = (compiled, kernel.arg_names[len(arguments) :])
        if len(_compiled) < _MOST_COMPILED:
            _compiled[key] = known
        everything = (*arguments, *[constants[x] for x in known[1]])
    else:
        everything = (*arguments, *[constants[x] for x in known[1]])
        known[0][grid](*everything)
    launched = getattr(_listener, "launched", None)
    if launched is not None:
        launched.append(Launched(known[0][grid], everything))


def append(keys: Keys, k: Tensor, v: Tensor, rotary: Rotary | None) -> None:
    """Writes k, v (B, new, Hk, D) behind each sequence's keys, which count them; k is rotated by `rotary`."""
    with _on(k.device):
        _append(keys, k, v, rotary)


def _append(keys: Keys, k: Tensor, v: Tensor, rotary: Rotary | None) -> None:
    batch, new, num_heads_k, head_dim = k.shape
    if k.numel() == 0:
        return
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    k_cache, v_cache = keys.k_cache, keys.v_cache
    seqlens, _, batch_idx, table = keys.vectors()
    cos, sin, numbers = None, None, (0, 0)
    if rotary is not None:
        cos, sin, numbers = rotary.cos, rotary.sin, rotary.arguments()
    arguments = (
        k, v, k_cache, v_cache, cos, sin, seqlens, batch_idx, table, *k.stride()[:3],
        *v.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3], keys.length_or_added - new,
        keys.capacity, k_cache.shape[1], k_cache.shape[0], 0 if table is None else table.stride(0), *numbers,
    )  # fmt: skip
    constants = dict(
        HEAD_DIM=head_dim, HEAD_DIM_V=v.shape[3], BLOCK_D=_power(head_dim), BLOCK_DV=_power(v.shape[3]),
        HAS_SEQLENS=keys.seqlens is not None, HAS_INDEX=keys.batch_idx is not None, PAGED=table is not None,
        OVERLAP=_overlaps(k.device), **_rotary_options(rotary),
    )  # fmt: skip
    _launch("append", (new, num_heads_k, batch), arguments, constants, num_warps=1)


@dataclass
class _Launch:
    """Tile, row blocks and splits of q (B, Sq, H, D) on `keys`."""

    q: Tensor
    keys: Keys
    num_splits: int
    tile: Tile | None = None

    def __post_init__(self) -> None:
        batch, seqlen_q, num_heads, head_dim = self.q.shape
        self.num_heads_k, self.head_dim_v = self.keys.v_cache.shape[2:]
        self.vectors = self.keys.vectors()  # copies, where they are made, stand in front of every launch
        self.group = num_heads // self.num_heads_k
        rows = seqlen_q * self.group
        self.block_m = min(max(_power(rows), 16), _BLOCK_ROWS)
        self.row_blocks = -(-rows // self.block_m)
        paged, head_dim = self.keys.block_table is not None, max(head_dim, self.head_dim_v)
        self.used = self.tile or tile_of(self.block_m, head_dim, paged, self.q.device)
        if self.num_splits == 0:
            programs = batch * self.num_heads_k * self.row_blocks
            slots = self.used.per_sm * _num_sms(self.q.device)
            self.num_splits = choose_splits(programs, most_splits(self.keys.capacity), slots)

    def run(
        self, out: Tensor, lse: Tensor, scale: float, softcap: float, queries_of_one: int, begin: int,
        total: int, parts: bool, rotary: Rotary | None, beside: bool = False,
    ) -> None:  # fmt: skip
        """Writes the splits' parts from `begin` of `total`, or out and lse themselves."""
        q, keys, tile = self.q, self.keys, self.used
        k_cache, v_cache = keys.k_cache, keys.v_cache
        seqlens, leftpad, batch_idx, table = self.vectors
        strides = (0, 0, 0) if parts else out.stride()[:3]
        cos, sin, numbers = None, None, (0, 0, 0, 0)
        if rotary is not None:
            cos, sin = rotary.cos, rotary.sin
            numbers = (*rotary.arguments(), rotary.begin, int(rotary.per_row))
        arguments = (
            q, k_cache, v_cache, out, lse, seqlens, leftpad, batch_idx, table, cos, sin,
            keys.alibi_slopes, *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3], *strides,
            scale * _LOG2E, softcap * _LOG2E, keys.length_or_added, keys.capacity, k_cache.shape[1],
            k_cache.shape[0], 0 if table is None else table.stride(0), *keys.window, q.shape[1],
            self.num_heads_k, self.row_blocks, self.num_splits, queries_of_one, begin, total, *numbers,
            keys.slopes_stride,
        )  # fmt: skip
        constants = dict(
            GROUP=self.group, HEAD_DIM=q.shape[3], HEAD_DIM_V=self.head_dim_v, BLOCK_M=self.block_m,
            BLOCK_N=tile.keys, BLOCK_D=max(_power(q.shape[3]), 16), BLOCK_DV=max(_power(self.head_dim_v), 16),
            HAS_SEQLENS=keys.seqlens is not None, HAS_LEFTPAD=keys.leftpad is not None,
            HAS_INDEX=keys.batch_idx is not None, PAGED=table is not None, SOFTCAP=softcap > 0,
            ONE_SPLIT=not parts, HAS_ALIBI=keys.alibi_slopes is not None, OVERLAP=_overlaps(q.device),
            BESIDE=beside, **_rotary_options(rotary),
        )  # fmt: skip
        grid = (self.num_splits * self.row_blocks, self.num_heads_k, q.shape[0])
        _launch("partial", grid, arguments, constants, num_warps=tile.warps, num_stages=tile.stages)


def decode(
    q: Tensor, keys: Keys, scale: float, softcap: float, num_splits: int = 0, prompt: Keys | None = None,
    rotary: Rotary | None = None, tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (B, Sq, H, D) on `keys` and, before them, on `prompt`, whose G prompts serve B / G sequences each.

    q is rotated by `rotary` (without `prompt`). Returns out (B, Sq, H, Dv) and lse (B, H, Sq) fp32.
    """
    with _on(q.device):
        return _decode(q, keys, scale, softcap, num_splits, prompt, rotary, tile)


def _decode(
    q: Tensor, keys: Keys, scale: float, softcap: float, num_splits: int, prompt: Keys | None,
    rotary: Rotary | None, tile: Tile | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, seqlen_q, num_heads, _ = q.shape
    launches = [_Launch(q, keys, num_splits, tile)]
    if prompt is not None:
        launches.append(_Launch(q.view(prompt.k_cache.shape[0], -1, *q.shape[2:]), prompt, num_splits, tile))
    own = launches[0]
    out = torch.empty(batch, seqlen_q, num_heads, own.head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_heads, seqlen_q, dtype=torch.float32, device=q.device)
    total = sum(launch.num_splits for launch in launches)
    if total == 1:
        own.run(out, lse, scale, softcap, seqlen_q, 0, 1, False, rotary)
        return out, lse
    shape = (batch, total, own.num_heads_k, seqlen_q * own.group)
    parts = torch.empty(*shape, own.head_dim_v, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    begin = 0
    for launch in launches:  # nothing may be launched between them: BESIDE waits only for the one in front
        launch.run(parts, part_lse, scale, softcap, seqlen_q, begin, total, True, rotary, begin > 0)
        begin += launch.num_splits
    columns, programs = max(_power(own.head_dim_v), 16), shape[3] * own.num_heads_k * batch
    blocks = _merge_blocks(columns, programs, _num_sms(q.device))
    arguments = (parts, part_lse, out, lse, *out.stride()[:3], seqlen_q, own.num_heads_k, total)
    constants = dict(
        GROUP=own.group, HEAD_DIM_V=own.head_dim_v, BLOCK_DV=columns // blocks,
        BLOCK_S=min(_power(total), 128), COLUMN_BLOCKS=blocks, OVERLAP=_overlaps(q.device),
    )  # fmt: skip
    _launch("merge", (shape[3] * blocks, own.num_heads_k, batch), arguments, constants, num_warps=4)
    return out, lse
