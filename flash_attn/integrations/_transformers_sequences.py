"""Where sequences begin in a batch that pads them or packs them behind each other, from transformers' masks,
positions and cu_seq_lens: cu_seqlens and lengths for varlen attention. Called by _transformers_attention.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

VARLEN_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _longest(lens: torch.Tensor) -> int:
    return int(lens.max()) if lens.numel() else 0


def unpad_rows(mask: torch.Tensor, num_columns: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Of the mask's last columns: the rows of real tokens in the flattened batch, cu_seqlens (int32),
    longest length."""
    mask = mask.flatten(1)[:, -num_columns:] != 0
    lens = mask.sum(1)
    cu_seqlens = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    return mask.flatten().nonzero().flatten(), cu_seqlens, _longest(lens)


def has_holes(mask: torch.Tensor) -> bool:
    """Whether some row's real tokens are not all next to each other."""
    mask = mask.flatten(1) != 0
    starts = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    return bool((starts > 1).any())


_Bounds = tuple[torch.Tensor, torch.Tensor, int, int]


def sequence_bounds(
    q: torch.Tensor, k: torch.Tensor, sequence_ids: torch.Tensor | None, kwargs: dict[str, Any]
) -> _Bounds | None:
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) of a batch of packed rows; None for one
    sequence per row."""
    given = {name: kwargs[name] for name in VARLEN_NAMES if kwargs.get(name) is not None}
    if given:
        if "cu_seq_lens_q" not in given or "cu_seq_lens_k" not in given:
            raise ValueError(
                f"cu_seq_lens_q and cu_seq_lens_k must be given together, got only {', '.join(given)}"
            )
        cu_q, cu_k = given["cu_seq_lens_q"].int(), given["cu_seq_lens_k"].int()
        max_q, max_k = (
            int(given[name]) if name in given else _longest(cu.diff())
            for name, cu in (("max_length_q", cu_q), ("max_length_k", cu_k))
        )
        return cu_q, cu_k, max_q, max_k
    position_ids = kwargs.get("position_ids")
    # Multimodal positions (3, B, L) jump inside one sequence, so they say nothing here; one position
    # (decoding) cannot jump.
    if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] in (0, 1)):
        position_ids = None
    starts = None if position_ids is None else cached(position_ids, _starts_of_positions)
    if sequence_ids is not None:
        starts = cached(sequence_ids, _starts_of_ids)
    if starts is None:
        return None
    cu_seqlens, longest = starts
    num_positions = None if position_ids is None else position_ids.shape
    if q.shape[1] != k.shape[1] or (sequence_ids is None and num_positions != q.shape[:2]):
        raise NotImplementedError(
            "packed sequences (position_ids that jump) need all queries of each row and no cached keys, got "
            f"{list(q.shape[:2])} queries, {list(k.shape[:2])} keys"
        )
    return cu_seqlens, cu_seqlens, longest, longest


_Starts = tuple[torch.Tensor, int]


def _starts_to_bounds(rows: torch.Tensor, num_rows: int) -> _Starts:
    cu_seqlens = torch.nn.functional.pad(rows, (0, 1), value=num_rows).int()
    return cu_seqlens, _longest(cu_seqlens.diff())


def _starts_of_ids(sequence_ids: torch.Tensor) -> _Starts:
    starts = torch.nn.functional.pad(sequence_ids.flatten(1).diff(dim=1) != 0, (1, 0), value=True).flatten()
    return _starts_to_bounds(starts.nonzero().flatten(), starts.numel())


def _starts_of_positions(position_ids: torch.Tensor) -> _Starts | None:
    """cu_seqlens and the longest sequence of packed rows; None where every row is one sequence."""
    jumps = position_ids.diff(dim=1) != 1
    if not bool(jumps.any()):
        return None
    rows = torch.nn.functional.pad(jumps, (1, 0), value=True).flatten().nonzero().flatten()
    first = position_ids.flatten()[rows]
    if not bool((first == first[0]).all()):
        raise ValueError(
            "position_ids that jump to another value than the first do not say where sequences begin. "
            "A shared-prompt pack must be passed with dualkv_layout="
        )
    return _starts_to_bounds(rows, position_ids.numel())


_results = threading.local()


def cached(tensor: torch.Tensor, function: Callable[..., Any], *arguments: int) -> Any:
    """function(tensor, *arguments); off the CPU computed once for the layers of a forward, which all get the
    same tensor object: these functions read values on the host, which on a GPU waits for it.

    A change of the values between two forwards is seen by the tensor's version, which writes through `.data`
    or foreign pointers to GPU memory leave alone: give a new tensor after those. On the CPU, where NumPy and
    data loaders often write so, nothing is kept.
    """
    if tensor.device.type == "cpu" or torch.compiler.is_compiling() or tensor.is_inference():
        return function(tensor, *arguments)
    if not hasattr(_results, "by_tensor"):
        _results.by_tensor = WeakTensorKeyDictionary()
    known = _results.by_tensor.get(tensor)
    if known is None or known[0] != tensor._version:
        known = _results.by_tensor[tensor] = tensor._version, {}
    if (function, arguments) not in known[1]:
        with torch.inference_mode(False):  # a call with gradients may be next
            known[1][function, arguments] = function(tensor, *arguments)
    return known[1][function, arguments]
