"""Cross entropy's Triton kernels at a vocabulary of real size, against PyTorch in fp64."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import CUDA

from flash_attn import _cross_entropy
from flash_attn._cross_entropy import cross_entropy

pytest.importorskip("triton")


@pytest.mark.parametrize("vocab", [151936, 50257])  # the second: rows that are not aligned
@pytest.mark.parametrize("inplace", [False, True])
def test_losses_and_gradients(vocab: int, inplace: bool) -> None:
    torch.manual_seed(0)
    x = (4 * torch.randn(300, vocab, device=CUDA)).bfloat16().requires_grad_()
    labels = torch.randint(vocab, (300,), device=CUDA)
    labels[::7] = -100
    weight = torch.randn(300, device=CUDA)
    assert _cross_entropy._kernels(x) is not None
    expected = torch.nn.functional.cross_entropy(x.double() / 0.7, labels, reduction="none")
    (wanted,) = torch.autograd.grad((expected * weight).sum(), x)
    logits = x * 1
    losses, _ = cross_entropy(logits, labels, logit_scale=1 / 0.7, inplace_backward=inplace)
    (grad,) = torch.autograd.grad((losses * weight).sum(), logits)
    torch.testing.assert_close(losses.double(), expected.double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(grad, wanted, rtol=2e-2, atol=1e-6)
    assert (grad.data_ptr() == logits.data_ptr()) == inplace
