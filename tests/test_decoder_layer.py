"""The ways of the benchmarks compute one thing: on a CPU, by this package's varlen attention in fp64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import decoder_attention
import providers_fa3
import providers_varlen
import run
from cases import Case
from decoder_attention import ATTENTION, Batch
from decoder_layer import Layer, Shape, gradients
from providers import PROVIDERS, Problem
from providers_gather import gathered

from flash_attn import flash_attn_varlen_func

PROMPT, LENS = 21, [9, 1, 14]


def varlen_calls(scale: float):
    """Forward and backward as the GPU's libraries offer them."""

    def run(q, k, v, shape):
        *sizes, causal = shape
        return flash_attn_varlen_func(
            q, k, v, *sizes, causal=causal, softmax_scale=scale, return_attn_probs=True
        )[:2]

    def call(q, k, v, shape):
        with torch.no_grad():
            return run(q, k, v, shape)

    def grad(dout, q, k, v, out, lse, shape):
        """From the whole softmax's out and lse, which for a merged call are not this call's own."""
        own = [x.detach().double().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            part, part_lse = run(*own, shape)
            weight = (lse.double() - part_lse).neg().exp().t().unsqueeze(-1)  # share of the softmax
            delta = (dout * out).sum(-1, keepdim=True)
            loss = (part * weight.detach() * dout).sum()
            delta_part = (dout * part).sum(-1, keepdim=True)
            loss = loss + (part_lse.t().unsqueeze(-1) * (weight * (delta_part - delta)).detach()).sum()
            return [x.to(q.dtype) for x in torch.autograd.grad(loss, own)]

    return call, grad


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    return Layer(Shape(24, 32, 4, 2, 8), "cpu", torch.float64)


WAYS = {
    "ours": ATTENTION["ours"],
    "fa2-replicated": decoder_attention.replicated(varlen_calls),
    "fa2-two-call": decoder_attention.two_call(varlen_calls),
    "gather-varlen": decoder_attention.gather(varlen_calls),
}


@pytest.mark.parametrize("name", WAYS)
def test_every_way_has_the_gradients_of_the_mask(name, layer, monkeypatch):
    monkeypatch.setitem(ATTENTION, name, WAYS[name])
    monkeypatch.setattr(decoder_attention, "_compiled_merge", providers_varlen._merge)
    batches = [Batch.of(provider, PROMPT, LENS, "cpu") for provider in (name, "reference")]
    got, want = (
        gradients(layer, batch, provider, "cpu", torch.float64)
        for batch, provider in zip(batches, (name, "reference"), strict=True)
    )
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


VARLEN_WAYS = {
    "replicated": providers_varlen.replicated, "two-call": providers_varlen.two_call, "gathered": gathered,
}  # fmt: skip


def uncompiled(monkeypatch) -> None:
    monkeypatch.setattr(providers_varlen, "_compiled_merge", providers_varlen._merge)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", VARLEN_WAYS)
def test_ways_made_of_a_varlen_call_agree_with_the_mask(name, ragged, monkeypatch):
    uncompiled(monkeypatch)
    problem = Problem(Case(3, 37, 140, 4, 2, 32, ragged=ragged), device="cpu")
    if ragged and name == "replicated":
        with pytest.raises(NotImplementedError, match="responses of one length"):
            VARLEN_WAYS[name](problem, *varlen_calls(problem.scale))
        return
    got = run.packed(VARLEN_WAYS[name](problem, *varlen_calls(problem.scale)))
    for x, y in zip(got, run.reference(problem), strict=True):
        assert float((x.detach().float() - y).norm() / y.norm()) < run.TOLERANCE


def test_a_library_without_a_backward_has_the_forward_only(monkeypatch):
    """FlashAttention-3 of PyPI: checked and timed in the forward, no row of the backward."""
    uncompiled(monkeypatch)
    monkeypatch.setattr(providers_fa3, "_varlen", lambda scale: (varlen_calls(scale)[0], None))
    problem = Problem(Case(2, 37, 20, 4, 2, 32), device="cpu")
    want = run.reference(problem)[:1]
    for make in providers_fa3.FA3_PROVIDERS.values():
        for x, y in zip(run.packed(make(problem)), want, strict=True):
            assert float((x.float() - y).norm() / y.norm()) < run.TOLERANCE
    monkeypatch.setattr(run, "Problem", lambda case: Problem(case, device="cpu"))
    monkeypatch.setitem(PROVIDERS, "fa3-two-call", providers_fa3.fa3_two_call)
    case = Case(3, 40, 30, 4, 2, 32)
    assert run.what_is_wrong("fa3-two-call", case) is None
    monkeypatch.setitem(PROVIDERS, "fa3-two-call", lambda problem: (lambda: 2 * problem.q, None))
    assert "out is wrong" in str(run.what_is_wrong("fa3-two-call", case))


def test_a_backward_with_a_gradient_less_is_wrong(monkeypatch):
    monkeypatch.setattr(run, "Problem", lambda case: Problem(case, device="cpu"))
    out, *grads = run.reference(run.Problem(Case(3, 300, 200, 4, 2, 32)))
    for kept, wrong in ((3, False), (2, True)):
        pair = (lambda: out, lambda kept=kept: grads[:kept])
        monkeypatch.setitem(PROVIDERS, "fa2-two-call", lambda problem, pair=pair: pair)
        assert bool(run.what_is_wrong("fa2-two-call", Case(3, 40, 30, 4, 2, 32))) == wrong


def test_executed_work_is_that_of_the_layout():
    packed, replicated, padded = (
        Batch.of(name, 100, [10, 30], "cpu") for name in ("ours", "fa2-replicated", "cudnn-padded")
    )
    assert (packed.num_tokens, replicated.num_tokens, padded.num_tokens) == (140, 240, 260)
    assert packed.num_pairs == 100**2 / 2 + 1000 + 50 + 3000 + 450
    assert replicated.num_pairs == 110**2 / 2 + 130**2 / 2 and padded.num_pairs == 130**2
    shape = Shape(8, 16, 2, 1, 4)
    assert shape.flops(packed) == 6.0 * 8 * (2 * 4 * 3 + 48) * 140 + 14 * 2 * 4 * packed.num_pairs
    assert padded.rows[110:130].tolist() == [0] * 20 and padded.rows[100] == 100 and padded.rows[230] == 110
    assert padded.counts.sum() == 140 and replicated.counts.sum() == 140
