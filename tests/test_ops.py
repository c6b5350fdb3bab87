"""The ops as torch sees them: schema, fakes, autograd, compile, checkpointing, and what they refuse."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from flash_attn import _calls, _ops, reference
from flash_attn.shared_prompt import SharedPromptLayout

ROOT = Path(_ops.__file__).parents[1]
OPTIONS = (7, 7, 0.3, True, -1, -1, 0.0, False)
TABLES = {
    True: [[0, 5, 0, 5, 0, 5], [5, 12, 0, 5, 5, 12]],  # contexts in tensors of their own
    False: [[0, 5, 0, 5, 5, 5], [5, 12, 0, 5, 5, 12]],  # contexts are rows of k
}


def op_args(context: bool, dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> tuple[Any, ...]:
    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, requires_grad=requires_grad)

    extra = (make(5, 2, 8), make(5, 2, 6)) if context else (None, None)
    segments = torch.tensor(TABLES[context], dtype=torch.int32)
    return (make(13, 4, 8), make(13, 2, 8), make(13, 2, 6), *extra, segments, None, [], *OPTIONS)


@pytest.mark.parametrize("context", [False, True])
def test_opcheck(context: bool) -> None:
    torch.library.opcheck(torch.ops.flash_attn.fwd.default, op_args(context))
    args = op_args(context, requires_grad=False)
    out, lse = torch.ops.flash_attn.fwd(*args)
    saved = (torch.randn_like(out), torch.randn_like(lse), *args[:5], out, lse, *args[5:])
    torch.library.opcheck(torch.ops.flash_attn.bwd.default, saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fake_outputs_have_the_real_shapes_strides_and_dtypes(dtype: torch.dtype) -> None:
    segments = torch.tensor([[0, 5, 0, 0, 0, 4], [5, 9, 0, 0, 4, 7]], dtype=torch.int32)
    real = [
        torch.randn(4, 11, 8).to(dtype).transpose(0, 1),  # heads outside: not contiguous
        torch.randn(9, 2, 3, 8).to(dtype)[:, :, 1],
        torch.randn(9, 2, 12).to(dtype)[..., :6],
    ]
    rest = (None, None, segments, None, [], *OPTIONS)

    def results(q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...]) -> list[Tensor]:
        out, lse = torch.ops.flash_attn.fwd(q, k, v, *rest)
        return [out, lse, *torch.ops.flash_attn.bwd(out, lse, q, k, v, None, None, out, lse, *rest[2:])]

    expected = results(*real, rest)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in real]
        got = results(*fakes, (None, None, mode.from_tensor(segments), *rest[3:]))
    assert [(x.shape, x.stride(), x.dtype) for x in got] == [(x.shape, x.stride(), x.dtype) for x in expected]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 3 * 16)

    def forward(self, x: Tensor, segments: Tensor, max_q: int, max_k: int) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(1)
        args = (q, k, v, None, None, segments, None, [], max_q, max_k, 0.3, True, -1, -1, 0.0, False)
        return torch.ops.flash_attn.fwd(*args)[0].flatten(1).sin()


def test_compiled_layer_runs_five_layouts_with_at_most_one_recompile() -> None:
    torch._dynamo.reset()
    layer = Layer()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    shapes: list[tuple[list[int], list[list[int]]]] = [
        ([5], [[2, 3]]), ([7, 3], [[1, 4, 2], [6]]), ([9], [[5] * 4]), ([2, 2, 2], [[1], [2], [3]]),
        ([30], [[11, 13]]),
    ]  # fmt: skip
    for prompt_lens, response_lens in shapes:
        layout = SharedPromptLayout.from_lengths(
            prompt_lens=prompt_lens, response_lens=response_lens, device="cpu"
        )
        x = torch.randn(layout.num_rows, 16, requires_grad=True)
        grads = []
        for module in (compiled, layer):
            out = module(x, layout.segments, layout.max_seqlen_q, layout.max_seqlen_k)
            grads.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count <= 2, f"{counter.frame_count} compilations for 5 layouts"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(use_reentrant: bool) -> None:
    layer, segments = Layer(), torch.tensor([[0, 4, 0, 4, 4, 4], [4, 9, 0, 4, 4, 9]], dtype=torch.int32)
    x = torch.randn(9, 16, requires_grad=True)
    wanted = torch.autograd.grad(layer(x, segments, 5, 5).square().sum(), [x, *layer.parameters()])
    out = checkpoint(layer, x, segments, 5, 5, use_reentrant=use_reentrant)
    out.square().sum().backward()
    for a, b in zip([x, *layer.parameters()], wanted, strict=True):
        torch.testing.assert_close(a.grad, b, rtol=0, atol=0)


def test_double_backward_is_refused_by_name() -> None:
    args = op_args(False)
    out, _ = torch.ops.flash_attn.fwd(*args)
    (dq,) = torch.autograd.grad(out.sum(), args[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"double backward .* is not supported"):
        torch.autograd.grad(dq.sum(), args[0])


def test_any_subset_of_inputs_may_require_gradients() -> None:
    base = op_args(True, requires_grad=False)
    everything = [x.clone().requires_grad_() for x in base[:5]]
    wanted = torch.autograd.grad(torch.ops.flash_attn.fwd(*everything, *base[5:])[0].sum(), everything)
    for subset in itertools.product([False, True], repeat=5):
        tensors = [x.clone().requires_grad_(needed) for x, needed in zip(base[:5], subset, strict=True)]
        out, _ = torch.ops.flash_attn.fwd(*tensors, *base[5:])
        assert out.requires_grad == any(subset)
        if any(subset):
            out.sum().backward()
        for x, needed, grad in zip(tensors, subset, wanted, strict=True):
            assert (x.grad is not None) == needed
            if needed:
                torch.testing.assert_close(x.grad, grad, rtol=0, atol=0)


def test_gradient_through_lse_alone() -> None:
    """dlse only, no dout: d lse / d q is the mean key under the softmax."""
    args = op_args(False)
    _, lse = torch.ops.flash_attn.fwd(*args)
    weights = torch.randn_like(lse)
    seen = lse.isfinite()
    got = torch.autograd.grad((lse.masked_fill(~seen, 0.0) * weights).sum(), args[:3], allow_unused=True)
    q, k, v = args[:3]
    _, ref_lse = reference.attention(q, k, v, segments=args[5], softmax_scale=0.3, causal=True)
    ref = torch.autograd.grad((ref_lse.masked_fill(~seen, 0.0) * weights).sum(), [q, k])
    torch.testing.assert_close(got[0], ref[0])
    torch.testing.assert_close(got[1], ref[1])
    assert got[2] is None or not got[2].any()


def test_gradcheck() -> None:
    args = op_args(True)

    def f(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.flash_attn.fwd(*tensors, *args[5:])
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(f, args[:5], fast_mode=True)


def test_lse_that_requires_no_gradient_costs_no_dlse(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    args = op_args(False)
    out, _ = torch.ops.flash_attn.fwd(*args)
    from flash_attn import cpu

    real = cpu.backward
    monkeypatch.setattr(cpu, "backward", lambda *a: seen.append(a[1]) or real(*a))
    out.sum().backward()
    assert seen == [None]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[1, 5, 0, 0, 0, 5]], r"segments\[0\] must start at q row 0"),
        ([[0, 5, 0, 0, 0, 5], [6, 7, 0, 0, 5, 6]], r"segments\[1\] must start at q row 5"),
        ([[0, 14, 0, 0, 0, 5]], r"segments\[0\] must end within the 13 rows of q"),
        ([[0, 5, 0, 0, 0, 14]], r"segments\[0\] must have ordered keys within the 13 rows of k"),
        ([[0, 5, 0, 0, 3, 5], [5, 6, 0, 0, 4, 6]], r"segments\[1\] must have ordered keys"),
        ([[0, 5, 3, 2, 0, 5]], r"segments\[0\] must have its context within 13 rows"),
        ([[0, 5, 0, 99, 0, 5]], r"segments\[0\] must have its context within 13 rows"),
        ([[0, 5, 0, 4, 3, 5]], r"segments\[0\] must not have context rows among its own keys"),
    ],
)
def test_wrong_segments_are_refused(table: list[list[int]], message: str) -> None:
    args = list(op_args(False))
    args[5] = torch.tensor(table, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        torch.ops.flash_attn.fwd(*args)


@pytest.mark.parametrize("context", [False, True])
def test_ops_without_a_plan_build_one_from_their_own_arguments(
    context: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    args = op_args(context, torch.float32, requires_grad=False)
    args = (*args[:8], 7, 6, 0.3, True, 4, 0, 0.0, False)
    out, lse = torch.ops.flash_attn.fwd(*args)
    saved = (out, None, *args[:5], out, lse, *args[5:])
    monkeypatch.setattr(_ops, "plan_tables", lambda *a, **k: calls.append((a, k)) or ["plan"])
    monkeypatch.setattr(_ops, "is_capturing", lambda device: True)  # nothing is remembered
    ran: list[Any] = []
    monkeypatch.setattr(_ops, "forward", lambda *a: ran.append(a))
    monkeypatch.setattr(_ops, "backward", lambda *a: ran.append(a))
    for op, given, tensors in ((_ops._fwd, args, 5), (_ops._bwd, saved, 9)):
        op(*given)
        *got, batch = ran.pop()
        assert all(x is y for x, y in zip(got, given[:tensors], strict=True))
        assert batch == (*args[5:7], ["plan"], *args[8:])
        positional, named = calls.pop()
        assert positional[0] is args[5] and positional[1:] == (13, 13, *((5, 5) if context else (None, 0)))
        assert named == {
            "num_heads_k": 2, "head_dim": 8, "dtype": torch.float32, "causal": True, "window_size": (4, 0),
            "separate": False,
        }  # fmt: skip
        op(*given[:tensors], *batch)
        assert ran.pop()[-1] == batch and not calls


def test_outputs_of_narrow_values_lie_in_memory_as_the_fake_says() -> None:
    """One kernel call covers all rows here; compiled graphs rely on the strides of the fake."""
    q, v = torch.randn(5, 2, 8), torch.randn(5, 2, 6)
    segments = torch.tensor([[0, 5, 0, 0, 0, 5]], dtype=torch.int32)
    args = (q, q, v, None, None, segments, None, [], 5, 5, 0.3, True, -1, -1, 0.0, False)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        expected = torch.ops.flash_attn.fwd(*args)
    for x, fake in zip(torch.ops.flash_attn.fwd(*args), expected, strict=True):
        assert x.stride() == fake.stride() and x.shape == fake.shape


@pytest.mark.parametrize("inference", [False, True])
def test_plans_are_remembered_as_long_as_their_segments_stay_as_they_are(
    inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inference tensors cannot tell a change in place, so nothing is remembered by them."""
    built: list[list[int]] = []
    monkeypatch.setattr(
        _ops, "plan_tables", lambda segments, *a, **k: built.append(segments[0].tolist()) or [0]
    )
    args = op_args(False, torch.float32, requires_grad=False)
    with torch.inference_mode(inference):
        segments = args[5].clone()
        args = (*args[:5], segments, *args[6:])
        batch = _ops.Batch(*args[5:])
        for _ in range(2):
            _ops.planned(batch, *args[:2], None)
        segments[0, 1] -= 1
        _ops.planned(batch, *args[:2], None)
    after = segments[0].tolist()
    before = [after[0], after[1] + 1, *after[2:]]
    assert built == ([before, before, after] if inference else [before, after])


