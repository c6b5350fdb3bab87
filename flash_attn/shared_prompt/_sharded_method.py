"""Which way a group should do its attention: each is timed on the pack's own lengths, and all ranks agree.

cost = max over ranks of the median time of one forward and backward of attention, exchanges included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flash_attn.shared_prompt._sharded_layout import Method, ShardedLayout, shard_layout
from flash_attn.shared_prompt._ulysses_attention import Heads
from flash_attn.shared_prompt.layout import SharedPromptLayout


class AttentionShape(NamedTuple):
    """A model's attention, as far as its cost goes."""

    num_heads: int
    num_heads_k: int
    head_dim: int
    dtype: torch.dtype
    window_size: tuple[int, int] = (-1, -1)


class Choice(NamedTuple):
    """The cheapest way, and what each cost: (method, num_chunks) -> seconds on the slowest rank."""

    method: Method
    num_chunks: int
    seconds: dict[tuple[Method, int], float]


Attend = Callable[..., Any]
_choices: dict[tuple[Any, ...], Choice] = {}


def candidates(layout: SharedPromptLayout, shape: AttentionShape, num_ranks: int) -> list[tuple[Method, int]]:
    """The ways that this group and these heads allow."""
    found: list[tuple[Method, int]] = []
    if shape.num_heads % num_ranks == 0:
        counts = {Heads.of(shape.num_heads, shape.num_heads_k, num_ranks, n).num_chunks for n in (1, 2, 4)}
        found += [("ulysses", count) for count in sorted(counts)]
    if layout.capacities is None:
        found.append(("context", 1))
    return found


def choose(
    attend: Attend,
    layout: SharedPromptLayout,
    group: dist.ProcessGroup,
    shape: AttentionShape,
    repeats: int = 3,
) -> Choice:
    """Times every candidate once per group, shape and size of pack (within a factor of two), collectively."""
    prompt_share = 8 * sum(layout.prompt_lens) // max(layout.total, 1)
    key = (group.group_name, group.size(), shape, str(layout.device), layout.total.bit_length(), prompt_share)
    if key not in _choices:
        ways = candidates(layout, shape, group.size())
        if not ways:
            raise ValueError(
                f"num_heads must be a multiple of the group's {group.size()} ranks where a layout has "
                f"capacities, got {shape.num_heads}"
            )
        seconds = torch.zeros(len(ways), dtype=torch.float64, device=layout.device)
        for i, (method, num_chunks) in enumerate(ways if len(ways) > 1 else ()):
            seconds[i] = _timed(attend, shard_layout(layout, group, method, num_chunks), shape, repeats)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        costs = dict(zip(ways, seconds.tolist(), strict=True))
        _choices[key] = Choice(*min(ways, key=lambda way: costs[way]), costs)
    return _choices[key]


def _timed(attend: Attend, layout: ShardedLayout, shape: AttentionShape, repeats: int) -> float:
    """Median seconds of forward and backward on random rows, after one call to warm up."""
    device, times = layout.device, []
    generator = torch.Generator(device).manual_seed(0)

    def rows(num_heads: int) -> torch.Tensor:
        size = (layout.num_rows, num_heads, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=shape.dtype).requires_grad_()

    q, k, v = rows(shape.num_heads), rows(shape.num_heads_k), rows(shape.num_heads_k)
    dout = rows(shape.num_heads).detach()
    for _ in range(repeats + 1):
        dist.barrier(group=layout.sp_group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        with torch.enable_grad():
            out = attend(q, k, v, layout, window_size=shape.window_size)
        torch.autograd.grad(out, (q, k, v), dout)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
