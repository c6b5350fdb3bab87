"""Residual, dropout and LayerNorm or RMSNorm in one call, in plain PyTorch, normalised in fp32:

    r = dropout(rowscale x) + dropout(x1) + residual
    out = norm(r) weight + bias, out1 = norm(r) weight1 + bias1
Used by ops/triton/layer_norm.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn import checks


def _dropped(x: Tensor, p: float, masked: bool) -> tuple[Tensor, Tensor | None]:
    if p == 0.0:
        return x, torch.ones_like(x, dtype=torch.bool) if masked else None
    keep = torch.rand_like(x, dtype=torch.float32) >= p
    return torch.where(keep, x / (1 - p), 0.0), keep if masked else None


def _normalised(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_rms_norm: bool, zero_centered: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    weight = weight.to(x.dtype) + 1.0 if zero_centered else weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if not is_rms_norm:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps).to(dtype)
    y = F.rms_norm(x, x.shape[-1:], weight, eps)
    return (y if bias is None else y + bias).to(dtype)


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor | None, ...]:
    """x, residual, x1 (..., hidden), weights and biases (hidden,), rowscale (...,) -> out, like x.

    With `weight1` a second output; with `prenorm` also the sum r, in the residual's dtype (fp32 with
    `residual_in_fp32`, else x's); with `return_dropout_mask` the boolean masks of x and x1 (None without x1).
    `zero_centered_weight`: 1 + weight multiplies. `out`, `residual_out` are filled where given.
    """
    wide = checks.arithmetic(x.dtype)
    total = x.to(wide) if rowscale is None else x.to(wide) * rowscale[..., None].to(wide)
    total, mask = _dropped(total, dropout_p, return_dropout_mask)
    mask1 = None
    if x1 is not None:
        second, mask1 = _dropped(x1.to(wide), dropout_p, return_dropout_mask)
        total = total + second
    if residual is not None:
        total = total + residual.to(wide)
    kept = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    r = total.to(kept)
    how = (eps, is_rms_norm, zero_centered_weight, x.dtype if out_dtype is None else out_dtype)
    results: list[Tensor | None] = [_normalised(total, weight, bias, *how)]
    if out is not None:
        results[0] = out.copy_(results[0])  # type: ignore[arg-type]
    if weight1 is not None:
        results.append(_normalised(total, weight1, bias1, *how))
    if prenorm:
        results.append(r if residual_out is None else residual_out.copy_(r))
    if return_dropout_mask:
        results += [mask, mask1]
    return results[0] if len(results) == 1 else tuple(results)  # type: ignore[return-value]


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor | None, ...]:
    """`layer_norm_fn` with RMSNorm: x / sqrt(mean(x^2) + eps)."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
        zero_centered_weight, True, return_dropout_mask, out_dtype, out, residual_out,
    )  # fmt: skip


def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`layer_norm_fn`, then a linear layer: linear_weight (out, hidden), linear_bias (out,) -> (..., out).

    With `prenorm` also the sum r. Under autocast in its dtype, else in x's.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    options = dict(prenorm=True, residual_in_fp32=residual_in_fp32, is_rms_norm=is_rms_norm, out_dtype=dtype)
    y, r = layer_norm_fn(x, norm_weight, norm_bias, residual, eps=eps, **options)  # type: ignore[arg-type]
    out = F.linear(y, linear_weight.to(dtype), None if linear_bias is None else linear_bias.to(dtype))  # type: ignore[arg-type]
    return (out, r) if prenorm else out  # type: ignore[return-value]


class LayerNormFn:
    """flash-attn's autograd class of `layer_norm_fn`, by its `apply`."""

    apply = staticmethod(layer_norm_fn)


class LayerNormLinearFn:
    """Likewise of `layer_norm_linear_fn`."""

    apply = staticmethod(layer_norm_linear_fn)


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """What tests compare `layer_norm_fn` with: step by step in the given dtypes (fp32 with `upcast`), the
    masks (True: kept) given or drawn. Results in x's dtype; with `prenorm` also the sum as added up."""
    return _reference(
        False, x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
        zero_centered_weight, dropout_mask, dropout_mask1, upcast,
    )  # fmt: skip


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`layer_norm_ref` of `rms_norm_fn`."""
    return _reference(
        True, x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
        zero_centered_weight, dropout_mask, dropout_mask1, upcast,
    )  # fmt: skip


def _reference(
    is_rms_norm: bool, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    x1: Tensor | None, weight1: Tensor | None, bias1: Tensor | None, eps: float, dropout_p: float,
    rowscale: Tensor | None, prenorm: bool, zero_centered: bool, mask: Tensor | None, mask1: Tensor | None,
    upcast: bool,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    if x1 is not None and rowscale is not None:
        raise ValueError("rowscale must be None with x1: upstream's reference does not define both")

    def wide(y: Tensor | None) -> Any:
        return y.float() if upcast and y is not None else y

    def kept(y: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return F.dropout(y, dropout_p)
        return torch.where(mask, y, 0.0) / (1 - dropout_p) if dropout_p > 0 else y

    total = wide(x) if rowscale is None else wide(x) * rowscale[..., None]
    total = kept(total, mask)
    if x1 is not None:
        total = total + kept(wide(x1), mask1)
    if residual is not None:
        total = (total + wide(residual)).to(total.dtype)
    results = []
    for w, b in ((weight, bias), (weight1, bias1)):
        if w is not None:
            w, b = wide(w), wide(b)
            w = w + 1.0 if zero_centered else w
            # Upstream's LayerNorm runs in the weight's dtype, its RMSNorm in the wider of both.
            row = total.to(torch.promote_types(total.dtype, w.dtype) if is_rms_norm else w.dtype)
            results.append(_normalised(row, w, b, eps, is_rms_norm, False, x.dtype))
    if prenorm:
        results.append(total)
    return results[0] if len(results) == 1 else tuple(results)


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, with dropout before it while training and an optional residual."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.dropout_p, self.zero_centered_weight = eps, dropout_p, zero_centered_weight
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """As `rms_norm_fn`."""
        return rms_norm_fn(
            x, self.weight, None, residual=residual, eps=self.eps,
            dropout_p=self.dropout_p if self.training else 0.0, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32, zero_centered_weight=self.zero_centered_weight,
        )  # fmt: skip
