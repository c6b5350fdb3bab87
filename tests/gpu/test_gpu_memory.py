"""Strides, alignment, sizes beyond 2^31 elements, memory limits, and errors that leave the GPU usable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_cases import CUDA, attend_segments, check_case, poisoned, shared_case
from numerics import Case, run
from torch import Tensor

import flash_attn
from flash_attn import _calls
from flash_attn.shared_prompt import SharedPromptLayout

LENGTHS = ([100], [[40, 70]])


def same_layout(name: str, x: Tensor) -> Tensor:
    """A tensor with x's values and other strides."""
    rows, heads, dim = x.shape
    if name == "slice of a fused tensor":
        base = x.new_full((rows, heads + 3, dim), float("nan"))
        view = base[:, 1 : heads + 1]
    elif name == "head-major":
        view = x.new_empty(heads, rows, dim).transpose(0, 1)
    elif name == "rows far apart":
        view = x.new_full((rows, 9, heads, dim), float("nan"))[:, 4]
    elif name == "base off 16 bytes":
        view = x.new_empty(rows * heads * dim + 8)[3:-5].view(rows, heads, dim)
    elif name == "row stride off 16 bytes":
        view = x.new_full((rows, heads * dim + 3), float("nan"))[:, : heads * dim].unflatten(1, (heads, dim))
    else:
        assert name == "transposed last dimension"
        view = x.new_empty(rows, dim, heads).transpose(1, 2)
    view.copy_(x)
    return view


LAYOUTS = [
    "slice of a fused tensor",
    "head-major",
    "rows far apart",
    "base off 16 bytes",
    "row stride off 16 bytes",
    "transposed last dimension",
]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_nothing(path: int, layout: str, deterministic: bool) -> None:
    """Bitwise equal to contiguous tensors (dq of the fast mode: up to the order of its sums)."""
    case = shared_case(*LENGTHS)
    with poisoned():
        want = run(case, attend_segments(case, deterministic), case.dtype)
    strided = {name: same_layout(layout, x) for name, x in case.tensors.items()}
    leaves = [x.detach().requires_grad_() for x in strided.values()]
    with poisoned():
        out, lse = attend_segments(case, deterministic)(**dict(zip(strided, leaves, strict=True)))
        grads = torch.autograd.grad([out, lse], leaves, [same_layout(layout, case.dout), case.dlse])
    assert torch.equal(out, want["out"]) and torch.equal(lse, want["lse"])
    for name, grad in zip(strided, grads, strict=True):
        if name == "q" and not deterministic:
            torch.testing.assert_close(grad, want["dq"], rtol=1e-2, atol=1e-3)
        else:
            assert torch.equal(grad, want["d" + name]), name


def in_memory(order: str, x: Tensor) -> Tensor:
    """A dense tensor (batch, seqlen, heads, head_dim) with x's values and other strides."""
    if order == "heads before rows":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if order == "rows before sequences":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if order == "transposed last dimension":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    assert order == "sequences far apart"
    batch, seqlen, heads, dim = x.shape
    view = x.new_full((batch, seqlen + 5, heads, dim + 8), float("nan"))[:, 2:-3, :, :dim]
    return view.copy_(x)


