"""The composed backend: its decomposition with exact kernels on the CPU, and the real kernels on a GPU."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from numerics import Case, check, op, run
from test_ops_numerics import DUAL, PACKED, VARLEN, random_case
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flash_attn
from flash_attn import _backend, _composed_calls, composed, reference
from flash_attn.shared_prompt import SharedPromptLayout


def window_of(left: int, right: int, max_k: int, causal: bool) -> tuple[int, int]:
    """FlashAttention-2's reading of a window: an open side becomes max_seqlen_k wide, which is not
    infinite."""
    left, right = (-1 if side >= max_k else side for side in (left, right))
    if causal:
        right = 0
    if left < 0 and right >= 0:
        left = max_k
    if left >= 0 and right < 0:
        right = max_k
    return left, right


def exact_forward(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout_p,
    causal,
    debug,
    *,
    scale,
    window_size_left=-1,
    window_size_right=-1,
):
    """aten's varlen forward, exactly: fp32 inside, +inf as lse of rows without keys, cu_seqlens from row
    0."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and dropout_p == 0.0 and not debug
    assert cu_q[-1] == q.shape[0] and cu_k[-1] == k.shape[0]
    assert max_q >= cu_q.diff().max() and max_k >= cu_k.diff().max() and max_q > 1
    zero = torch.zeros_like(cu_q[1:])
    segments = torch.stack([cu_q[:-1], cu_q[1:], zero, zero, cu_k[:-1], cu_k[1:]], 1)
    out, lse = reference.attention(
        q.float(), k.float(), v.float(), segments=segments, softmax_scale=scale, causal=causal,
        window_size=window_of(window_size_left, window_size_right, max_k, causal),
    )  # fmt: skip
    nothing = torch.empty(0)
    return out.to(q.dtype), lse.masked_fill(lse == -torch.inf, torch.inf), nothing, nothing, nothing


def exact_backward(  # type: ignore[no-untyped-def]
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, causal, rng_state, unused, *, scale,
    window_size_left=-1, window_size_right=-1,
):  # fmt: skip
    """aten's varlen backward, exactly, with whatever out and lse it is given."""
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
    window = window_of(window_size_left, window_size_right, max_k, causal)
    zero = torch.zeros_like(cu_q[1:])
    segments = torch.stack([cu_q[:-1], cu_q[1:], zero, zero, cu_k[:-1], cu_k[1:]], 1)
    mask = reference.segment_mask(segments, q.shape[0], k.shape[0], None, causal, window)
    groups, num_k = q.shape[1] // k.shape[1], k.shape[1]
    qh, doh, oh = (x.float().transpose(0, 1) for x in (q, dout, out))
    kh, vh = (x.float().transpose(0, 1).repeat_interleave(groups, 0) for x in (k, v))
    p = torch.exp((qh @ kh.mT * scale).masked_fill(~mask, -torch.inf) - lse[..., None])
    ds = p * (doh @ vh.mT - (doh * oh).sum(-1, keepdim=True)) * scale
    dq, dk, dv = ds @ kh, ds.mT @ qh, p.mT @ doh
    dk, dv = (x.unflatten(0, (num_k, groups)).sum(1) for x in (dk, dv))
    return tuple(x.transpose(0, 1).to(q.dtype) for x in (dq, dk, dv))


EXACT = composed.Kernels(exact_forward, exact_backward)


class Composed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, k_context, v_context, batch):  # type: ignore[no-untyped-def,override]
        out, lse = composed.forward(q, k, v, k_context, v_context, *batch, kernels=EXACT)
        ctx.save_for_backward(q, k, v, k_context, v_context, out, lse)
        ctx.batch = batch
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def,override]
        grads = composed.backward(dout, dlse, *ctx.saved_tensors, *ctx.batch, kernels=EXACT)
        assert all(g.is_contiguous() for g in grads)
        return (*(grads if ctx.saved_tensors[3] is not None else (*grads[:3], None, None)), None)


def attend(case: Case) -> Any:
    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_context: Tensor | None = None,
        v_context: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
        batch = (
            case.table, None, [], case.total_q, case.total_k, scale, case.causal, *case.window_size,
            case.softcap, False,
        )  # fmt: skip
        out, lse = Composed.apply(q, k, v, k_context, v_context, batch)
        if sinks is not None:
            out = (out * torch.sigmoid(lse - sinks[:, None]).t()[..., None]).to(out.dtype)
        return out, lse

    return call


LAYOUTS = pytest.mark.parametrize("layout", [PACKED, DUAL, VARLEN], ids=["packed", "dual", "varlen"])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"dtype": torch.float16},
    {"with_dlse": True},
    {"sinks": True},
    {"window_size": (5, 0)},
    {"window_size": (40, 3), "causal": False},
    {"window_size": (-1, 2), "causal": False},
    {"window_size": (1000, 1000)},
    {"softmax_scale": 0.5},
]


