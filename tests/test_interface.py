"""The public functions against F.scaled_dot_product_attention on replicated batches, and flash-attn's
conventions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numerics import assert_close
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flash_attn
from flash_attn.shared_prompt import SharedPromptLayout


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> Tensor:
    """(Sq, H, D) against (Sk, Hk, D), causal aligned bottom-right; rows without keys give 0."""
    offset = k.shape[0] - q.shape[0]
    mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    if causal:
        mask = mask.tril(offset)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=scale)
    return out[0].transpose(0, 1).masked_fill(~mask.any(1)[:, None, None], 0.0)


def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def assert_same(ours: Tensor, other: Tensor, inputs: list[Tensor]) -> None:
    """Values and all gradients, in fp64."""
    torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-10)
    dout = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, dout), torch.autograd.grad(other, inputs, dout), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(7, 7), (3, 8), (8, 3), (1, 5), (129, 129)])
def test_dense(causal: bool, seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = make((2, seqlen_q, 4, 8), (2, seqlen_k, 2, 8), (2, seqlen_k, 2, 8))
    other = torch.stack([sdpa(*rows, causal) for rows in zip(q, k, v, strict=True)])
    assert_same(flash_attn.flash_attn_func(q, k, v, causal=causal), other, [q, k, v])


@pytest.mark.parametrize("causal", [False, True])
def test_varlen(causal: bool) -> None:
    q_lens, k_lens = [3, 0, 5, 4], [3, 2, 7, 1]
    q, k, v = make((14, 6, 8), (15, 2, 8), (15, 2, 8))  # two rows of padding each
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (q_lens, k_lens))
    out = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 7, causal=causal)
    parts = [
        sdpa(q[cu_q[b] : cu_q[b + 1]], k[cu_k[b] : cu_k[b + 1]], v[cu_k[b] : cu_k[b + 1]], causal)
        for b in (0, 2, 3)
    ]
    assert_same(out, torch.cat([*parts, torch.zeros(2, 6, 8, dtype=torch.float64)]), [q, k, v])


def test_packed_functions_equal_the_separate_ones() -> None:
    qkv = torch.randn(2, 9, 3, 4, 8)
    q, k, v = qkv.unbind(2)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    wanted = flash_attn.flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), wanted)
    torch.testing.assert_close(flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), wanted)
    rows = qkv[0]
    wanted = flash_attn.flash_attn_varlen_func(*rows.unbind(1), cu, cu, 5, 5, causal=True)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(rows, cu, 5, causal=True)
    torch.testing.assert_close(out, wanted)
    out = flash_attn.flash_attn_varlen_kvpacked_func(rows[:, 0], rows[:, 1:], cu, cu, 5, 5, causal=True)
    torch.testing.assert_close(out, wanted)


def replicated(q: Tensor, k: Tensor, v: Tensor, layout: SharedPromptLayout) -> Tensor:
    """Every segment with its own copy of the context; gradients of the copies add up by indexing."""
    outs = []
    for q_begin, q_end, context_begin, context_end, k_begin, k_end in layout.segments.tolist():
        rows = torch.cat([torch.arange(context_begin, context_end), torch.arange(k_begin, k_end)])
        if q_end > q_begin:
            outs.append(sdpa(q[q_begin:q_end], k[rows], v[rows], True))
    return torch.cat([*outs, q.new_zeros(q.shape[0] - layout.total, *outs[0].shape[1:])])


@pytest.mark.parametrize("boundary", ["fork", "shared"])
@pytest.mark.parametrize(
    ("prompt_lens", "response_lens", "padding"),
    [
        ([6], [[3, 5, 1]], 0),
        ([7, 3, 12], [[4, 0, 2], [0], [1, 1, 9, 3]], 0),
        ([1, 2], [[3], [0, 0]], 4),
    ],
)
def test_shared_prompt_equals_the_replicated_batch(
    boundary: str, prompt_lens: list[int], response_lens: list[list[int]], padding: int
) -> None:
    layout = SharedPromptLayout.from_lengths(
        prompt_lens=prompt_lens, response_lens=response_lens, device="cpu", boundary=boundary
    )
    rows = layout.num_rows + padding
    q, k, v = make((rows, 6, 8), (rows, 2, 8), (rows, 2, 5))
    out = flash_attn.flash_attn_shared_prompt_func(q, k, v, layout)
    assert_same(out, replicated(q, k, v, layout), [q, k, v])
    assert not out[layout.total :].any()


@pytest.mark.parametrize("causal", [False, True])
def test_dualkv_equals_the_replicated_batch(causal: bool) -> None:
    """Sequence 0 brings the context's own queries; others have fewer, more, and no decoded keys."""
    context, q_lens, k_lens = 6, [9, 2, 4, 3], [3, 4, 2, 0]
    q, k_context, v_context, k, v = make((18, 4, 8), (6, 2, 8), (6, 2, 8), (9, 2, 8), (9, 2, 8))
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (q_lens, k_lens))
    outs = []
    for b in range(4):
        keys, values = (torch.cat([c, x[cu_k[b] : cu_k[b + 1]]]) for c, x in ((k_context, k), (v_context, v)))
        outs.append(sdpa(q[cu_q[b] : cu_q[b + 1]], keys, values, causal))
    out, lse = flash_attn.flash_attn_dualkv_varlen_func(
        q, k_context, v_context, k, v, cu_q, cu_k, 9, context, 4, causal=causal, return_softmax_lse=True
    )
    assert lse.shape == (4, 18)
    assert_same(out, torch.cat(outs), [q, k_context, v_context, k, v])


