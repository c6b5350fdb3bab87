"""Residual, dropout and normalisation in one call, against torch's modules in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn._layer_norm import (
    RMSNorm,
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)


def make(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("is_rms_norm", [False, True])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_values_and_gradients(is_rms_norm: bool, zero_centered: bool) -> None:
    torch.manual_seed(0)
    x, residual, x1, weight, bias, weight1, bias1, rowscale = inputs = (
        make(2, 3, 8), make(2, 3, 8), make(2, 3, 8), make(8), make(8), make(8), make(8), make(2, 3)
    )  # fmt: skip
    got = layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, 1e-3, rowscale=rowscale, prenorm=True,
        zero_centered_weight=zero_centered, is_rms_norm=is_rms_norm,
    )  # fmt: skip
    total = x * rowscale[..., None] + x1 + residual
    one = torch.ones(8, dtype=torch.float64)
    norm = torch.nn.functional.rms_norm if is_rms_norm else torch.nn.functional.layer_norm
    unit = norm(total, (8,), eps=1e-3)
    shift = one if zero_centered else 0 * one
    expected = (unit * (weight + shift) + bias, unit * (weight1 + shift) + bias1, total)
    torch.testing.assert_close(got, expected)
    factors = [torch.randn_like(y) for y in expected]
    grads = [
        torch.autograd.grad(sum((y * f).sum() for y, f in zip(ys, factors, strict=True)), inputs)
        for ys in (got, expected)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("options", "dtype"), [({}, torch.bfloat16), ({"residual_in_fp32": True}, torch.float32)]
)
def test_dtypes(options: dict[str, Any], dtype: torch.dtype) -> None:
    x, weight = make(4, 16, dtype=torch.bfloat16), make(16, dtype=torch.float32)
    out, total = rms_norm_fn(x, weight, None, prenorm=True, **options)
    assert (out.dtype, total.dtype) == (torch.bfloat16, dtype)
    residual = make(4, 16, dtype=torch.float64)
    assert rms_norm_fn(x, weight, None, residual, prenorm=True, **options)[1].dtype == torch.float64
    assert rms_norm_fn(x, weight, None, out_dtype=torch.float32).dtype == torch.float32
    given = torch.empty(4, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        assert rms_norm_fn(x, weight, None, out=given) is given
    torch.testing.assert_close(given, out.detach())


def test_dropout_keeps_the_mean_and_says_what_it_dropped() -> None:
    torch.manual_seed(0)
    x = torch.ones(400, 500, dtype=torch.float64)
    _, total, mask, mask1 = layer_norm_fn(
        x, x[0], None, x1=x, dropout_p=0.25, prenorm=True, return_dropout_mask=True
    )
    torch.testing.assert_close(total, (mask.double() + mask1.double()) / 0.75)
    for m in (mask, mask1):
        assert abs(m.double().mean() - 0.75) < 5 * (0.75 * 0.25 / m.numel()) ** 0.5
    assert not torch.equal(mask, mask1)


@pytest.mark.parametrize(
    ("function", "reference"), [(layer_norm_fn, layer_norm_ref), (rms_norm_fn, rms_norm_ref)]
)
def test_the_reference_with_the_masks_of_a_call(function: Any, reference: Any) -> None:
    torch.manual_seed(0)
    x, x1, residual, weight, weight1, bias1 = make(3, 8), make(3, 8), make(3, 8), make(8), make(8), make(8)
    options = dict(eps=1e-3, dropout_p=0.4, prenorm=True, zero_centered_weight=True)
    *got, mask, mask1 = function(
        x, weight, None, residual, x1, weight1, bias1, return_dropout_mask=True, **options
    )
    expected = reference(
        x, weight, None, residual, x1, weight1, bias1, dropout_mask=mask, dropout_mask1=mask1, **options
    )
    torch.testing.assert_close(tuple(got), expected)
    scale = make(3)
    scaled = function(x, weight, None, rowscale=scale), reference(x, weight, None, rowscale=scale)
    torch.testing.assert_close(*scaled)
    assert not torch.equal(reference(x, weight, None, dropout_p=0.5), reference(x, weight, None))
    with pytest.raises(ValueError, match="rowscale must be None with x1"):
        reference(x, weight, None, x1=x1, rowscale=scale)


@pytest.mark.parametrize("reference", [layer_norm_ref, rms_norm_ref])
def test_the_references_dtypes(reference: Any) -> None:
    x, weight = make(4, 16, dtype=torch.bfloat16), make(16, dtype=torch.bfloat16)
    for upcast, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        out, total = reference(x, weight, None, x, prenorm=True, upcast=upcast)
        assert (out.dtype, total.dtype) == (torch.bfloat16, dtype)


def test_the_rms_references_rows_keep_their_dtype() -> None:
    """Those of a narrower weight, as upstream's do; LayerNorm's reference runs in the weight's dtype."""
    x, weight = make(4, 16), make(16, dtype=torch.bfloat16)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm_ref(x, weight, None), expected * weight)
    zero_centered = rms_norm_ref(x, weight, None, zero_centered_weight=True)
    torch.testing.assert_close(zero_centered, expected * (weight + 1))


def test_module() -> None:
    torch.manual_seed(0)
    x, residual = make(3, 8), make(3, 8)
    ours, theirs = RMSNorm(8, dtype=torch.float64), torch.nn.RMSNorm(8, eps=1e-5, dtype=torch.float64)
    out, total = ours(x, residual, prenorm=True)
    torch.testing.assert_close((out, total), (theirs(x + residual), x + residual))
    centred = RMSNorm(8, zero_centered_weight=True, dtype=torch.float64)
    assert torch.equal(centred.weight, torch.zeros(8, dtype=torch.float64))
    torch.testing.assert_close(centred(x), theirs(x))
    dropping = RMSNorm(8, dropout_p=0.5, dtype=torch.float64)
    assert not torch.allclose(dropping(x), theirs(x))
    torch.testing.assert_close(dropping.eval()(x), theirs(x))


@pytest.mark.parametrize("is_rms_norm", [False, True])
def test_linear_behind_the_norm(is_rms_norm: bool) -> None:
    x, residual, weight, bias, linear, shift = inputs = (
        make(2, 3, 8), make(2, 3, 8), make(8), make(8), make(5, 8), make(5)
    )  # fmt: skip
    rest = dict(eps=1e-3, prenorm=True, is_rms_norm=is_rms_norm)
    got = layer_norm_linear_fn(x, weight, bias, linear, shift, residual, **rest)  # type: ignore[arg-type]
    y, r = layer_norm_fn(x, weight, bias, residual, **rest)  # type: ignore[arg-type,misc]
    expected = torch.nn.functional.linear(y, linear, shift), r  # type: ignore[arg-type]
    torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad(sum(z.square().sum() for z in ys), inputs) for ys in (got, expected)]  # type: ignore[misc,union-attr]
    torch.testing.assert_close(*grads)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer_norm_linear_fn(x.float(), weight, None, linear, None, is_rms_norm=is_rms_norm)
    assert isinstance(low, Tensor) and low.dtype == torch.bfloat16