@LAYOUTS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decomposition_is_exact(layout: dict[str, Any], options: dict[str, Any]) -> None:
    case = Case(**{**layout, "dtype": torch.bfloat16, **options})
    check(case, attend(case))


@pytest.mark.parametrize("window_size", [(0, 1), (2, 1), (1, 2), (0, 3), (-1, 1), (5, 4)])
@pytest.mark.parametrize("context", [0, 1, 2])
def test_right_sides_of_windows_where_rows_outnumber_keys(window_size: tuple[int, int], context: int) -> None:
    """The first rows stand before all keys: a right side longer than these does not reach them all."""
    segments = [(0, 6, 0, context, 0, 1), (6, 8, 0, context, 1, 4)]
    case = Case(
        segments, 8, 4, context or None, dtype=torch.bfloat16, causal=False, window_size=window_size,
        with_dlse=True,
    )  # fmt: skip
    check(case, attend(case))


def test_decomposition_random_sweep() -> None:
    for seed in range(60):
        case = random_case(seed)
        changes = {
            "softcap": 0.0, "head_dim": 16, "head_dim_v": 16,
            "dtype": torch.float16 if case.dtype == torch.float16 else torch.bfloat16,
        }  # fmt: skip
        case = Case(**{name: getattr(case, name) for name in Case.__match_args__} | changes)
        check(case, attend(case))


def test_number_of_calls() -> None:
    """One group: two calls on views. Several: rows are gathered, still two. A cutting window: one. No
    context: one."""
    device = torch.device("cpu")

    def calls(
        prompt_lens: list[int], response_lens: list[list[int]], left: int
    ) -> list[_composed_calls.Part]:
        layout = SharedPromptLayout.from_lengths(
            prompt_lens=prompt_lens, response_lens=response_lens, device="cpu"
        )
        flat = tuple(layout.segments.flatten().tolist())
        return _composed_calls.compose(flat, None, True, (left, -1), device)

    one = calls([9], [[4, 5]], -1)
    assert [type(part.k_rows) for part in one] == [slice, slice] and [part.causal for part in one] == [
        True,
        False,
    ]
    several = calls([9, 5], [[4, 5], [3]], 100)
    assert (
        len(several) == 2 and isinstance(several[1].q_rows, Tensor) and isinstance(several[0].q_rows, slice)
    )
    assert len(calls([9], [[4, 5]], 6)) == 1
    assert len(_composed_calls.compose((0, 5, 0, 0, 0, 5), None, True, (-1, -1), device)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, r"runs float16 and bfloat16, got torch.float32"),
        ({"head_dim": 264}, r"runs head_dim <= 256, got 264"),
        ({"softcap": 5.0}, r"has no softcap: softcap must be 0.0, got 5.0"),
        ({"head_dim": 12}, r"head dims must be equal multiples of 8 here, got 12 and 12"),
    ],
)
def test_refuses_by_name(changes: dict[str, Any], message: str) -> None:
    case = Case(**{**VARLEN, "dtype": torch.bfloat16, **changes})
    with pytest.raises((NotImplementedError, ValueError), match=message):
        attend(case)(**case.tensors)


def test_refuses_dlse_without_room_for_its_columns() -> None:
    case = Case(**VARLEN, dtype=torch.bfloat16, head_dim=256, with_dlse=True)
    with pytest.raises(NotImplementedError, match=r"head_dim <= 248 where lse .* takes a gradient, got 256"):
        run(case, attend(case), torch.bfloat16)


def test_deterministic_setting_is_restored() -> None:
    for before in (False, True):
        torch.use_deterministic_algorithms(before)
        try:
            for wanted in (False, True):
                with composed._determinism(wanted):
                    assert torch.are_deterministic_algorithms_enabled() == (before or wanted)
                assert torch.are_deterministic_algorithms_enabled() == before
        finally:
            torch.use_deterministic_algorithms(False)


def test_table_is_read_once_per_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = torch.tensor([[0, 2, 0, 0, 0, 2]], dtype=torch.int32)
    first = _composed_calls._table(segments, None)
    assert _composed_calls._table(segments, None) is first
    segments[0, 1] = 1
    assert _composed_calls._table(segments, None) == [[0, 1, 0, 0, 0, 2]]


# On a GPU


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_BACKEND", "composed")
    assert flash_attn.backend("cuda") == "composed"


@pytest.mark.gpu
@LAYOUTS
@pytest.mark.parametrize("options", [*OPTIONS, {"head_dim": 72}, {"head_dim": 20, "head_dim_v": 12}], ids=str)
def test_gpu_numerics(on_gpu: None, layout: dict[str, Any], options: dict[str, Any]) -> None:
    case = Case(**{**layout, "dtype": torch.bfloat16, "head_dim": 64, "device": "cuda", **options})
    check(case, op(case, segments_host=case.table))


