"""FlopCounterMode counts the ops' products over the pairs that a mask lets see, each once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import flash_attn
from flash_attn._flops import num_pairs
from flash_attn.shared_prompt import SharedPromptLayout

H, HK, D, DV = 4, 2, 8, 6


def pairs_by_mask(table: list[list[int]], causal: bool, left: int, right: int) -> int:
    """From the definition of segments, row by row."""
    total = 0
    for q_begin, q_end, context_begin, context_end, k_begin, k_end in table:
        num_keys = context_end - context_begin + k_end - k_begin
        for row in range(q_end - q_begin):
            position = num_keys - (q_end - q_begin) + row
            last = position if causal else (position + right if right >= 0 else num_keys)
            first = position - left if left >= 0 else 0
            total += sum(first <= key <= last for key in range(num_keys))
    return total


def counted(call: Any, *leaves: torch.Tensor, backward_only: bool = False) -> int:
    if backward_only:
        loss = call().sum()
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(loss, leaves)
    else:
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(call().sum(), leaves)
    return sum(n for op, n in counter.get_flop_counts()["Global"].items() if "flash_attn." in str(op))


def heads(*sizes: int) -> list[torch.Tensor]:
    return [torch.randn(*sizes, h, d, requires_grad=True) for h, d in ((H, D), (HK, D), (HK, DV))]


@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (-1, 2), (2, 1), (0, 0), (100, 100)])
@pytest.mark.parametrize("causal", [False, True])
def test_pairs(causal: bool, window: tuple[int, int]) -> None:
    table = [[0, 5, 0, 0, 0, 5], [5, 7, 2, 8, 8, 13], [7, 16, 0, 3, 13, 15], [16, 17, 0, 0, 15, 15]]
    assert num_pairs(table, causal, *window) == pairs_by_mask(table, causal, *window)


def test_forward_and_backward_of_a_dense_batch() -> None:
    q, k, v = heads(2, 7)
    pairs = 2 * (7 * 8 // 2)
    call = partial(flash_attn.flash_attn_func, q, k, v, causal=True)
    backward = 2 * H * pairs * (3 * D + 2 * DV)
    assert counted(call, q, k, v) == 2 * H * pairs * (D + DV) + backward
    assert counted(call, q, k, v, backward_only=True) == backward
    windowed = partial(call, window_size=(2, 0))
    assert counted(windowed, q, k, v) == 2 * H * 2 * (1 + 2 + 5 * 3) * (4 * D + 3 * DV)


def test_a_full_batch_counts_as_torchs_attention() -> None:
    q, k, v = (torch.randn(2, 7, H, D, requires_grad=True) for _ in range(3))
    ours = counted(partial(flash_attn.flash_attn_func, q, k, v), q, k, v)
    with FlopCounterMode(display=False) as counter:
        weights = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).softmax(-1)
        torch.autograd.grad((weights @ v.transpose(1, 2)).sum(), (q, k, v))
    recomputed = 2 * 2 * H * 7 * 7 * D  # q k^T once more, in the backward
    assert ours == counter.get_total_flops() + recomputed


def test_shared_prompts_count_a_prompt_once() -> None:
    layout = SharedPromptLayout.from_lengths([9], [[3, 4]])
    q, k, v = heads(layout.num_rows)
    call = partial(flash_attn.flash_attn_shared_prompt_func, q, k, v, layout)
    pairs = 8 * 9 // 2 + (4 * 8 + 4 * 5 // 2) + (5 * 8 + 5 * 6 // 2)
    assert counted(call, q, k, v) == 2 * H * pairs * (4 * D + 3 * DV)


def test_alibi_and_dropout() -> None:
    q, k, v = heads(2, 7)
    slopes = torch.ones(H)
    call = partial(flash_attn.flash_attn_func, q, k, v, 0.5, causal=True, alibi_slopes=slopes)
    assert counted(call, q, k, v) == 2 * H * 2 * 28 * (4 * D + 3 * DV)


def test_fake_tensors_count_the_longest_sequences() -> None:
    """Their cu_seqlens hold nothing: torch's own formulas say the same."""
    with torch._subclasses.FakeTensorMode():
        q, k, v = (torch.empty(12, h, d) for h, d in ((H, D), (HK, D), (HK, DV)))
        cu = torch.empty(3, dtype=torch.int32)
        with FlopCounterMode(display=False) as counter:
            flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True)
    assert counter.get_total_flops() == 2 * H * 2 * 28 * (D + DV)