def test_graphs_read_the_plans_of_segments_that_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are built again at each replay, and what is built during capture is not remembered."""
    built: list[bool] = []
    capturing = False
    monkeypatch.setattr(_ops, "plan_tables", lambda *a, **k: built.append(capturing) or [len(built)])
    monkeypatch.setattr(_ops, "is_capturing", lambda device: capturing)
    args = op_args(False, torch.float32, requires_grad=False)

    def plan(segments: torch.Tensor, causal: bool = True) -> list[Any]:
        return _ops.remembered_plan(segments, args[0], args[1], None, causal, (-1, -1))

    constant, other = args[5].clone(), args[5].clone()
    _ops.never_changes(constant)
    before = plan(constant), plan(other)
    capturing = True
    assert plan(constant) is before[0] and plan(other) is not before[1]
    assert plan(constant, causal=False) is not plan(constant, causal=False)
    assert built == [False, False, True, True, True]
    capturing = False
    assert plan(constant) is before[0] and plan(other) is before[1]
    plan(constant, causal=False)
    assert built[5:] == [False]


def test_graphs_keep_the_tables_that_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each shape, however often that is captured and forgotten; what no graph reads is not kept."""
    capturing = False
    monkeypatch.setattr(_calls, "is_capturing", lambda device: capturing)
    monkeypatch.setattr(_calls, "_tables", OrderedDict())
    monkeypatch.setattr(_calls, "_in_graphs", {})

    def table(seqlen: int) -> torch.Tensor:
        return _calls.segments_of_dense(2, seqlen, seqlen, torch.empty(0))[0]

    first = table(100)
    for _ in range(3):
        capturing = True
        assert table(100) is first
        assert table(99) is not table(99)  # made by the graph itself
        capturing = False
        for seqlen in range(1, _calls._MAX_TABLES + 1):
            table(seqlen)
        assert all(x[0] is not first for x in _calls._tables.values())
        assert [x[0] is first for x in _calls._in_graphs.values()] == [True]
        assert table(100) is first


