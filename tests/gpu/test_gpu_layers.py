"""Rotary embedding, cross entropy, norms and padding on GPU tensors, against torch in fp64."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from gpu_cases import CUDA
from torch import Tensor

from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn.losses.cross_entropy import CrossEntropyLoss

TOLERANCE = {torch.float32: 2**-16, torch.float16: 2**-10, torch.bfloat16: 2**-7}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])


def triton(module: str) -> Any:
    """flash_attn.ops.triton.<module>, which is importable on GPUs only."""
    return importlib.import_module(f"flash_attn.ops.triton.{module}")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(sum(shape))
    return torch.randn(shape, device=CUDA, generator=generator).to(dtype)


def near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Within a rounding of the largest value."""
    torch.testing.assert_close(
        got.double(), wanted, rtol=0, atol=TOLERANCE[dtype] * float(wanted.abs().max())
    )


def turned(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """x (..., H, D) in fp64 as complex numbers times e^(i angle), angle (..., 1, rotary_dim / 2)."""
    x, half = x.double(), angle.shape[-1]
    pairs = x[..., : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    product = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    back = torch.view_as_real(product)
    return torch.cat(((back if interleaved else back.transpose(-1, -2)).flatten(-2), x[..., 2 * half :]), -1)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_rotary(dtype: torch.dtype, interleaved: bool, inplace: bool) -> None:
    x, angle = random(3, 70, 4, 64, dtype=dtype), random(100, 16).double()
    offsets = torch.tensor([0, 30, 7], device=CUDA, dtype=torch.int32)
    cos, sin = angle.cos().float(), angle.sin().float()
    rows = angle[offsets[:, None] + torch.arange(70, device=CUDA)][:, :, None]
    leaf = x.clone().requires_grad_()
    got = apply_rotary_emb(leaf * 1, cos, sin, interleaved, inplace, seqlen_offsets=offsets)
    near(got, turned(x, rows, interleaved), dtype)
    dout = random(3, 70, 4, 64, dtype=dtype)
    near(torch.autograd.grad(got, leaf, dout)[0], turned(dout, -rows, interleaved), dtype)
    again = triton("rotary").apply_rotary(x, cos, sin, offsets, interleaved=interleaved)
    near(again, got.detach().double(), dtype)


@DTYPES
def test_rotary_of_packed_sequences_and_of_the_module(dtype: torch.dtype) -> None:
    cu_seqlens = torch.tensor([0, 13, 13, 83], device=CUDA, dtype=torch.int32)
    x, module = random(83, 4, 32, dtype=dtype), RotaryEmbedding(32, device=CUDA)
    position = torch.cat((torch.arange(13), torch.arange(70))).to(CUDA)
    angle = position[:, None, None] * 10000.0 ** (-torch.arange(0, 32, 2, device=CUDA).double() / 32)
    cos, sin = (f(angle[13:, 0]).float() for f in (torch.cos, torch.sin))
    near(apply_rotary_emb(x, cos, sin, cu_seqlens=cu_seqlens, max_seqlen=70), turned(x, angle, False), dtype)
    qkv = random(1, 70, 3, 4, 32, dtype=dtype)
    wanted = qkv.double()
    wanted[:, :, :2] = turned(qkv[:, :, :2], angle[13:, None], False)
    near(module(qkv.clone()), wanted, dtype)


LOSSES: list[dict[str, Any]] = [
    {}, dict(label_smoothing=0.1), dict(logit_scale=0.7), dict(lse_square_scale=1e-3),
    dict(label_smoothing=0.1, logit_scale=1.5, lse_square_scale=1e-3, inplace_backward=True),
]  # fmt: skip


@DTYPES
@pytest.mark.parametrize("options", LOSSES, ids=lambda o: "-".join(o) or "plain")
def test_cross_entropy(dtype: torch.dtype, options: dict[str, Any]) -> None:
    logits = random(50, 5003, dtype=dtype) * 3
    labels = torch.randint(0, 5003, (50,), device=CUDA)
    labels[::7] = -100
    exact = logits.double().requires_grad_()
    scaled = exact * options.get("logit_scale", 1.0)
    smoothing, square = options.get("label_smoothing", 0.0), options.get("lse_square_scale", 0.0)
    z = torch.where(labels >= 0, square * scaled.logsumexp(-1).square(), 0.0)
    wanted = (
        torch.nn.functional.cross_entropy(scaled, labels, reduction="none", label_smoothing=smoothing) + z
    )
    leaf = logits.clone().requires_grad_()
    losses, z_losses = triton("cross_entropy").cross_entropy_loss(leaf * 1, labels, **options)
    near(losses, wanted.detach(), torch.float32)
    torch.testing.assert_close(z_losses.double(), z.detach(), rtol=1e-5, atol=1e-6)
    dloss = random(50)
    grads = [torch.autograd.grad(x, y, dloss.to(x.dtype))[0] for x, y in ((losses, leaf), (wanted, exact))]
    near(*grads, dtype)
    assert not grads[0][::7].any()
    near(
        CrossEntropyLoss(**options)(logits.clone(), labels),
        wanted.detach().sum() / (labels >= 0).sum(),
        dtype,
    )


@DTYPES
@pytest.mark.parametrize("rms", [False, True])
def test_norms(dtype: torch.dtype, rms: bool) -> None:
    x, residual = random(60, 500, dtype=dtype), random(60, 500)
    weight, bias = random(500), None if rms else random(501)[:500]
    norm = triton("layer_norm")
    got, total = (norm.rms_norm_fn if rms else norm.layer_norm_fn)(
        x, weight, bias, residual=residual, prenorm=True, residual_in_fp32=True
    )
    exact = x.double() + residual.double()
    near(total, exact, torch.float32)
    centred = exact if rms else exact - exact.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    near(got, normed if bias is None else normed + bias.double(), dtype)


def test_padding() -> None:
    x = random(4, 30, 3, 8).requires_grad_()
    mask = torch.rand(4, 30, device=CUDA, generator=torch.Generator(CUDA).manual_seed(0)) < 0.6
    rows, indices, cu_seqlens, max_seqlen, used = unpad_input(x, mask)
    assert torch.equal(rows, x[mask]) and torch.equal(used, mask.sum(1).int())
    assert max_seqlen == int(mask.sum(1).max()) and cu_seqlens.tolist() == [
        0,
        *mask.sum(1).cumsum(0).tolist(),
    ]
    padded = pad_input(rows, indices, 4, 30)
    assert torch.equal(padded, x * mask[..., None, None])
    padded.sum().backward()
    assert torch.equal(x.grad, mask[..., None, None].expand_as(x).float())