def test_a_counter_may_have_a_formula_of_its_own() -> None:
    q, k, v = heads(1, 5)
    mapping = {torch.ops.flash_attn.fwd: lambda *shapes, out_shape, **_: 11}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        flash_attn.flash_attn_func(q, k, v)
        flash_attn.flash_attn_func(q, k, v)
    assert counter.get_total_flops() == 22


@pytest.mark.parametrize("options", [{}, {"alibi_slopes": torch.ones(H)}], ids=["fwd", "fwd_extras"])
@pytest.mark.parametrize("forward", ["uncounted", "in another counter", "compiled"])
def test_a_counter_of_the_backward_alone(forward: str, options: dict[str, torch.Tensor]) -> None:
    q, k, v = heads(2, 7)
    call = partial(flash_attn.flash_attn_func, q, k, v, causal=True, **options)
    if forward == "in another counter":
        with FlopCounterMode(display=False) as first:
            loss = call().sum()
        assert first.get_total_flops() == 2 * H * 2 * 28 * (D + DV)
    else:
        loss = (torch.compile(call, backend="eager") if forward == "compiled" else call)().sum()
    with FlopCounterMode(display=False) as second:
        torch.autograd.grad(loss, (q, k, v))
    assert second.get_total_flops() == 2 * H * 2 * 28 * (3 * D + 2 * DV)


def test_a_counter_inside_another_learns_the_formulas() -> None:
    q, k, v = heads(1, 5)
    with FlopCounterMode(display=False):
        loss = flash_attn.flash_attn_func(q, k, v).sum()
        with FlopCounterMode(display=False) as inner:
            torch.autograd.grad(loss, (q, k, v))
    assert inner.get_total_flops() == 2 * H * 25 * (3 * D + 2 * DV)


@pytest.mark.parametrize("options", [{}, {"alibi_slopes": torch.ones(H)}], ids=["fwd", "fwd_extras"])
@pytest.mark.parametrize("rows", [1, 40])
def test_decoding_through_the_op_counts_whoever_came_before(
    rows: int, options: dict[str, torch.Tensor]
) -> None:
    q, cache = torch.randn(2, rows, H, D), torch.randn(2, 16, HK, D)
    with FlopCounterMode(display=False) as counter:
        flash_attn.flash_attn_with_kvcache(q, cache, cache, **options)
    assert counter.get_total_flops() == 2 * H * 2 * 16 * rows * 2 * D


def test_a_layouts_real_tensors_beside_fake_ones() -> None:
    layout = SharedPromptLayout.from_lengths([9], [[3, 4]])
    pairs = 8 * 9 // 2 + (4 * 8 + 4 * 5 // 2) + (5 * 8 + 5 * 6 // 2)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (x.detach() for x in heads(layout.num_rows))
        with FlopCounterMode(display=False) as counter:
            flash_attn.flash_attn_shared_prompt_func(q, k, v, layout)
    assert counter.get_total_flops() == 2 * H * pairs * (D + DV)


@pytest.mark.gpu
def test_gpu_counts_are_those_of_the_cpu() -> None:
    tensors = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in heads(2, 7)]
    call = partial(flash_attn.flash_attn_func, *tensors, causal=True)
    assert counted(call, *tensors) == 2 * H * 2 * 28 * (4 * D + 3 * D)  # kernels have one head dim for all
    lengths = torch.tensor([0, 2, 7], dtype=torch.int32, device="cuda")
    q, k, v = (x[0] for x in tensors)
    packed = partial(flash_attn.flash_attn_varlen_func, q, k, v, lengths, lengths, 5, 5, causal=True)
    assert counted(packed, *tensors) == 2 * H * (3 + 15) * 7 * D