def long_case(**changes: Any) -> Case:
    """Two groups of a few hundred rows, GQA: enough rows for the norm bound to mean something."""
    segments, row = [], 0
    for prompt, responses in ((700, (130, 1, 257)), (129, (300, 64))):
        begin, row = row, row + prompt
        segments.append([begin, row, begin, row, row, row])
        for response in responses:
            segments.append([row, row + response, begin, begin + prompt, row, row + response])
            row += response
    options = {"num_heads": 8, "num_heads_k": 2, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    return Case(segments, row + 5, row + 5, **{**options, **changes})


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_dim": 256},
        {"with_dlse": True},
        {"sinks": True},
        {"window_size": (300, 0)},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_gpu_long_groups(on_gpu: None, options: dict[str, Any]) -> None:
    case = long_case(**options)
    check(case, op(case, segments_host=case.table))


@pytest.mark.gpu
def test_gpu_random_sweep(on_gpu: None) -> None:
    for seed in range(40):
        case = random_case(seed)
        changes = {
            "softcap": 0.0, "head_dim": random.Random(seed).choice([16, 32, 80]), "head_dim_v": None,
            "device": "cuda",
            "dtype": torch.float16 if case.dtype == torch.float16 else torch.bfloat16,
        }  # fmt: skip
        case = Case(**{name: getattr(case, name) for name in Case.__match_args__} | changes)
        check(case, op(case, segments_host=case.table if seed % 2 == 0 else None))


@pytest.mark.gpu
def test_gpu_opcheck_compile_and_checkpoint(on_gpu: None) -> None:
    case = long_case(head_dim=64)
    table, host = case.table.cuda(), case.table
    tensors = [x.clone().requires_grad_() for x in case.tensors.values()]
    tail = (table, host, [], 700, 300, 0.125, True, -1, -1, 0.0, False)
    torch.library.opcheck(
        torch.ops.flash_attn.fwd.default,
        (*tensors, None, None, *tail),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.flash_attn.fwd(q.sin(), k, v, None, None, *tail)[0].float().square().sum()

    def grads(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        function(*leaves).backward()
        return [x.grad for x in leaves]

    wanted = grads(f)
    others = [torch.compile(f, fullgraph=True, backend="aot_eager")]
    others += [functools.partial(checkpoint, f, use_reentrant=reentrant) for reentrant in (False, True)]
    for other in others:
        for a, b in zip(grads(other), wanted, strict=True):
            # FlashAttention-2 adds dq with atomics: equal up to bf16's rounding of another order.
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_gpu_layouts_cost_no_sync(on_gpu: None) -> None:
    layout = SharedPromptLayout.from_lengths(prompt_lens=[70, 9], response_lens=[[33, 5], [8]], device="cuda")
    q, k, v = (
        torch.randn(layout.num_rows, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (4, 2, 2)
    )
    flash_attn.flash_attn_shared_prompt_func(q, k, v, layout).sum().backward()  # builds what is remembered
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn.flash_attn_shared_prompt_func(q, k, v, layout).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_graphs_keep_what_they_read(on_gpu: None) -> None:
    """Their index tensors are still there after more other tables than are remembered."""

    def layout_of(*prompts: int) -> SharedPromptLayout:
        return SharedPromptLayout.from_lengths(prompts, [[33, 5]] * len(prompts), device="cuda")

    def attend(layout: SharedPromptLayout) -> Tensor:
        return flash_attn.flash_attn_shared_prompt_func(*(x[: layout.num_rows] for x in tensors), layout)

    tensors = [torch.randn(1000, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2)]
    layout = layout_of(70, 9)
    expected = attend(layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(layout)
    for prompt in range(1, 2 * _composed_calls._MOST_COMPOSED):
        attend(layout_of(prompt, 9))
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_gpu_memory_stays_linear(on_gpu: None) -> None:
    """Prompt of 16384 with 8 responses of 512: bf16 scores would take 0.8 GiB per head, 6.3 GiB in all."""
    layout = SharedPromptLayout.from_lengths(prompt_lens=[16384], response_lens=[[512] * 8], device="cuda")
    shapes = [(layout.num_rows, heads, 128) for heads in (8, 2, 2)]
    tensors = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flash_attn.flash_attn_shared_prompt_func(*tensors, layout).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**30


@pytest.mark.gpu
def test_gpu_backend_is_logged_once(on_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    _backend._gpu_backend.cache_clear()
    x = torch.randn(1, 9, 2, 64, device="cuda", dtype=torch.float16)
    with caplog.at_level(logging.INFO, logger="flash_attn"):
        for _ in range(3):
            flash_attn.flash_attn_func(x, x, x)
    assert [r.getMessage() for r in caplog.records] == [
        "flash_attn backend on cuda:0 is composed (FLASH_ATTN_BACKEND=composed)"
    ]
