"""Shared prompts against the replicated batch, determinism, error growth, graphs, streams, compile."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import CUDA, attend_segments, shared_case
from numerics import Case, assert_close, run
from torch import Tensor

import flash_attn
from flash_attn import _ops, reference
from flash_attn.shared_prompt import SharedPromptLayout


def replicated(case: Case, prompt: int, responses: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Every response with its own copy of the prompt, through F.scaled_dot_product_attention."""
    leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in case.tensors.items()}
    outs, at = [], prompt
    for index, length in enumerate(responses):
        rows = torch.cat([torch.arange(prompt), torch.arange(at, at + length)]).to(CUDA)
        q, k, v = (leaves[n][rows].transpose(0, 1)[None] for n in ("q", "k", "v"))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
        outs.append(out if index == 0 else out[prompt:])
        at += length
    out = torch.cat(outs)
    grads = torch.autograd.grad(out, list(leaves.values()), case.dout.to(dtype))
    return {"out": out.detach(), **{"d" + n: g for n, g in zip(leaves, grads, strict=True)}}


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_equal_to_the_replicated_batch(path: int, deterministic: bool) -> None:
    """The independent oracle: dK and dV of the prompt are sums over the copies."""
    prompt, responses = 190, [70, 33, 129]
    case = shared_case([prompt], [responses], with_dlse=False)
    got = run(case, attend_segments(case, deterministic), case.dtype)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        ref = replicated(case, prompt, responses, torch.float64)
    low = run(
        case, lambda **t: reference.attention(**t, segments=case.table, causal=True, low=True), case.dtype
    )
    for name, want in ref.items():
        assert_close(name, got[name], low[name], want, case.dtype)


def layout_and_tensors(n: int, prompt: int, response: int, heads: int, heads_k: int) -> tuple:
    layout = SharedPromptLayout.from_lengths(
        prompt_lens=[prompt], response_lens=[[response] * n], device=CUDA, boundary="shared"
    )
    generator = torch.Generator(CUDA).manual_seed(n)
    make = lambda h: torch.randn(  # noqa: E731
        layout.total, h, 128, device=CUDA, dtype=torch.bfloat16, generator=generator
    )
    return layout, [make(heads), make(heads_k), make(heads_k)], make(heads)


