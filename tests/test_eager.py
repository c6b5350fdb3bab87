"""Eager calls skip torch.library's wrapper: same values, gradients and refusals; modes still see the op."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn
from flash_attn import _eager


class Names(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 9, h, 16, dtype=torch.float64, generator=generator).requires_grad_() for h in (4, 2, 2)
    ]


def results(direct: bool, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    with monkeypatch.context() as patch:
        if not direct:
            patch.setattr(_eager, "_is_direct", lambda tensors: False)
        tensors = leaves()
        out, lse, _ = flash_attn.flash_attn_func(*tensors, causal=True, return_attn_probs=True)
        grads = torch.autograd.grad((out * out).sum() + lse.sum(), tensors)
    return [out.detach(), lse.detach(), *grads]


def test_values_and_gradients_are_those_of_the_op(monkeypatch):
    for a, b in zip(results(True, monkeypatch), results(False, monkeypatch), strict=True):
        assert torch.equal(a, b)


def test_the_op_is_not_called_in_plain_eager_mode(monkeypatch):
    calls = []
    monkeypatch.setattr(_eager, "_FORWARD", {"cpu": lambda *a: calls.append(a) or _eager._ops._fwd_cpu(*a)})
    flash_attn.flash_attn_func(*leaves(), causal=True).sum().backward()
    with torch.no_grad():
        flash_attn.flash_attn_func(*leaves(), causal=True)
    assert len(calls) == 2


def test_modes_see_the_op():
    with Names() as names:
        out = flash_attn.flash_attn_func(*leaves(), causal=True)
        torch.autograd.grad(out.sum(), out)
    assert "flash_attn.fwd.default" in names.seen


def test_only_wanted_gradients_are_returned():
    q, k, v = leaves()
    out = flash_attn.flash_attn_func(q, k.detach(), v, causal=True)
    out.sum().backward()
    assert q.grad is not None and v.grad is not None and k.grad is None


def test_second_derivatives_are_refused_by_name():
    tensors = leaves()
    out = flash_attn.flash_attn_func(*tensors, causal=True)
    (grad,) = torch.autograd.grad((out * out).sum(), tensors[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        grad.sum().backward()