def test_plans_of_changed_segments_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ops, "plan_tables", lambda *a, **k: [0])
    args = op_args(False, torch.float32, requires_grad=False)
    for _ in range(3):
        args[5].add_(0)
        for causal in (True, False):
            _ops.remembered_plan(args[5], args[0], args[1], None, causal, (-1, -1))
        plans = _ops._plans.get(args[5])
        assert plans is not None and plans.version == args[5]._version and len(plans.kinds) == 2


def test_plan_of_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(_ops, "plan_tables", lambda *a, **k: calls.append((a, k)) or [])
    layout = SharedPromptLayout.from_lengths(prompt_lens=[5, 3], response_lens=[[2], [4]], device="cpu")
    layout.plan(head_dim=64, num_heads_k=2, dtype=torch.bfloat16, window_size=(9, 0))
    ((positional, named),) = calls
    assert positional[0] is layout.segments
    assert positional[1:] == (layout.num_rows, layout.num_rows, None, 8)
    assert named["window_size"] == (9, 0) and named["causal"] and named["num_heads_k"] == 2


def test_a_second_copy_is_refused_with_both_reasons() -> None:
    spec = importlib.util.spec_from_file_location("second_copy", _ops.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"torch.ops.flash_attn.fwd is already defined .* Import only one"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


PROGRAM = """
import torch
upstream = torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def f(x: torch.Tensor) -> torch.Tensor: return x.clone()
{before}
import flash_attn
assert not torch.ops.loaded_libraries, torch.ops.loaded_libraries
{after}
x = torch.randn(1, 3, 2, 8)
assert flash_attn.flash_attn_func(x, x, x).shape == x.shape
assert torch.ops.flash_attn._flash_attn_forward(x).equal(x)
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_shares_the_namespace_with_flash_attn_in_both_orders(order: str) -> None:
    """Upstream's own ops in one process with ours; importing loads no library."""
    program = PROGRAM.format(**{"before": "", "after": "", order: "upstream(f)"})
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)
