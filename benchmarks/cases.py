"""The problems that are timed, and how their work is counted.

A case: `num_groups` groups of one prompt of P tokens and N responses of R tokens each. Work counts every
visible (query, key) pair once, prompts once:
    forward 4 H d (P^2 / 2 + N (P R + R^2 / 2)) floating-point operations a group, backward 2.5 times that.
(ragged: with R_i drawn from U(131, R), the sums over the responses).
With a window of W keys (window_left = W - 1) rows n of a sequence see min(n, W) keys: of its first n rows
n^2 / 2 pairs up to n = W, then W n - W^2 / 2.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

SHORTEST = 131  # of ragged responses


def uniform_lens(count: int, longest: int, seed: int = 0) -> list[int]:
    """Response lengths of U(131, longest); more of them begin with the same ones."""
    draw = random.Random(seed)
    return [draw.randint(min(SHORTEST, longest), longest) for _ in range(count)]


@dataclass(frozen=True)
class Case:
    num_responses: int
    prompt_len: int
    response_len: int
    num_heads: int = 32
    num_heads_k: int = 8
    head_dim: int = 128
    dtype: str = "bf16"
    num_groups: int = 1
    small: bool = False  # also timed as a CUDA graph: launches count
    window_left: int = -1  # -1: all earlier keys
    ragged: bool = False  # responses of 131 to response_len tokens

    @property
    def response_lens(self) -> list[int]:
        """Of one group; the groups are alike."""
        if self.ragged:
            return uniform_lens(self.num_responses, self.response_len)
        return [self.response_len] * self.num_responses

    @property
    def total(self) -> int:
        return self.num_groups * (self.prompt_len + sum(self.response_lens))

    def pairs(self, rows: int) -> float:
        """Visible pairs of a sequence's first rows."""
        window = self.window_left + 1
        return rows * rows / 2 if window <= 0 or rows <= window else window * rows - window * window / 2

    def forward_flops(self) -> float:
        p = self.prompt_len
        pairs = self.pairs(p) + sum(self.pairs(p + r) - self.pairs(p) for r in self.response_lens)
        return 4.0 * self.num_heads * self.head_dim * pairs * self.num_groups

    def flops(self, direction: str) -> float:
        return self.forward_flops() * (1.0 if direction == "fwd" else 2.5)

    def row(self) -> dict[str, Any]:
        """The case as result files have it."""
        names = dict(num_responses="N", prompt_len="P", response_len="R", num_heads="H", num_heads_k="Hk")
        names |= dict(head_dim="d", dtype="dtype", num_groups="groups")
        if self.window_left >= 0:
            names["window_left"] = "window_left"
        if self.ragged:
            names["ragged"] = "ragged"
        return {names[k]: v for k, v in asdict(self).items() if k in names}


@dataclass(frozen=True)
class PlainCase:
    """A batch without shared prompts, for the flash-attn functions."""

    batch: int
    seqlen: int
    causal: bool
    num_heads: int = 32
    num_heads_k: int = 8
    head_dim: int = 128
    dtype: str = "bf16"

    def flops(self, direction: str) -> float:
        pairs = self.batch * self.seqlen**2 / (2 if self.causal else 1)
        return 4.0 * self.num_heads * self.head_dim * pairs * (1.0 if direction == "fwd" else 2.5)

    def row(self) -> dict[str, Any]:
        row = dict(B=self.batch, S=self.seqlen, causal=self.causal, H=self.num_heads, Hk=self.num_heads_k)
        return row | dict(d=self.head_dim, dtype=self.dtype)


MAIN = [Case(28, 4096, 2048), Case(28, 16384, 2048), Case(16, 32768, 2048)]
PAPER = ((28, 4096), (28, 16384), (16, 32768), (28, 32768), (16, 65536))  # N, P of DualKV's table
HEAD_DIMS = (64, 96, 192, 256)  # beside 128
CASES: dict[str, list[Case]] = {
    "paper": [Case(n, p, 2048, dtype=dtype) for dtype in ("bf16", "fp16") for n, p in PAPER],
    "paper_head_dims": [Case(n, p, 2048, head_dim=d) for d in HEAD_DIMS for n, p in PAPER],
    "main": MAIN,
    "quick": [Case(28, 16384, 2048), Case(8, 1024, 256, small=True)],
    "small": [Case(8, 1024, 256, small=True), Case(32, 2048, 2048), Case(16, 512, 128, small=True)],
    "head_dims": [Case(28, 16384, 2048, head_dim=d) for d in HEAD_DIMS],
    "long": [Case(4, 65536, 512)],
    "groups": [Case(8, 4096, 1024, num_groups=4)],
    "ragged": [Case(32, 8192, 2048, ragged=True), Case(32, 8192, 2048)],
    # Gemma-4-31B: global layers, sliding layers, and what the latter would be without their window.
    "gemma4": [
        Case(8, 8192, 2048, num_heads_k=4, head_dim=512),
        Case(16, 16384, 2048, num_heads_k=16, head_dim=256, window_left=1023),
        Case(16, 16384, 2048, num_heads_k=16, head_dim=256),
    ],
}
PLAIN: list[PlainCase] = [
    PlainCase(16, seqlen, causal, head_dim=d)
    for d in (128, 64)
    for seqlen in (500, 4096)
    for causal in (True, False)
]