def test_positional_dualkv_call() -> None:
    """The published call, its twelve arguments by position."""
    q, context, k = (torch.randn(n, 2, 8) for n in (4, 3, 4))
    cu = torch.tensor([0, 4], dtype=torch.int32)
    out = flash_attn.flash_attn_dualkv_varlen_func(q, context, context, k, k, cu, cu, 4, 3, 4, 0.3, True)
    keys = torch.cat([context, k])
    torch.testing.assert_close(out, sdpa(q, keys, keys, True, 0.3))


def test_sinks() -> None:
    """One more key per head with logit sink and value 0, once per row; dsink = -sum p_sink (dout . out)."""
    layout = SharedPromptLayout.from_lengths(prompt_lens=[5], response_lens=[[3, 2]], device="cpu")
    rows = layout.num_rows + 1
    q, k, v, sinks = make((rows, 4, 8), (rows, 2, 8), (rows, 2, 8), (4,))
    out, lse = flash_attn.flash_attn_shared_prompt_func(q, k, v, layout, sinks=sinks, return_softmax_lse=True)
    plain = flash_attn.flash_attn_shared_prompt_func(q, k, v, layout)
    outs = []
    for q_begin, q_end, context_begin, context_end, k_begin, k_end in layout.segments.tolist():
        keys = torch.cat([torch.arange(context_begin, context_end), torch.arange(k_begin, k_end)])
        scores = torch.einsum("qhd,khd->hqk", q[q_begin:q_end], k[keys].repeat_interleave(2, 1)) * 8**-0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(keys) - (q_end - q_begin))
        scores = scores.masked_fill(~seen, -torch.inf)
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q_end - q_begin, 1)], -1)
        outs.append(
            torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], v[keys].repeat_interleave(2, 1))
        )
    other = torch.cat([*outs, torch.zeros(1, 4, 8, dtype=torch.float64)])
    dout = torch.randn_like(out)
    (dsink,) = torch.autograd.grad(out, sinks, dout, retain_graph=True)
    assert_same(out, other, [q, k, v, sinks])
    p_sink = torch.sigmoid(sinks[:, None] - lse)[:, :-1]
    torch.testing.assert_close(dsink, -(p_sink * (dout * out)[:-1].sum(-1).t()).sum(1))
    assert not torch.allclose(out, plain)


