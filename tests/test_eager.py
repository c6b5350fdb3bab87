"""Eager calls skip torch.library's wrapper: same values, gradients and refusals; modes still see the op."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn
from flash_attn import _by_tensor, _calls, _checked, _eager, _ops, checks


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
            patch.setattr(_eager, "is_direct", lambda *tensors: False)
        tensors = leaves()
        out, lse, _ = flash_attn.flash_attn_func(*tensors, causal=True, return_attn_probs=True)
        grads = torch.autograd.grad((out * out).sum() + lse.sum(), tensors)
    return [out.detach(), lse.detach(), *grads]


def test_values_and_gradients_are_those_of_the_op(monkeypatch):
    for a, b in zip(results(True, monkeypatch), results(False, monkeypatch), strict=True):
        assert torch.equal(a, b)


def test_the_op_is_not_called_in_plain_eager_mode(monkeypatch):
    calls = []
    run = _ops.forward
    monkeypatch.setattr(_ops, "forward", lambda *args: calls.append(args) or run(*args))
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


def test_a_call_of_a_known_kind_is_not_checked_again_and_others_are(monkeypatch):
    """Equal numbers of other types are other kinds, some of them refused; tensors may change their value."""
    q, k, v = leaves()
    with torch.no_grad():
        known = flash_attn.flash_attn_func(q, k, v, softmax_scale=0.5, causal=True, window_size=(1, 0))
        scale, seen = torch.tensor(0.5), []
        monkeypatch.setattr(checks, "qkv", lambda *args: seen.append(args))
        again = flash_attn.flash_attn_func(q, k, v, softmax_scale=0.5, causal=True, window_size=(1, 0))
        assert torch.equal(known, again) and not seen
        for refused, text in (
            (dict(causal=1.0), "causal must be a bool, got 1.0"),
            (dict(window_size=(1.0, 0)), r"window_size\[0\] must be an int, got float"),
            (dict(deterministic=0.0), "deterministic must be a bool, got 0.0"),
        ):
            with pytest.raises(TypeError, match=text):
                flash_attn.flash_attn_func(
                    q, k, v, softmax_scale=0.5, **{"causal": True, "window_size": (1, 0), **refused}
                )
        for value in (0.5, 0.25):
            scale.fill_(value)
            given, wanted = (flash_attn.flash_attn_func(q, k, v, softmax_scale=s) for s in (scale, value))
            assert torch.equal(given, wanted)
    assert len(seen) == 3 + 2 + 2


def test_kinds_are_told_apart_by_shape_dtype_and_options():
    results = set()
    for heads in (1, 2):
        for dtype in (torch.float32, torch.float64):
            for options in ({}, {"causal": True}, {"softcap": 3.0}, {"window_size": (2, 1)}):
                for _ in range(2):
                    q = torch.linspace(0, 1, 9 * 2 * 16, dtype=dtype).view(1, 9, 2, 16)
                    out = flash_attn.flash_attn_func(q, q[:, :, :heads], q[:, :, :heads], **options)
                    results.add((str(dtype), heads, float(out.double().sum())))
    assert len(results) == 2 * 2 * 4


def test_dense_batches_are_remembered_by_kind_and_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(_calls, "_batches", {})

    def batch(seqlen, **options):
        x = torch.ones(1, seqlen, 1, 8)
        given = dict(softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False)
        call = _checked.checked(x, x, x, 4, 0.0, **given | options)
        return _calls.batch_of_dense(call, x, x)

    assert batch(5) is batch(5) and batch(5) is not batch(5, causal=True)
    here = batch(5)
    assert here.segments is batch(5, causal=True).segments
    with monkeypatch.context() as patch:
        patch.setattr(_calls, "stream_of", lambda device: 7)  # where nothing of ours was written yet
        assert batch(5) is not here and batch(5).segments is not here.segments
    with monkeypatch.context() as patch:
        patch.setattr(_calls, "backend", lambda device: "another")
        assert batch(5) is not here
    with monkeypatch.context() as patch:
        known = len(_calls._batches)
        patch.setattr(_calls, "is_capturing", lambda device: True)
        assert batch(6).segments is not batch(6).segments and len(_calls._batches) == known
    assert batch(5) is here
    for seqlen in range(1, 3 * _calls._MAX_TABLES):
        batch(seqlen)
    assert len(_calls._batches) <= _calls._MAX_TABLES


def test_what_is_remembered_by_a_tensor_goes_with_it():
    known = _by_tensor.ByTensor()
    x, y = torch.zeros(2), torch.zeros(2)
    for value in "ab":
        known.set(x, value)
    assert known.get(x) == "b" and known.get(y) is None and len(known) == 1
    known._known[id(y)] = known._known[id(x)]  # as if y had got a dead tensor's id
    assert known.get(y) is None and known._known.pop(id(y))
    del x
    gc.collect()
    assert len(known) == 0


def test_out_can_be_written_to_where_no_gradient_needs_it():
    """As flash-attn's: the backward, which reads it, says so."""
    tensors = leaves()
    with torch.no_grad():
        flash_attn.flash_attn_func(*tensors).mul_(2)
    out = flash_attn.flash_attn_func(*tensors).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_are_refused_by_name():
    tensors = leaves()
    out = flash_attn.flash_attn_func(*tensors, causal=True)
    (grad,) = torch.autograd.grad((out * out).sum(), tensors[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        grad.sum().backward()
