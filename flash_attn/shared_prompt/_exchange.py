"""Rows that travel between the ranks of a group, forward and with their gradients backward.

    take_rows: y = x[rows that this rank needs, wherever they lie];   dx = sum over ranks of dy at those rows
    gather_chunks: y = [chunk of rank 0, of rank 1, ...];             dx = this rank's chunk of dy
Collectives take an explicit process group and run on every rank in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from flash_attn.shared_prompt._fail_together import wait_together
from flash_attn.shared_prompt.layout import move


def all_to_all(
    send: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, Any]:
    """Starts an exchange of rows: send (sum(send_counts), ...), by destination. The result, by source, may be
    read after `wait()` of the second value, and `send` written again."""
    received = send.new_empty(sum(receive_counts), *send.shape[1:])
    work = dist.all_to_all_single(
        received, send, list(receive_counts), list(send_counts), group=group, async_op=True
    )
    return received, Pending(work, send)


_WORDS = (torch.complex128, torch.int64, torch.int32)  # of 16, 8 and 4 bytes: bits, not values


def copy_words(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)` of tensors of one dtype and shape in the widest words that their strides allow.

    Copies between strided tensors go element by element on GPUs: for bf16 that is several times slower than
    memory.
    """
    for word in _WORDS:
        ratio = word.itemsize // target.element_size()
        if ratio > 1 and _divides(target, ratio) and _divides(source, ratio):
            target.view(word).copy_(source.view(word))
            return
    target.copy_(source)


def _divides(x: torch.Tensor, ratio: int) -> bool:
    """Whether `x` can be viewed in words of `ratio` elements."""
    strides, offset = x.stride(), x.storage_offset()
    if not strides or strides[-1] != 1:
        return False
    return all(n % ratio == 0 for n in (x.shape[-1], offset, *strides[:-1]))


class Pending:
    """A collective that was started, and the tensor it reads."""

    def __init__(self, work: Any, keep: Any) -> None:
        self.work, self.keep = work, keep

    def wait(self) -> None:
        """Returns when the result may be used: on the CPU when it is there, on GPUs in stream order."""
        wait_together(self.work, self.keep.device)
        self.keep = None


class RowExchange:
    """Who sends which row to whom, so that rank w gets the rows `needs[w]`; each travels once to a rank.

    `needs`: of every rank, places of rows: rank * num_local_rows + local row; places may repeat.
    `take` (len(needs[rank]),): where each needed row stands among those received.
    """

    __slots__ = ("copies", "num_local_rows", "receive_counts", "send_counts", "send_index", "take")

    def __init__(self, needs: Sequence[torch.Tensor], num_local_rows: int, rank: int) -> None:
        ends = torch.arange(len(needs) + 1) * num_local_rows
        self.num_local_rows = num_local_rows
        self.send_counts: list[int] = []
        sent = []
        for destination, places in enumerate(needs):
            unique, inverse = torch.unique(places, sorted=True, return_inverse=True)
            bounds = torch.searchsorted(unique, ends).tolist()
            sent.append(unique[bounds[rank] : bounds[rank + 1]] - rank * num_local_rows)
            self.send_counts.append(sent[-1].numel())
            if destination == rank:
                self.take = inverse
                self.receive_counts = [b - a for a, b in itertools.pairwise(bounds)]
        self.send_index = torch.cat(sent)
        self.copies = _copies(self.take)

    def to(self, device: torch.device) -> RowExchange:
        """The same on `device`."""
        moved = object.__new__(RowExchange)
        moved.num_local_rows = self.num_local_rows
        moved.send_counts, moved.receive_counts = self.send_counts, self.receive_counts
        moved.send_index, moved.take = move(self.send_index, device), move(self.take, device)
        moved.copies = [move(positions, device) for positions in self.copies]
        return moved


def _copies(index: torch.Tensor) -> list[torch.Tensor]:
    """Positions of first occurrences, of second ones, ...: no value of `index` repeats within one of them."""
    order = index.argsort(stable=True)
    ordered = index[order]
    place = torch.arange(index.numel())
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    occurrence = place - place.where(starts, 0).cummax(0).values if index.numel() else place
    count = int(occurrence.max()) + 1 if index.numel() else 0
    return [order[occurrence == i] for i in range(count)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, exchange: RowExchange, group: dist.ProcessGroup, expand: bool
    ) -> torch.Tensor:
        ctx.exchange, ctx.group, ctx.expand = exchange, group, expand
        send = x.index_select(0, exchange.send_index)
        received, work = all_to_all(send, exchange.send_counts, exchange.receive_counts, group)
        work.wait()
        return received.index_select(0, exchange.take) if expand else received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        exchange, dtype, wide = ctx.exchange, grad.dtype, _wide(grad.dtype)
        if ctx.expand:  # sums of rows are made in fp32, one addend of a row at a time: always in one order
            total = grad.new_zeros(sum(exchange.receive_counts), *grad.shape[1:], dtype=wide)
            for positions in exchange.copies:
                index = exchange.take.index_select(0, positions)
                total.index_add_(0, index, grad.index_select(0, positions).to(wide))
            grad = total
        returned, work = all_to_all(
            grad.contiguous(), exchange.receive_counts, exchange.send_counts, ctx.group
        )
        work.wait()
        dx = grad.new_zeros(exchange.num_local_rows, *grad.shape[1:], dtype=wide)
        parts = zip(
            exchange.send_index.split(exchange.send_counts),
            returned.split(exchange.send_counts),
            strict=True,
        )
        for index, part in parts:
            dx.index_add_(0, index, part.to(wide))
        return dx.to(dtype), None, None, None


def take_rows(
    x: torch.Tensor, exchange: RowExchange, group: dist.ProcessGroup, *, expand: bool
) -> torch.Tensor:
    """The rows that this rank needs of x (num_local_rows, ...): as listed in `needs` with `expand`, else each
    once, at `exchange.take`. Gradients of a row are summed over all ranks and uses in fp32."""
    return _TakeRows.apply(x, exchange, group, expand)


class _GatherChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunk: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[override]
        ctx.rank, ctx.size = group.rank(), chunk.shape[0]
        whole = chunk.new_empty(group.size() * chunk.shape[0], *chunk.shape[1:])
        parts, chunk = list(whole.split(chunk.shape[0])), chunk.contiguous()
        Pending(dist.all_gather(parts, chunk, group=group, async_op=True), chunk).wait()
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return grad[ctx.rank * ctx.size : (ctx.rank + 1) * ctx.size], None


def gather_chunks(chunk: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Chunks of equal size (n > 0, ...) of all ranks, one behind the other, on every rank. Backward expects
    that all ranks computed the same function of the result, and keeps this rank's part of its gradient."""
    return _GatherChunks.apply(chunk, group)
