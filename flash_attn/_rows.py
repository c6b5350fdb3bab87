"""Rows of a packed tensor as one (count, rows, ...) batch, and back: views where the pieces lie at equal
distances."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flash_attn._pieces import Run


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

    def put(self, x: Tensor, value: Tensor) -> None:
        self.take(x).copy_(value)

    def add(self, x: Tensor, value: Tensor) -> None:
        self.take(x).add_(value)


def rows_of(run: Run) -> tuple[Rows, Rows]:
    """The query rows and the key rows of a run."""
    piece = run.piece
    return (
        Rows(piece.q_begin, piece.num_rows, run.count, run.q_step),
        Rows(piece.k_begin, piece.num_keys, run.count, run.k_step),
    )
