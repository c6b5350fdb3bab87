"""Cross entropy in Triton: the logits x (rows, vocab) are read once forward, read and written once backward.

    row_sums:  lse[r] = logsumexp(s x[r]), picked[r] = s x[r, label], total[r] = sum(s x[r])
    gradients: dx = ((1 + 2 z lse) exp(s x - lse) - e / all columns - (1 - e) [label]) weight
Called by _cross_entropy.py, which imports this file only where Triton is; TRITON_INTERPRET=1 runs it on
a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_sums(  # type: ignore[no-untyped-def]
    x, label, lse, picked, total, x_row, vocab, scale,
    WITH_SUMS: tl.constexpr, WITH_LSE: tl.constexpr, WITH_TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r: row r. `label` is a column, or -1 where the row's label is none: picked is 0 then."""
    row = tl.program_id(0)
    x += row.to(tl.int64) * x_row
    column = tl.load(label + row)
    own = tl.load(x + column, mask=column >= 0, other=0.0).to(tl.float32) * scale
    tl.store(picked + row, tl.where(column >= 0, own, 0.0))
    if WITH_SUMS:
        highest, exponentials, plain = float("-inf"), 0.0, 0.0
        for begin in range(0, vocab, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            part = tl.load(x + at, mask=at < vocab, other=0.0).to(tl.float32) * scale
            if WITH_TOTAL:
                plain += tl.sum(part, 0)
            part = tl.where(at < vocab, part, float("-inf"))
            new = tl.maximum(highest, tl.max(part, 0))
            level = tl.where(tl.abs(new) == float("inf"), 0.0, new)  # inf - inf is no number
            exponentials = exponentials * tl.exp(highest - level) + tl.sum(tl.exp(part - level), 0)
            highest = new
        if WITH_LSE:
            level = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
            tl.store(lse + row, level + tl.log(exponentials))
        if WITH_TOTAL:
            tl.store(total + row, plain)


@triton.jit
def gradients(  # type: ignore[no-untyped-def]
    x, label, lse, weight, dx, x_row, dx_row, vocab, scale, smoothing, smooth_share, lse_square_scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, b): columns of block b of row r. Rows of weight 0 give 0. dx may be x."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    column, own_lse, own_weight = tl.load(label + row), tl.load(lse + row), tl.load(weight + row)
    x += row.to(tl.int64) * x_row
    dx += row.to(tl.int64) * dx_row
    d = tl.exp(tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale - own_lse)
    d = d * (1 + 2 * lse_square_scale * own_lse) - smooth_share
    d = tl.where(at == column, d - (1 - smoothing), d)
    d = tl.where(own_weight == 0, 0.0, d * own_weight)
    tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
