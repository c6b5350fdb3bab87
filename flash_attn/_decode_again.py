"""Decoding calls that look like one before: its checks, its choices and its launches hold.

What flash_attn_with_kvcache launches depends on its tensors' shapes, strides, dtypes and alignment and on its
numbers, not on values. Looking at them takes Python longer than a GPU takes to read a short cache, so the
launches of the first call of a kind are kept, and made with the tensors of the next. Called by _kvcache.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn import _decode, checks

_MOST = 512
COS_AND_SIN = slice(5, 7)
_NUMBERS = (bool, int, float, type(None))


@dataclass(frozen=True)
class _Launches:
    made: list[tuple[torch.Size, torch.dtype]]  # tensors that the call makes; the first two are its results
    # launcher, its arguments, where pointers go and whose: tensors given, then made
    kernels: list[tuple[Any, list[Any], list[tuple[int, int]]]]


_known: dict[tuple[Any, ...], _Launches] = {}


def key(tensors: tuple[Any, ...], window_size: Any, numbers: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What the launches depend on; None where they would depend on more, or on copies of what is given.

    `tensors`: the function's arguments from q to block_table."""
    q = tensors[0]
    if torch.compiler.is_compiling() or type(q) is not Tensor or not (q.is_cuda or _decode.interpreted()):
        return None
    device = q.get_device()
    if checks.values_are_read(q) or (q.is_cuda and device != torch.cuda.current_device()):
        return None
    if type(window_size) is not tuple or any(type(x) not in _NUMBERS for x in (*window_size, *numbers)):
        return None
    parts: list[Any] = [os.environ.get("FLASH_ATTN_DECODE"), device, window_size, *numbers]
    for x in tensors:
        if x is None:
            parts.append(None)
            continue
        if type(x) is not Tensor or x.get_device() != device:
            return None
        strides = x.stride()
        if not strides or strides[-1] != 1 or x.data_ptr() & 15:  # copied, or compiled for other alignments
            return None
        parts += (x.dtype, x.shape, strides)
    cos, sin = tensors[COS_AND_SIN]
    if cos is not None and sin is not None and cos.stride() != sin.stride():  # copied
        return None
    given = [id(x) for x in tensors if x is not None]
    if len(set(given)) < len(given):  # which of two arguments goes where would be known no more
        return None
    return tuple(parts)


def run(known: tuple[Any, ...], tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """The call with these tensors; None where no such call has been kept."""
    launches = _known.get(known)
    if launches is None:
        return None
    device = tensors[0].device
    made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in launches.made]
    pointers = [x if x is None else _pointer(x) for x in (*tensors, *made)]
    for launcher, arguments, places in launches.kernels:
        filled = arguments.copy()
        for place, tensor in places:
            filled[place] = pointers[tensor]
        launcher(*filled)
    return made[0], made[1]


def _pointer(x: Tensor) -> Any:
    return x.data_ptr() if x.is_cuda else x  # the interpreter takes tensors


def keep(
    known: tuple[Any, ...], tensors: tuple[Any, ...], launched: list[_decode.Launched],
    results: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Remembers what a call with these tensors has launched, and which tensors it returned."""
    if not launched:  # the op has decoded, or Triton's interpreter
        return
    number = {id(x): i for i, x in enumerate(tensors) if x is not None}
    made: list[Tensor] = []
    for x in (*results, *(y for one in launched for y in one.arguments)):
        if isinstance(x, Tensor) and id(x) not in number:
            if not x.is_contiguous():
                return
            number[id(x)] = len(tensors) + len(made)
            made.append(x)
    if any(x.dtype != torch.float32 for x in made[2:]):  # the splits' parts are; what else could it be
        return
    kernels = []
    for one in launched:
        places = [(i, number[id(x)]) for i, x in enumerate(one.arguments) if isinstance(x, Tensor)]
        arguments = [None if isinstance(x, Tensor) else x for x in one.arguments]
        kernels.append((one.launcher, arguments, places))
    if len(_known) >= _MOST:
        _known.clear()
    _known[known] = _Launches([(x.shape, x.dtype) for x in made], kernels)