@pytest.mark.parametrize("sink", [-torch.inf, torch.inf, 0.5])
def test_sinks_and_rows_without_keys(sink: float) -> None:
    """Rows without keys and behind the last sequence are 0 under any sink, and what their dout holds reaches
    nothing."""
    q, k, v = make((8, 2, 8), (3, 2, 8), (3, 2, 8))
    sinks = torch.full((2,), sink, dtype=torch.float64, requires_grad=True)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 6], [0, 3, 3]))
    none = q.new_zeros(0, 2, 8)

    def call(sinks: Tensor | None) -> Tensor:
        return flash_attn.flash_attn_dualkv_varlen_func(
            q, none, none, k, v, cu_q, cu_k, 3, 0, 3, causal=True, sinks=sinks
        )

    out = call(sinks)
    assert not out[3:].any()
    if sink == torch.inf:
        assert not out.any()
    if sink == -torch.inf:
        torch.testing.assert_close(out, call(None))
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(out, [q, k, v, sinks], dout, retain_graph=True)
    assert all(x.isfinite().all() for x in wanted) and bool(wanted[3].any()) == (sink == 0.5)
    dout[3:] = torch.nan
    for got, want in zip(torch.autograd.grad(out, [q, k, v, sinks], dout), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_lse_layouts_and_extra_outputs() -> None:
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8)
    out, lse, dmask = flash_attn.flash_attn_func(q, k, k, return_attn_probs=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 8**-0.5
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32 and lse.is_contiguous()
    assert dmask.numel() == 0
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, flash_attn.flash_attn_func(q, k, k))
    cu = torch.tensor([0, 5], dtype=torch.int32)
    result = flash_attn.flash_attn_varlen_func(q[0], k[0, :5], k[0, :5], cu, cu, 5, 5, return_attn_probs=True)
    assert isinstance(result, tuple) and result[1].shape == (4, 5) and result[2].numel() == 0


def test_default_scale_is_that_of_the_given_head_dim() -> None:
    q, k, v = torch.randn(1, 4, 2, 9), torch.randn(1, 4, 2, 9), torch.randn(1, 4, 2, 6)
    out = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert out.shape == (1, 4, 2, 6)
    torch.testing.assert_close(out[0], sdpa(q[0], k[0], v[0], True, 9**-0.5))


def test_window_and_softcap_reach_every_function() -> None:
    q = torch.randn(1, 12, 2, 8) * 3
    cu = torch.tensor([0, 12], dtype=torch.int32)
    options: dict[str, Any] = {"causal": True, "window_size": (4, 0), "softcap": 2.0, "softmax_scale": 0.7}
    wanted = flash_attn.flash_attn_func(q, q, q, **options)
    assert not torch.allclose(wanted, flash_attn.flash_attn_func(q, q, q, **{**options, "softcap": 0.0}))
    scores = 2.0 * torch.tanh(torch.einsum("qhd,khd->hqk", q[0], q[0]) * 0.7 / 2.0)
    seen = torch.ones(12, 12, dtype=torch.bool).tril().triu(-4)
    other = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), q[0])
    torch.testing.assert_close(wanted[0], other)
    r = q[0]
    torch.testing.assert_close(flash_attn.flash_attn_varlen_func(r, r, r, cu, cu, 12, 12, **options), other)
    none = torch.tensor([0, 0], dtype=torch.int32)
    out = flash_attn.flash_attn_dualkv_varlen_func(r, r, r, r[:0], r[:0], cu, none, 12, 12, 0, **options)
    torch.testing.assert_close(out, other)
    layout = SharedPromptLayout.from_lengths(
        prompt_lens=[8], response_lens=[[4]], device="cpu", boundary="shared"
    )
    del options["causal"]
    torch.testing.assert_close(flash_attn.flash_attn_shared_prompt_func(r, r, r, layout, **options), other)


