"""FLOPs of the ops for torch.utils.flop_counter.FlopCounterMode, of visible (row, key) pairs only:

    forward   2 H pairs (D + Dv)           q k^T, P v
    backward  2 H pairs (3 D + 2 Dv)       q k^T again, dP, dq, dk, dv
as torch counts its own attention, but for masks, under which it counts every pair. A counter is told when it
watches a call: to register formulas beforehand would import Triton. Called by _ops.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flash_attn._extras import parse
from flash_attn._ops import Batch
from flash_attn._pieces import Table, bands


def tell_counters() -> None:
    """Adds the formulas to every FlopCounterMode that is active."""
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(registry, dict):
            for name, formula in _FORMULAS.items():
                registry.setdefault(getattr(torch.ops.flash_attn, name), formula)


def num_pairs(table: Table, causal: bool, window_left: int, window_right: int) -> int:
    """(row, key) pairs that the rows of `table` (segments) see."""
    total = 0
    for band in bands(table, causal, window_left, window_right):
        # Row o sees keys max(0, lower + o) to min(num_keys, upper + o) - 1.
        n, lower = band.num_rows, band.lower
        total += _sum_of_smaller(n, band.upper, band.num_keys)
        total -= n * lower + n * (n - 1) // 2 - _sum_of_smaller(n, lower, 0)
    return total


def _sum_of_smaller(n: int, begin: int, cap: int) -> int:
    """Sum over o < n of min(begin + o, cap)."""
    below = min(max(cap - begin, 0), n)
    return below * begin + below * (below - 1) // 2 + (n - below) * cap


def _table(batch: Batch, k_context: Tensor | None) -> Table:
    """The segments; where only their number is known (fake tensors), each as long as the longest."""
    known = batch.segments if batch.segments_host is None else batch.segments_host
    if not (known.is_meta or isinstance(known, FakeTensor)):
        with unset_fake_temporarily():  # a layout's own tensors stay real beside fake ones
            return known.tolist()
    rows, keys = batch.max_seqlen_q, batch.max_seqlen_k + (0 if k_context is None else k_context.shape[0])
    return [[i * rows, (i + 1) * rows, 0, 0, 0, keys] for i in range(known.shape[0])]


def _flops(q: Tensor, v: Tensor, k_context: Tensor | None, batch: Batch, backward: bool) -> int:
    window = batch.window_size_left, batch.window_size_right
    pairs = num_pairs(_table(batch, k_context), batch.causal, *window)
    columns = (3 * q.shape[-1] + 2 * v.shape[-1]) if backward else q.shape[-1] + v.shape[-1]
    return 2 * q.shape[-2] * pairs * columns


def _fwd(q: Tensor, k: Tensor, v: Tensor, k_context: Tensor | None, _: Any, *batch: Any, out_val: Any) -> int:
    return _flops(q, v, k_context, Batch(*batch), False)


def _bwd(dout: Tensor, dlse: Tensor | None, *rest: Any, out_val: Any) -> int:
    q, _, v, k_context, _, _, _, *batch = rest
    return _flops(q, v, k_context, Batch(*batch), True)


def _fwd_extras(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any) -> int:
    return _flops(q, v, None, parse(*rest)[0], False)


def _bwd_extras(dout: Tensor, dlse: Tensor | None, *rest: Any, out_val: Any) -> int:
    q, _, v, _, _, *batch = rest
    return _flops(q, v, None, parse(*batch)[0], True)


_FORMULAS = {"fwd": _fwd, "bwd": _bwd, "fwd_extras": _fwd_extras, "bwd_extras": _bwd_extras}