def gradients(layout: SharedPromptLayout, tensors: list[Tensor], dout: Tensor, **options) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = flash_attn.flash_attn_shared_prompt_func(*leaves, layout, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def test_fifty_deterministic_repeats_are_bitwise_equal(path: int) -> None:
    """N = 64; short prompts too, whose context items are split. Under load: other kernels run beside."""
    noise = torch.randn(2048, 2048, device=CUDA)
    stream = torch.cuda.Stream()
    for prompt in (300, 2048):
        layout, tensors, dout = layout_and_tensors(64, prompt, 100, 8, 2)
        first = gradients(layout, tensors, dout, deterministic=True)
        for _ in range(50):
            with torch.cuda.stream(stream):
                noise @ noise
            again = gradients(layout, tensors, dout, deterministic=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_two_hundred_repeats_under_load_are_bitwise_equal(path: int) -> None:
    """Forward and deterministic gradients while products and copies of other streams take SMs and memory."""
    layout, tensors, dout = layout_and_tensors(8, 1024, 256, 8, 2)
    first = gradients(layout, tensors, dout, deterministic=True)
    noise = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in range(2)]
    differ = torch.zeros(4, device=CUDA, dtype=torch.int64)
    for index in range(200):
        with torch.cuda.stream(streams[0]):
            noise @ noise
        with torch.cuda.stream(streams[1]):
            noise.clone()
        again = gradients(layout, tensors, dout, deterministic=True)
        differ += torch.stack([(a != b).sum() for a, b in zip(first, again, strict=True)])
        if index % 20 == 0:
            torch.cuda.synchronize()  # the noise does not run ahead without end
    assert differ.tolist() == [0, 0, 0, 0]


def test_dualkv_gradients_repeat_bitwise(path: int) -> None:
    """All five gradients, context in tensors of its own."""
    heads, heads_k, context, lengths = 4, 2, 300, [70] * 64
    cu = torch.arange(0, sum(lengths) + 1, 70, device=CUDA, dtype=torch.int32)
    rows = sum(lengths)
    shapes = [(rows, heads), (context, heads_k), (context, heads_k), (rows, heads_k), (rows, heads_k)]
    tensors = [
        torch.randn(r, h, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for r, h in shapes
    ]
    dout = torch.randn(rows, heads, 64, device=CUDA, dtype=torch.bfloat16)
    runs = []
    for _ in range(20):
        out = flash_attn.flash_attn_dualkv_varlen_func(
            *tensors, cu, cu, 70, context, 70, causal=True, deterministic=True
        )
        runs.append([out, *torch.autograd.grad(out, tensors, dout)])
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


def test_forward_and_key_gradients_repeat_without_deterministic(path: int) -> None:
    """Only dq is summed in an order that varies."""
    layout, tensors, dout = layout_and_tensors(16, 600, 100, 8, 2)
    first = gradients(layout, tensors, dout)
    for _ in range(5):
        out, _, dk, dv = gradients(layout, tensors, dout)
        assert torch.equal(out, first[0]) and torch.equal(dk, first[2]) and torch.equal(dv, first[3])


def prompt_error(n: int, heads: int, heads_k: int, prompt: int = 256, response: int = 128) -> list[float]:
    """Relative rms error of dK and dV of the prompt against fp64."""
    layout, tensors, dout = layout_and_tensors(n, prompt, response, heads, heads_k)
    got = gradients(layout, tensors, dout)
    case = shared_case([prompt], [[response] * n], num_heads=heads, num_heads_k=heads_k, head_dim=128)
    case.tensors, case.dout, case.with_dlse = dict(zip("qkv", tensors, strict=True)), dout, False
    ref = run(case, lambda **t: reference.attention(**t, segments=case.table, causal=True), torch.float64)
    errors = []
    for index, name in ((2, "dk"), (3, "dv")):
        a, b = got[index][:prompt].double(), ref[name][:prompt]
        errors.append(float((a - b).norm() / b.norm()))
    return errors


def test_prompt_gradients_do_not_get_worse_with_more_responses(path: int) -> None:
    few, many = prompt_error(8, 2, 1), prompt_error(64, 2, 1)
    assert all(b <= 1.25 * a for a, b in zip(few, many, strict=True)), (few, many)


def test_prompt_gradients_do_not_get_worse_with_gqa(path: int) -> None:
    mha, gqa = prompt_error(8, 2, 2), prompt_error(8, 16, 2)
    assert all(b <= 1.25 * a for a, b in zip(mha, gqa, strict=True)), (mha, gqa)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_cuda_graph_replays_with_other_lengths(path: int, deterministic: bool) -> None:
    capacities = dict(max_segments=12, max_total=1000, device=CUDA)
    batches = [
        ([200], [[100, 60, 0]]),
        ([50, 300], [[20, 33], [128, 5, 64]]),
        ([7], [[900]]),
        ([1], [[1]]),
    ]
    layouts = [SharedPromptLayout.from_lengths(p, r, **capacities) for p, r in batches]
    layout = SharedPromptLayout.from_lengths(*batches[0], **capacities)
    q, k, v, dout = (torch.randn(1000, h, 64, device=CUDA, dtype=torch.float16) for h in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> list[Tensor]:
        out = flash_attn.flash_attn_shared_prompt_func(*leaves, layout, deterministic=deterministic)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for other in layouts:
        layout.copy_(other)
        for x in results:
            x.detach().fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        got = [x.detach().clone() for x in results]
        want = step()
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            if index == 1 and not deterministic:
                torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3)
            else:
                assert torch.equal(a, b), index
        assert (got[0][other.total :] == 0).all() and (got[1][other.total :] == 0).all()


def test_a_plan_of_a_capture_is_not_taken_for_built(path: int) -> None:
    """An eager call between capture and replay builds its own."""
    used, layout = (SharedPromptLayout.from_lengths([200], [[100, 60]], device=CUDA) for _ in range(2))
    tensors = [torch.randn(used.num_rows, h, 64, device=CUDA, dtype=torch.float16) for h in (4, 2, 2)]
    expected = flash_attn.flash_attn_shared_prompt_func(*tensors, used)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn.flash_attn_shared_prompt_func(*tensors, layout)
    assert torch.equal(flash_attn.flash_attn_shared_prompt_func(*tensors, layout), expected)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


def test_two_streams_with_plans_of_their_own(path: int) -> None:
    problems = [layout_and_tensors(n, 500, 90, 4, 2) for n in (3, 8)]
    want = [gradients(*p, deterministic=True) for p in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    got: list[list[list[Tensor]]] = [[], []]
    for _ in range(10):
        for index, (stream, problem) in enumerate(zip(streams, problems, strict=True)):
            with torch.cuda.stream(stream):
                got[index].append(gradients(*problem, deterministic=True))
    torch.cuda.synchronize()
    for index in range(2):
        for again in got[index]:
            assert all(torch.equal(a, b) for a, b in zip(want[index], again, strict=True))


def test_steps_make_no_host_sync(path: int) -> None:
    layout, tensors, dout = layout_and_tensors(4, 200, 50, 4, 2)
    gradients(layout, tensors, dout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fresh = SharedPromptLayout.from_lengths([200], [[50] * 4], device=CUDA, boundary="shared")
        gradients(fresh, tensors, dout)
        gradients(fresh, tensors, dout, deterministic=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_once_for_all_layouts(path: int) -> None:
    torch._dynamo.reset()
    compiles = torch._dynamo.testing.CompileCounter()

    def layer(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, plan: list[Tensor]) -> Tensor:
        out, _ = torch.ops.flash_attn.fwd(
            q, k, v, None, None, segments, None, plan, q.shape[0], q.shape[0], 0.125, True, -1, -1, 0.0, False
        )
        return out * 2

    compiled = torch.compile(layer, backend=compiles, fullgraph=True, dynamic=True)
    for n, prompt, response in ((2, 100, 30), (3, 64, 70), (4, 90, 33), (5, 150, 20), (6, 77, 10)):
        layout, tensors, _ = layout_and_tensors(n, prompt, response, 4, 2)
        plan = layout.plan(head_dim=128, num_heads_k=2, dtype=torch.bfloat16)
        arguments = (*tensors, layout.segments, plan)
        assert torch.equal(compiled(*arguments), layer(*arguments))
    assert compiles.frame_count <= 2


def test_opcheck(path: int) -> None:
    layout, tensors, _ = layout_and_tensors(2, 70, 30, 2, 1)
    plan = layout.plan(head_dim=128, num_heads_k=1, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in tensors]
    torch.library.opcheck(
        torch.ops.flash_attn.fwd,
        (*leaves, None, None, layout.segments, None, plan, 70, 100, 0.125, True, -1, -1, 0.0, False),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.multi_gpu
def test_device_that_is_not_current(path: int) -> None:
    layout, tensors, dout = layout_and_tensors(3, 200, 50, 4, 2)
    want = gradients(layout, tensors, dout, deterministic=True)
    torch.cuda.set_device(0)
    other = torch.device("cuda", 1)
    got = gradients(layout.to(other), [x.to(other) for x in tensors], dout.to(other), deterministic=True)
    assert torch.cuda.current_device() == 0
    for a, b in zip(got, want, strict=True):
        assert a.device == other and torch.equal(a.to(b.device), b)


def test_flash_attn_functions_equal_sdpa(path: int) -> None:
    """The dense functions of the flash-attn API on the same kernels, plans built per call."""
    q = torch.randn(3, 200, 4, 64, device=CUDA, dtype=torch.float16)
    k, v = (torch.randn(3, 200, 2, 64, device=CUDA, dtype=torch.float16) for _ in range(2))
    for causal in (True, False):
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
        double = [x.transpose(1, 2).double() for x in (q, k, v)]
        double[1:] = [x.repeat_interleave(2, 1) for x in double[1:]]
        want = torch.nn.functional.scaled_dot_product_attention(*double, is_causal=causal).transpose(1, 2)
        torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=2e-3)
        assert lse.shape == (3, 4, 200) and lse.dtype == torch.float32
    assert _ops.backend(q.device) == ("cuda-sm90a" if path == 90 else "cuda-sm80")