def test_window_as_a_tensor() -> None:
    q = torch.randn(1, 9, 2, 8)
    want = flash_attn.flash_attn_func(q, q, q, window_size=(2, 1))
    assert torch.equal(flash_attn.flash_attn_func(q, q, q, window_size=torch.tensor([2, 1])), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_by_the_rule(dtype: torch.dtype) -> None:
    inputs = make((40, 4, 16), (40, 2, 16), (40, 2, 16), dtype=dtype)
    layout = SharedPromptLayout.from_lengths(
        prompt_lens=[20], response_lens=[[9, 10]], device="cpu", boundary="shared"
    )
    out = flash_attn.flash_attn_shared_prompt_func(*inputs, layout)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ref, low = replicated(*exact, layout), replicated(*inputs, layout)
    dout = torch.randn_like(out)
    results = [
        torch.autograd.grad(o, i, dout.to(o.dtype)) for o, i in ((out, inputs), (low, inputs), (ref, exact))
    ]
    for x, y, z in zip((out, *results[0]), (low, *results[1]), (ref, *results[2]), strict=True):
        assert x.dtype == dtype
        assert_close("result", x, y, z)


def test_autocast_runs_in_its_dtype_and_keeps_fp32_gradients() -> None:
    q, k, v = make((1, 6, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8), dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn.flash_attn_func(q, k, v, causal=True)
        mixed = flash_attn.flash_attn_func(q.bfloat16(), k, v, causal=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, mixed)
    torch.testing.assert_close(
        out, flash_attn.flash_attn_func(*(x.bfloat16() for x in (q, k, v)), causal=True)
    )
    (dq,) = torch.autograd.grad(out.float().square().sum(), q)
    assert dq.dtype == torch.float32 and dq.any()


def test_autocast_does_not_round_inside_the_op() -> None:
    """fp64 stays fp64: nothing within the op's own products is cast."""
    q, k, v = make((1, 6, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn.flash_attn_func(q, k, v, softcap=3.0)
        (dq,) = torch.autograd.grad(out.sum(), q)
    torch.testing.assert_close(out, flash_attn.flash_attn_func(q, k, v, softcap=3.0), rtol=0, atol=0)
    torch.testing.assert_close(
        dq, torch.autograd.grad(flash_attn.flash_attn_func(q, k, v, softcap=3.0).sum(), q)[0]
    )


def test_compiled_functions() -> None:
    torch._dynamo.reset()
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    layout = SharedPromptLayout.from_lengths(
        prompt_lens=[3], response_lens=[[4]], device="cpu", boundary="shared"
    )

    def f(x: Tensor, cu: Tensor) -> Tensor:
        a = flash_attn.flash_attn_func(x[None], x[None], x[None], causal=True)
        b = flash_attn.flash_attn_varlen_func(x, x, x, cu, cu, 4, 4, causal=True, window_size=(2, 0))
        c = flash_attn.flash_attn_dualkv_varlen_func(x, x, x, x, x, cu, cu, 4, 5, 4, causal=True)
        d = flash_attn.flash_attn_shared_prompt_func(x, x, x, layout, sinks=x[0, :, 0])
        return (a[0] + b * c + d).sin()

    x = torch.randn(7, 2, 8, requires_grad=True)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, cu), f(x, cu))
    grads = [torch.autograd.grad(g(x, cu).sum(), x)[0] for g in (compiled, f)]
    torch.testing.assert_close(*grads)


def test_segments_are_remembered_until_cu_seqlens_change() -> None:
    """Also across inference mode: what was built there must be good for a later call with gradients."""
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    x = torch.randn(7, 2, 8, requires_grad=True)
    with torch.inference_mode():
        first = flash_attn.flash_attn_varlen_func(x, x, x, cu, cu, 7, 7)
    out = flash_attn.flash_attn_varlen_func(x, x, x, cu, cu, 7, 7)
    out.sum().backward()
    torch.testing.assert_close(out, first)
    cu[1] = 5
    fresh = torch.tensor([0, 5, 7], dtype=torch.int32)
    wanted = flash_attn.flash_attn_varlen_func(x, x, x, fresh, fresh, 7, 7)
    torch.testing.assert_close(flash_attn.flash_attn_varlen_func(x, x, x, cu, cu, 7, 7), wanted)
    assert not torch.allclose(out, wanted)


@pytest.mark.parametrize("behind", ["data", "numpy"])
def test_cu_seqlens_may_change_behind_the_version_counter(behind: str) -> None:
    values = np.array([0, 3, 7], dtype=np.int32)
    cu = torch.from_numpy(values) if behind == "numpy" else torch.tensor([0, 3, 7], dtype=torch.int32)
    x = torch.randn(7, 2, 8)
    before = flash_attn.flash_attn_varlen_func(x, x, x, cu, cu, 7, 7)
    version = cu._version
    if behind == "numpy":
        values[1] = 5
    else:
        cu.data[1] = 5
    assert cu._version == version and cu.tolist() == [0, 5, 7]
    fresh = torch.tensor([0, 5, 7], dtype=torch.int32)
    after = flash_attn.flash_attn_varlen_func(x, x, x, cu, cu, 7, 7)
    torch.testing.assert_close(after, flash_attn.flash_attn_varlen_func(x, x, x, fresh, fresh, 7, 7))
    assert not torch.allclose(before, after)


TAIL = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
DUAL_TAIL = {
    "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "sinks": None,
    "deterministic": False, "return_softmax_lse": False,
}  # fmt: skip
CACHE_TAIL = {
    "k": None, "v": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None,
    "cache_batch_idx": None, "cache_leftpad": None, "block_table": None, "softmax_scale": None,
    "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True,
    "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip
SIGNATURES: list[tuple[Callable[..., Any], str, dict[str, Any]]] = [
    (flash_attn.flash_attn_func, "q k v", TAIL),
    (flash_attn.flash_attn_qkvpacked_func, "qkv", TAIL),
    (flash_attn.flash_attn_kvpacked_func, "q kv", TAIL),
    (
        flash_attn.flash_attn_varlen_func,
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        {**TAIL, "block_table": None},
    ),
    (
        flash_attn.flash_attn_varlen_kvpacked_func,
        "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        TAIL,
    ),
    (flash_attn.flash_attn_varlen_qkvpacked_func, "qkv cu_seqlens max_seqlen", TAIL),
    (flash_attn.flash_attn_with_kvcache, "q k_cache v_cache", CACHE_TAIL),
    (
        flash_attn.flash_attn_dualkv_varlen_func,
        "q k_context v_context k_decoded v_decoded cu_seqlens_q cu_seqlens_k_decoded max_seqlen_q "
        "context_seqlen max_seqlen_k_decoded",
        DUAL_TAIL,
    ),
    (
        flash_attn.flash_attn_shared_prompt_func,
        "q k v layout",
        {name: default for name, default in DUAL_TAIL.items() if name != "causal"},
    ),
]


@pytest.mark.parametrize(
    ("function", "required", "tail"), SIGNATURES, ids=lambda x: getattr(x, "__name__", "")
)
def test_signatures(function: Callable[..., Any], required: str, tail: dict[str, Any]) -> None:
    """Names, order and defaults as libraries read them; plain functions, also in the interface module."""
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [*required.split(), *tail]
    assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == tail
    assert inspect.isfunction(function)
    assert getattr(flash_attn.flash_attn_interface, function.__name__) is function


def test_strided_inputs_and_expanded_gradients() -> None:
    x = torch.randn(2, 4, 2, 6, 8)  # heads before rows, q and k side by side
    q, k = (x[:, :, i].transpose(1, 2) for i in range(2))
    last = torch.randn(2, 6, 8, 4).transpose(2, 3).requires_grad_()  # last stride is not 1
    out = flash_attn.flash_attn_func(q, k, last)
    torch.testing.assert_close(out, flash_attn.flash_attn_func(*(t.contiguous() for t in (q, k, last))))
    out.sum().backward()
    assert last.grad is not None
    torch.testing.assert_close(last.grad.sum(), torch.tensor(float(out.numel())))