ORDERS = ["heads before rows", "rows before sequences", "transposed last dimension", "sequences far apart"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch, seqlen", [(3, 77), (1, 50), (4, 1)])
def test_strides_of_dense_batches_change_nothing(path: int, order: str, batch: int, seqlen: int) -> None:
    """Bitwise equal to contiguous tensors, also where no stride makes batch and seqlen one dimension."""
    generator = torch.Generator(CUDA).manual_seed(seqlen)
    q, k, v, dout = (
        torch.randn(batch, seqlen, h, 64, device=CUDA, dtype=torch.bfloat16, generator=generator)
        for h in (4, 2, 2, 4)
    )

    def results(arrange: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaves = [arrange(x).detach().requires_grad_() for x in (q, k, v)]
        out, lse, _ = flash_attn.flash_attn_func(
            *leaves, causal=True, deterministic=True, return_attn_probs=True
        )
        return [out, lse, *torch.autograd.grad(out, leaves, arrange(dout))]

    with poisoned():
        got, want = results(lambda x: in_memory(order, x)), results(lambda x: x)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def test_expanded_gradients(path: int) -> None:
    """out.sum().backward(): dout has stride 0 everywhere; so has dlse."""
    case = shared_case(*LENGTHS)
    case.dout = torch.ones((), device=CUDA, dtype=case.dtype).expand_as(case.dout)
    case.dlse = torch.full((), 0.5, device=CUDA).expand_as(case.dlse)
    check_case(case)
    check_case(case, deterministic=True)


def test_expanded_keys(path: int) -> None:
    case = shared_case(*LENGTHS, num_heads=4, num_heads_k=4)
    for name in ("k", "v"):
        case.tensors[name] = case.tensors[name][:, :1].expand(-1, 4, -1)
    check_case(case)


def test_subset_of_gradients(path: int) -> None:
    case = shared_case(*LENGTHS)
    tensors = {name: x.clone() for name, x in case.tensors.items()}
    tensors["q"].requires_grad_()
    out, _ = attend_segments(case)(**tensors)
    out.backward(case.dout)
    assert tensors["q"].grad is not None and tensors["k"].grad is None


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rows_too_far_apart_for_the_kernels_are_copied(path: int, name: str) -> None:
    """2^23 elements from row to row: a tile's 32-bit byte offsets do not reach (`kMaxRowStride`)."""
    case = shared_case([20], [[6, 10]])
    with poisoned():
        want = run(case, attend_segments(case, True), case.dtype)
    rows, heads, dim = case.tensors[name].shape
    apart = case.tensors[name].new_empty(rows, 1 << 23)[:, : heads * dim].unflatten(1, (heads, dim))
    apart.copy_(case.tensors[name])
    tensors = {**case.tensors, name: apart}
    leaves = [x.detach().requires_grad_() for x in tensors.values()]
    with poisoned():
        out, lse = attend_segments(case, True)(**dict(zip(tensors, leaves, strict=True)))
        grads = torch.autograd.grad([out, lse], leaves, [case.dout, case.dlse])
    for got, expected in zip([out, lse, *grads], want.values(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_more_than_2_31_elements(path: int, deterministic: bool) -> None:
    """Rows far apart in memory, whose offsets exceed 2^31 in every tensor, equal to a compact copy."""
    rows, stride = 12_000, 200_000  # 2.4e9 elements
    heads, heads_k, dim = 2, 1, 64
    base = torch.empty(rows, stride, device=CUDA, dtype=torch.bfloat16)  # 4.8 GB
    compact: dict[str, Tensor] = {}
    views: dict[str, Tensor] = {}
    offset = 0
    for name, h in (("q", heads), ("k", heads_k), ("v", heads_k), ("dout", heads)):
        compact[name] = torch.randn(rows, h, dim, device=CUDA, dtype=torch.bfloat16)
        views[name] = base[:, offset : offset + h * dim].unflatten(1, (h, dim))
        views[name].copy_(compact[name])
        offset += h * dim
    begin = torch.arange(0, rows, 1000, dtype=torch.int32, device=CUDA)
    zero = torch.zeros_like(begin)
    segments = torch.stack([begin, begin + 1000, zero, zero, begin, begin + 1000], 1)
    results = []
    for tensors in (views, compact):
        leaves = [tensors[n].detach().requires_grad_() for n in ("q", "k", "v")]
        out, lse = _calls.attention(
            *leaves,
            None,
            None,
            segments,
            None,
            [],
            1000,
            1000,
            None,
            True,
            (-1, -1),
            0.0,
            None,
            deterministic,
        )
        results.append([out, lse, *torch.autograd.grad(out, leaves, tensors["dout"])])
    for index, (a, b) in enumerate(zip(*results, strict=True)):
        if index == 2 and not deterministic:
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
        else:
            assert torch.equal(a, b), index


def test_outputs_beyond_2_31_elements(path: int) -> None:
    """q and out of 2.2e9 elements; the last rows are compared with a call of their own."""
    heads, dim, length = 64, 128, 1024
    count = 263
    rows = count * length
    q = torch.randn(rows, heads, dim, device=CUDA, dtype=torch.bfloat16)
    k, v = (torch.randn(rows, 1, dim, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    cu = torch.arange(0, rows + 1, length, device=CUDA, dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, length, length, causal=True)
    last = slice(rows - length, rows)
    want = flash_attn.flash_attn_varlen_func(
        q[last], k[last], v[last], cu[:2], cu[:2], length, length, causal=True
    )
    assert torch.equal(out[last], want)


def test_backward_memory(path: int) -> None:
    """Beyond its outputs: dq's accumulator and row statistics; nothing per query head for the prompt."""
    heads, heads_k, dim, prompt, response, count = 32, 8, 128, 4096, 512, 8
    rows = prompt + count * response
    layout = SharedPromptLayout.from_lengths(
        prompt_lens=[prompt], response_lens=[[response] * count], device=CUDA, boundary="shared"
    )
    q = torch.randn(rows, heads, dim, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(rows, heads_k, dim, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )
    for deterministic in (False, True):
        out = flash_attn.flash_attn_shared_prompt_func(q, k, v, layout, deterministic=deterministic)
        dout = torch.randn_like(out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, (q, k, v), dout)
        extra = torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in grads)
        accumulator = 0 if deterministic else rows * heads * dim * 4
        assert extra <= accumulator + 4 * prompt * heads_k * dim * 2 + 3 * 4 * heads * rows + 2**22


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_wrong_cu_seqlens_leave_the_gpu_usable(path: int, deterministic: bool) -> None:
    """Beyond the tensors, not monotone: unchecked on the GPU, clamped by the plan; no sticky error."""
    x = torch.randn(200, 2, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    for values in ([0, 100, 5000], [0, 150, 100], [-70, 100, 200], [0, 2**31 - 1, -(2**31)]):
        cu = torch.tensor(values, device=CUDA, dtype=torch.int32)
        out = flash_attn.flash_attn_varlen_func(
            x, x, x, cu, cu, 200, 200, causal=True, deterministic=deterministic
        )
        out.backward(torch.ones_like(out))
        torch.cuda.synchronize()
    check_case(shared_case(*LENGTHS))


def test_errors_name_the_argument(path: int) -> None:
    x = torch.randn(20, 2, 64, device=CUDA, dtype=torch.bfloat16)
    case = Case([[0, 20, 0, 0, 0, 20]], 20, 20, device=CUDA)
    attend = attend_segments(case)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_heads_k"):
        attend(x[:, :1], x, x)
    with pytest.raises(ValueError, match="dtype must be float16 or bfloat16"):
        attend(x.float(), x.float(), x.float())
    check_case(shared_case(*LENGTHS))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("shared_kb", [99, 163])
def test_tiles_of_gpus_with_less_shared_memory(
    monkeypatch: pytest.MonkeyPatch, shared_kb: int, head_dim: int
) -> None:
    """sm_86, sm_89 and sm_120 give a block 99 KB, sm_80 163: every pass runs there, or is refused by name."""
    monkeypatch.setenv("FLASH_ATTN_FORCE_ARCH", "80")
    monkeypatch.setenv("FLASH_ATTN_FORCE_SHARED_KB", str(shared_kb))
    for deterministic in (False, True):
        try:
            check_case(shared_case(*LENGTHS, head_dim=head_dim), deterministic)
        except RuntimeError as error:
            assert f"needs more than the {shared_kb} KB of shared memory" in str(error)
            if shared_kb == 163:  # the tiles of the other rows are not in it
                pytest.skip("this library was built for Hopper alone")
