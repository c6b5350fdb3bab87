"""Head dims above 256 (Gemma-4's global layers have 512): gradients by one pass each, on both paths."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import CUDA, attend_segments, check_case, shared_case, varlen_case
from kernels import HEAD_DIMS
from numerics import Case, assert_close, run

import flash_attn
from flash_attn import _ops, reference

PROMPT_AND_RESPONSES = ([150], [[70, 0, 130, 9]])


@pytest.fixture(autouse=True)
def _has_kernels(path: int) -> None:
    if max(HEAD_DIMS[path]) < 512:
        pytest.skip(
            f"kernels of this path end at head dim {max(HEAD_DIMS[path])}; the sm_80 ones run instead"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [264, 320, 448, 504, 512])
def test_head_dims(path: int, head_dim: int, dtype: torch.dtype) -> None:
    check_case(shared_case([150], [[70, 0, 33]], head_dim=head_dim, dtype=dtype))
    check_case(varlen_case([130, 64], [130, 200], head_dim=head_dim, dtype=dtype, causal=False))


@pytest.mark.parametrize("prompt", [1, 31, 64, 65, 129])
def test_lengths_around_the_tiles(path: int, prompt: int) -> None:
    for response in (1, 33, 64):
        check_case(shared_case([prompt], [[response, response // 2, response]], head_dim=512, seed=prompt))


OPTIONS = {
    "window": dict(window_size=(39, 0)),
    "window on both sides": dict(window_size=(5, 300), causal=False),
    "softcap": dict(softcap=5.0, scale_q=4.0),
    "scale 1 (Gemma-4)": dict(softmax_scale=1.0, scale_q=0.1),
    "large scores": dict(scale_q=10.0),
    "sinks": dict(sinks=True),
    "all heads share keys": dict(num_heads=8, num_heads_k=1),
    "heads of their own": dict(num_heads=3, num_heads_k=3),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(path: int, name: str) -> None:
    check_case(shared_case(*PROMPT_AND_RESPONSES, head_dim=512, **OPTIONS[name]))
    check_case(varlen_case([150, 70], [70, 200], 130, head_dim=512, **OPTIONS[name]))


GROUPS = {
    "no response": ([130], [[]]),
    "many short": ([200], [[1, 2, 3, 4, 5, 6, 7, 8] * 5]),
    "unequal groups": ([1, 300, 64, 5], [[9, 150], [64], [1] * 40, [257, 0]]),
    "33 groups": ([7] * 33, [[3, 0, 9]] * 33),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups(path: int, name: str) -> None:
    check_case(shared_case(*GROUPS[name], head_dim=512, pad=13))


VARLEN = {
    "queries longer than keys and context": ([90, 10], [5, 10], 30),
    "no decoded keys": ([40, 30], [0, 0], 77),
    "decoding": ([1] * 20, [100] * 20, 130),
    "no key at all": ([5, 6], [0, 0], None),
}


@pytest.mark.parametrize("name", VARLEN)
def test_query_lengths_differ_from_key_lengths(path: int, name: str) -> None:
    check_case(varlen_case(*VARLEN[name], head_dim=512))


def test_nan_behind_the_last_row_reaches_nothing(path: int) -> None:
    case = shared_case([100], [[40, 30]], head_dim=512)
    pad, rows = 75, case.total_q
    wide = Case(case.segments, rows + pad, rows + pad, num_heads=4, num_heads_k=2, head_dim=512,
                dtype=case.dtype, device=CUDA, with_dlse=True)  # fmt: skip
    for name, x in case.tensors.items():
        wide.tensors[name] = torch.cat([x, x.new_full((pad, *x.shape[1:]), float("nan"))])
    wide.dout = torch.cat([case.dout, case.dout.new_full((pad, *case.dout.shape[1:]), float("nan"))])
    wide.dlse = torch.nn.functional.pad(case.dlse, (0, pad), value=float("nan"))
    got = run(wide, attend_segments(wide), case.dtype)
    low, want = (
        run(
            case,
            lambda low=(dtype == case.dtype), **t: reference.attention(
                **t, segments=case.table, **case.options, low=low
            ),
            dtype,
        )
        for dtype in (case.dtype, torch.float64)
    )
    for name, x in got.items():
        body, tail = (x[:, :rows], x[:, rows:]) if name == "lse" else (x[:rows], x[rows:])
        assert_close(name, body, low[name], want[name], torch.float32 if name == "lse" else case.dtype)
        assert (tail == (-torch.inf if name == "lse" else 0)).all(), name


def test_every_call_is_deterministic_and_needs_no_fp32_dq(path: int) -> None:
    """The flag changes nothing: no two sums meet in memory. Nothing larger than the tensors is allocated."""
    case = shared_case([1500], [[300, 257]], head_dim=512, num_heads=4, num_heads_k=1)
    torch.cuda.synchronize()
    want = run(case, attend_segments(case, True), case.dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = run(case, attend_segments(case, False), case.dtype)
    peak = torch.cuda.max_memory_allocated() - before
    for name, x in want.items():
        assert torch.equal(got[name], x), name
    q, k = (case.tensors[n].nbytes for n in "qk")
    # out, dq, dk, dv and small tables; an fp32 accumulator of dq would be twice q more.
    assert peak < 3 * q + 4 * k + (1 << 21)


@pytest.mark.parametrize("shared_kb", [163, 99])
def test_smaller_gpus(path: int, shared_kb: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """sm_80 has 163 KB a block; in 99 KB (sm_86, sm_89, sm_120) the forward fits, the backward does not."""
    if path != 80:
        pytest.skip("one kind of GPU")
    monkeypatch.setenv("FLASH_ATTN_FORCE_SHARED_KB", str(shared_kb))
    case = shared_case(*PROMPT_AND_RESPONSES, head_dim=512)
    if shared_kb == 163:
        check_case(case)
        check_case(shared_case(*PROMPT_AND_RESPONSES, head_dim=512, window_size=(39, 0), softcap=9.0))
        return
    with torch.no_grad():
        out, _ = attend_segments(case)(**case.tensors)
        want, _ = reference.attention(**case.tensors, segments=case.table, **case.options)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match=r"sm80 bwd bf16 head_dim 512 needs more than the 99 KB of shared"):
        check_case(case)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_flash_attn_functions_equal_sdpa(path: int, causal: bool) -> None:
    """flash_attn_func and flash_attn_varlen_func, forward and gradients, against torch in fp64."""
    lengths = [200, 77]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=CUDA)
    leaves = [torch.randn(sum(lengths), h, 512, device=CUDA, dtype=torch.bfloat16) for h in (4, 2, 2)]
    leaves = [x.requires_grad_() for x in leaves]
    out = flash_attn.flash_attn_varlen_func(*leaves, cu, cu, 200, 200, causal=causal)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    parts = []
    for begin, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in wide)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        part = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        parts.append(part[0].transpose(0, 1))
    want = torch.autograd.grad(torch.cat(parts), wide, dout.double())
    for x, y in zip((out, *grads), (torch.cat(parts), *want), strict=True):
        assert float(((x.double() - y).norm() / y.norm()).detach()) < 8e-3
    dense = flash_attn.flash_attn_func(*(x[None, :200] for x in leaves), causal=causal)
    torch.testing.assert_close(dense[0], out[:200], rtol=0, atol=0)


def test_backend_names_the_kernels(path: int) -> None:
    want = "cuda-sm90a" if path == 90 else "cuda-sm80"
    assert flash_attn.backend(CUDA, head_dim=512) == flash_attn.backend(CUDA, head_dim=300) == want
    with pytest.raises(NotImplementedError, match="no flash_attn kernel for head_dim 520"):
        flash_attn.backend(CUDA, head_dim=520)
    assert _ops.backend(torch.device(CUDA)) == want
