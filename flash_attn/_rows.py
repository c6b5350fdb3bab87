"""Rows of a packed tensor as one (count, rows, ...) batch, and back: views where the pieces lie at equal
distances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn._pieces import Kind, Run

SMALL = 256  # rows up to which triangles of unequal size share a call


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` blocks of `size` rows, `step` rows apart; they do not overlap."""

    begin: int
    size: int
    count: int
    step: int

    def take(self, x: Tensor) -> Tensor:
        """The view (count, size, ...) of x (total, ...)."""
        if self.count == 1:
            return x[self.begin : self.begin + self.size][None]
        offset = x.storage_offset() + self.begin * x.stride(0)
        return x.as_strided(
            (self.count, self.size, *x.shape[1:]), (self.step * x.stride(0), *x.stride()), offset
        )

    def numbers(self, device: torch.device) -> Tensor:
        """The rows' numbers, (count, size) int64."""
        block, row = (torch.arange(n, device=device) for n in (self.count, self.size))
        return self.begin + block[:, None] * self.step + row

    def put(self, x: Tensor, value: Tensor) -> None:
        self.take(x).copy_(value)

    def add(self, x: Tensor, value: Tensor) -> None:
        self.take(x).add_(value)


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Blocks of unequal size, padded with zeros at their ends to one size; they do not overlap."""

    index: Tensor  # (count, size) int64, 0 in the padding
    valid: Tensor  # (count, size) bool
    flat: Tensor  # index[valid]

    @staticmethod
    def of(intervals: list[tuple[int, int]]) -> RaggedRows:
        """From (begin, size) of each block."""
        begins, sizes = torch.tensor(intervals).unbind(1)
        position = torch.arange(int(sizes.max()))
        valid = position < sizes[:, None]
        index = (begins[:, None] + position).masked_fill_(~valid, 0)
        return RaggedRows(index, valid, index[valid])

    def take(self, x: Tensor) -> Tensor:
        """A copy (count, size, ...) of x (total, ...)."""
        return x[self.index].masked_fill_(~self.valid.unflatten(1, (-1, *[1] * (x.dim() - 1))), 0.0)

    def put(self, x: Tensor, value: Tensor) -> None:
        x.index_copy_(0, self.flat, value[self.valid])

    def add(self, x: Tensor, value: Tensor) -> None:
        x.index_add_(0, self.flat, value[self.valid])


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel call: all pieces of a run, or several small triangles of about one size side by side."""

    run: Run
    rows: Rows | RaggedRows
    keys: Rows | RaggedRows


def work_of(todo: list[Run]) -> list[Work]:
    """The calls for some runs. Small triangles are padded to one size: padded rows come last and are seen by
    none."""
    small: dict[bool, list[Run]] = {True: [], False: []}
    work = []
    for run in todo:
        if run.count == 1 and run.piece.kind is Kind.CAUSAL and run.piece.num_rows <= SMALL:
            small[run.piece.context].append(run)
        else:
            work.append(Work(run, *rows_of(run)))
    for found in small.values():
        found.sort(key=lambda run: run.piece.num_rows)
        while found:
            smallest = found[0].piece.num_rows
            batch = [run for run in found if run.piece.num_rows <= max(2 * smallest, 16)]
            found = found[len(batch) :]
            if len(batch) == 1:
                work.append(Work(batch[0], *rows_of(batch[0])))
                continue
            pieces = [run.piece for run in batch]
            rows = RaggedRows.of([(p.q_begin, p.num_rows) for p in pieces])
            keys = RaggedRows.of([(p.k_begin, p.num_keys) for p in pieces])
            work.append(Work(batch[0], rows, keys))
    return work


def rows_of(run: Run) -> tuple[Rows, Rows]:
    """The query rows and the key rows of a run."""
    piece = run.piece
    return (
        Rows(piece.q_begin, piece.num_rows, run.count, run.q_step),
        Rows(piece.k_begin, piece.num_keys, run.count, run.k_step),
    )
