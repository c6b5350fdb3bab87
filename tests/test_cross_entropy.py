"""Cross entropy against torch's, one process and a vocabulary split over two."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from flash_attn import _cross_entropy
from flash_attn._cross_entropy import cross_entropy
from flash_attn.losses.cross_entropy import CrossEntropyLoss


def by_torch(x: Tensor, labels: Tensor, smoothing: float, scale: float, z: float) -> Tensor:
    loss = torch.nn.functional.cross_entropy(x * scale, labels, reduction="none", label_smoothing=smoothing)
    return loss + torch.where(labels == -100, 0.0, z * (x * scale).logsumexp(-1).square())


def problem() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return 3 * torch.randn(7, 12, requires_grad=True), torch.tensor([0, 11, -100, 4, 6, -100, 5])


@pytest.mark.parametrize(
    ("smoothing", "scale", "z"), [(0.0, 1.0, 0.0), (0.1, 1.0, 0.0), (0.0, 0.7, 0.0), (0.2, 1.3, 1e-2)]
)
@pytest.mark.parametrize("chunk", [1, 30, 1 << 25])
def test_values_and_gradients(
    smoothing: float, scale: float, z: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cross_entropy, "_CHUNK_ELEMENTS", chunk)
    x, labels = problem()
    losses, z_losses = cross_entropy(x, labels, None, smoothing, scale, z)
    expected = by_torch(x, labels, smoothing, scale, z)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(
        z_losses, expected.detach() - by_torch(x, labels, smoothing, scale, 0.0).detach()
    )
    weight = torch.randn(7)
    grads = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (losses, expected)]
    torch.testing.assert_close(*grads)


def test_a_given_lse_is_used() -> None:
    x, labels = problem()
    lse = (x * 0.5).logsumexp(-1).detach()
    torch.testing.assert_close(
        cross_entropy(x, labels, lse, logit_scale=0.5)[0], by_torch(x, labels, 0.0, 0.5, 0.0)
    )
    other = cross_entropy(x, labels, lse + 1, logit_scale=0.5)[0]
    torch.testing.assert_close(other, by_torch(x, labels, 0.0, 0.5, 0.0) + (labels != -100).float())


def test_a_given_lse_may_be_written_over_before_the_backward() -> None:
    x, labels = problem()
    lse = x.logsumexp(-1).detach()
    losses, _ = cross_entropy(x, labels, lse)
    lse.zero_()
    found, wanted = (torch.autograd.grad(y.sum(), x)[0] for y in (losses, by_torch(x, labels, 0.0, 1.0, 0.0)))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inplace_backward_writes_over_the_logits(dtype: torch.dtype) -> None:
    leaf, labels = problem()
    x = leaf.to(dtype) * 1
    (expected,) = torch.autograd.grad(by_torch(x.float(), labels, 0.0, 1.0, 0.0).sum(), x, retain_graph=True)
    losses, _ = cross_entropy(x, labels, inplace_backward=True)
    (grad,) = torch.autograd.grad(losses.sum(), x)
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(x.detach(), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_module(reduction: str) -> None:
    x, labels = problem()
    ours = CrossEntropyLoss(
        reduction=reduction, label_smoothing=0.1, return_z_loss=True, lse_square_scale=1e-3
    )
    losses, z_losses = ours(x, labels)
    expected = by_torch(x, labels, 0.1, 1.0, 1e-3)
    z_expected = expected - by_torch(x, labels, 0.1, 1.0, 0.0)
    reduce = {"mean": lambda y: y.sum() / 5, "sum": torch.sum, "none": lambda y: y}[reduction]
    torch.testing.assert_close(losses, reduce(expected))
    torch.testing.assert_close(z_losses, reduce(z_expected).detach(), rtol=1e-4, atol=1e-6)


def _rank(rank: int, file: str, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    x, labels = problem()
    share = x.detach()[:, 6 * rank : 6 * rank + 6].clone().requires_grad_()
    losses, z_losses = cross_entropy(share, labels, None, 0.1, 0.7, 1e-2, process_group=dist.group.WORLD)
    (grad,) = torch.autograd.grad((losses * torch.arange(7)).sum(), share)
    torch.save((losses.detach(), z_losses, grad), f"{results}/{rank}.pt")
    dist.destroy_process_group()


def test_vocabulary_over_two_processes(tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    x, labels = problem()
    expected = by_torch(x, labels, 0.1, 0.7, 1e-2)
    (wanted,) = torch.autograd.grad((expected * torch.arange(7)).sum(), x)
    shares = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for losses, _, _ in shares:
        torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(torch.cat([grad for *_, grad in shares], 1), wanted)


def test_labels_of_fewer_bits() -> None:
    x, labels = problem()
    x = torch.cat([x] * 30, 1)
    wanted = cross_entropy(x, labels)[0]
    for dtype in (torch.int32, torch.int16, torch.int8):
        assert torch.equal(cross_entropy(x, labels.to(dtype))[0], wanted)
    assert torch.equal(cross_entropy(x[:2], labels[:2].to(torch.uint8))[0], wanted[:2])


def test_a_second_derivative_is_refused() -> None:
    x, labels = problem()
    with pytest.raises(NotImplementedError, match=r"cross_entropy: double backward .* is not supported"):
        torch.autograd.grad(cross_entropy(x, labels)[0].sum(), x, create_graph=True)


def test_wrong_arguments() -> None:
    x, labels = problem()
    with pytest.raises(
        ValueError, match=r"logits must be \(rows, vocab\) and labels \(rows,\), got \[7, 12\] and \[6\]"
    ):
        cross_entropy(x, labels[:6])
    with pytest.raises(ValueError, match=r"precomputed_lse must be \(rows,\), got \[7, 1\]"):
        cross_entropy(x, labels, x.logsumexp(-1, keepdim=True))
    with pytest.raises(TypeError, match=r"labels must be integers, got torch.float32"):
        cross_entropy(x, labels + 0.5)
    with pytest.raises(TypeError, match=r"logits must be floating point, got torch.int64"):
        cross_entropy(x.detach().long(), labels)
    for wrong in (-1, 12):
        with pytest.raises(ValueError, match=rf"labels must be in \[0, 12\) or -100, got {wrong}"):
            cross_entropy(x, labels.masked_fill(labels == 4, wrong))
    with pytest.raises(ValueError, match='reduction must be "mean", "none" or "sum", got \'max\''):
        CrossEntropyLoss(reduction="max")


def test_extreme_logits_stay_finite() -> None:
    x = torch.tensor([[6e4, -6e4, 0.0], [-math.inf, 0.0, 1.0]], requires_grad=True)
    losses, _ = cross_entropy(x, torch.tensor([1, 2]))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert x.grad is not None and x.grad.isfinite().all()


def test_labels_of_8_bits_are_counted_as_they_stand() -> None:
    x, labels = torch.randn(4, 200), torch.tensor([156, 3, 156, 7])  # 156 is -100 in 8 bits
    expected = torch.nn.functional.cross_entropy(x, labels)
    torch.testing.assert_close(CrossEntropyLoss()(x, labels.to(torch.uint8)), expected)


@pytest.mark.parametrize(
    ("ignore_index", "error", "message"),
    [
        (2**70, ValueError, "ignore_index must be an int of 64 bits, got 1180591620"),
        (1.5, TypeError, "ignore_index must be an int, got float"),
        (None, TypeError, "ignore_index must be an int, got NoneType"),
    ],
)
def test_ignore_index_is_an_int(ignore_index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CrossEntropyLoss(ignore_index=ignore_index)(torch.zeros(2, 3), torch.tensor([0, 1]))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches of the Triton kernels, interpreted, four columns a block."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it when it is imported
        pytest.skip("run by `make kernels`, with TRITON_INTERPRET=1")
    found, take = [], _cross_entropy._kernels

    def counted(logits: Tensor) -> Any:
        found.append("triton" if take(logits) is not None else "torch")
        return take(logits)

    monkeypatch.setattr(_cross_entropy, "_kernels", counted)
    monkeypatch.setattr(_cross_entropy, "_BLOCK", 4)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 4, 11, 16])
@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1, logit_scale=0.7, lse_square_scale=1e-2)])
def test_kernels_equal_pytorch(
    kernels: list[str], dtype: torch.dtype, vocab: int, options: dict[str, float]
) -> None:
    torch.manual_seed(0)
    wide = (3 * torch.randn(5, vocab + 3)).to(dtype)
    labels, weight = torch.tensor([0, vocab - 1, -100, vocab // 2, vocab + 7]), torch.randn(5)
    results = []
    for on_kernels in (True, False):
        x = wide.clone()[:, 2 : vocab + 2].requires_grad_()  # rows of a wider tensor
        with pytest.MonkeyPatch.context() as patch:
            # As on a GPU: a label beyond these columns, as another rank's, is not refused.
            patch.setattr(_cross_entropy.checks, "values_are_read", lambda tensor: False)
            if not on_kernels:
                patch.setattr(_cross_entropy, "_kernels", lambda logits: None)
            losses, z_losses = cross_entropy(x, labels, **options)
            results.append((losses, z_losses, *torch.autograd.grad((losses * weight).sum(), x)))
    assert kernels == ["triton", "triton"]
    tolerance = 2e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def test_kernels_write_gradients_over_the_logits(kernels: list[str]) -> None:
    leaf, labels = problem()
    x = leaf * 1
    (expected,) = torch.autograd.grad(by_torch(x, labels, 0.0, 1.0, 0.0).sum(), x, retain_graph=True)
    (grad,) = torch.autograd.grad(cross_entropy(x, labels, inplace_backward=True)[0].sum(), x)
    torch.testing.assert_close(grad, expected)
    assert grad.data_ptr() == x.data_ptr() and kernels == ["triton", "triton"]


def test_kernels_on_numbers_that_are_none(kernels: list[str]) -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([[-inf] * 6, [0.0, inf, 1, 2, 3, 4], [nan, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, -inf]])
    lse = _cross_entropy._row_sums(x, torch.tensor([0, 0, 1, 5]), 1.0, None, False)[0]
    torch.testing.assert_close(lse, x.logsumexp(-1), equal_nan=True)
    ignored = x.clone().requires_grad_()
    losses, _ = cross_entropy(ignored, torch.full((4,), -100))
    losses.sum().backward()
    assert not losses.any() and ignored.grad is not None and not ignored.grad.any()
    assert kernels == ["triton"] * 3


def test_columns_that_do_not_stand_side_by_side_run_in_pytorch(kernels: list[str]) -> None:
    x, labels = problem()
    turned = x.detach().t().contiguous().t().requires_grad_()
    torch.testing.assert_close(cross_entropy(turned, labels)[0], cross_entropy(x, labels)[0])
    assert kernels == ["torch", "triton"]
