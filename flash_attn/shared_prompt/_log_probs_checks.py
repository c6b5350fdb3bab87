"""Argument checks of `log_probs`: shapes, dtypes, devices and options always, values where reading them is
free.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_attn import checks
from flash_attn.checks import values_are_read


def _check_kind(name: str, value: Any, also: str = "") -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor{also}, got {type(value).__name__}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or hasattr(value, "__float__")  # NumPy's numbers too


def check_pack_rows(hidden: torch.Tensor, num_rows: int) -> None:
    """Raises unless `hidden` has one row per row of the pack."""
    _check_kind("hidden", hidden)
    if hidden.dim() > 1 and hidden.shape[-2] != num_rows:
        raise ValueError(
            f"hidden must have the {num_rows} rows of the pack (layout.num_rows), got {list(hidden.shape)}"
        )


def check_tensors(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    pred_index: torch.Tensor | None,
) -> torch.Tensor:
    """Raises for wrong shapes, dtypes and devices; `hidden` as (T, size)."""
    _check_kind("hidden", hidden)
    _check_kind("labels", labels, " or a PackedBatch")
    for name, tensor in (("weight", weight), ("bias", bias), ("pred_index", pred_index)):
        if tensor is not None:
            _check_kind(name, tensor, " or None")
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if hasattr(tensor, "full_tensor"):
            raise NotImplementedError(
                f"{name} must be a plain tensor, got DTensor: pass {name}.full_tensor()"
            )
    if hidden.dim() not in (2, 3) or (hidden.dim() == 3 and hidden.shape[0] != 1):
        raise ValueError(f"hidden must be (num_rows, size) or (1, num_rows, size), got {list(hidden.shape)}")
    if not hidden.is_floating_point():
        raise TypeError(f"hidden must be floating point, got {hidden.dtype}")
    rows = hidden.flatten(0, -2)
    if weight is None and bias is not None:
        raise ValueError("bias must come with weight, got weight=None")
    if weight is not None:
        if weight.dim() != 2 or weight.shape[1] != rows.shape[1]:
            raise ValueError(f"weight must be (vocab_size, {rows.shape[1]}), got {list(weight.shape)}")
        if torch.promote_types(weight.dtype, rows.dtype) != weight.dtype:
            raise TypeError(f"weight must be {rows.dtype} like hidden, or wider, got {weight.dtype}")
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
            raise ValueError(
                f"bias must be ({weight.shape[0]},) {weight.dtype}, got {list(bias.shape)} {bias.dtype}"
            )
    if pred_index is not None and (pred_index.dim() != 1 or pred_index.dtype != torch.int64):
        raise ValueError(f"pred_index must be (n,) int64, got {list(pred_index.shape)} {pred_index.dtype}")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels must be int64, got {labels.dtype}")
    expected = hidden.shape[:-1] if pred_index is None else pred_index.shape
    if labels.shape != expected:
        raise ValueError(f"labels must be {tuple(expected)}, got {list(labels.shape)}")
    for name, tensor in (("labels", labels), ("weight", weight), ("bias", bias), ("pred_index", pred_index)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name} must be on {hidden.device} like hidden, got {tensor.device}")
    return rows


def check_options(
    labels: torch.Tensor,
    vocab_size: int,
    temperature: float | torch.Tensor,
    softcap: float | None,
    ignore_index: int,
    tile_elements: int,
    dtype: torch.dtype,
) -> None:
    """Options, with hidden states of `dtype`."""
    if vocab_size < 1:
        raise ValueError("the vocabulary must have at least one token, got 0 logits per row")
    if isinstance(temperature, torch.Tensor):
        _check_temperatures(labels, temperature, dtype)
    elif not _is_number(temperature):
        raise TypeError(
            f"temperature must be a number or a tensor, got {type(temperature).__name__} {temperature!r}"
        )
    elif not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    else:
        checks.normal("temperature", temperature, dtype)
    if softcap is not None and not _is_number(softcap):
        raise TypeError(f"softcap must be a number or None, got {type(softcap).__name__} {softcap!r}")
    if softcap is not None:
        if not 0 < softcap < float("inf"):
            raise ValueError(f"softcap must be > 0 and finite, or None, got {softcap}")
        checks.normal("softcap", softcap, dtype)
    for name, value in (("ignore_index", ignore_index), ("tile_elements", tile_elements)):
        checks.integer(name, value)
    if tile_elements < 1:
        raise ValueError(f"tile_elements must be at least 1, got {tile_elements}")


def _check_temperatures(labels: torch.Tensor, temperature: torch.Tensor, dtype: torch.dtype) -> None:
    shapes = (labels.shape, (labels.numel(),))
    if temperature.shape not in shapes or temperature.device != labels.device:
        raise ValueError(
            f"temperature must be a number or one per label {tuple(labels.shape)} on {labels.device}, "
            f"got {list(temperature.shape)} on {temperature.device}"
        )
    if temperature.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "temperature has no gradient here: it must not require one, pass temperature.detach()"
        )
    if values_are_read(temperature) and temperature.numel():
        if not (temperature > 0).all():
            raise ValueError(f"temperature must be > 0, got {temperature[~(temperature > 0)][0].item()}")
        for extreme in temperature.aminmax():
            checks.normal("temperature", extreme.item(), dtype)


def check_values(
    labels: torch.Tensor, pred_index: torch.Tensor | None, vocab_size: int, num_rows: int, ignore_index: int
) -> None:
    if values_are_read(labels):
        wrong = ((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)
        if wrong.any():
            raise ValueError(
                f"labels must be in [0, {vocab_size}) or {ignore_index}, "
                f"got {labels[wrong].flatten()[0].item()}"
            )
    if pred_index is not None and values_are_read(pred_index):
        wrong = (pred_index < 0) | (pred_index >= num_rows)
        if wrong.any():
            raise ValueError(f"pred_index must be in [0, {num_rows}), got {pred_index[wrong][0].item()}")
