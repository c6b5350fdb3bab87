"""Lengths, head dims, head counts and groups: out, lse and all gradients by the one tolerance rule."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import CUDA, DEFAULTS, check_case, shared_case, varlen_case
from kernels import HEAD_DIMS
from numerics import Case

from flash_attn import _calls

LENGTHS = (1, 15, 16, 63, 64, 65, 127, 128, 129, 257)


@pytest.mark.parametrize("prompt", LENGTHS)
def test_lengths_around_the_tiles(path: int, prompt: int) -> None:
    for response in (1, 7, 63, 64, 65, 129):
        check_case(shared_case([prompt], [[response, response // 2, response]], seed=prompt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 80, 96, 104, 112, 128, 160, 192, 224, 256])
def test_head_dims(path: int, head_dim: int, dtype: torch.dtype) -> None:
    if head_dim > max(HEAD_DIMS[path]):
        pytest.skip(f"kernels of this path end at head dim {max(HEAD_DIMS[path])}")
    check_case(shared_case([150], [[70, 0, 33]], head_dim=head_dim, dtype=dtype))
    check_case(varlen_case([130, 64], [130, 200], head_dim=head_dim, dtype=dtype, causal=False))


def test_head_dims_that_are_padded(path: int) -> None:
    check_case(shared_case([70], [[30, 20]], head_dim=65))
    check_case(shared_case([70], [[30, 20]], head_dim=64, head_dim_v=40))


def test_head_dims_without_a_kernel_are_refused_by_name(path: int) -> None:
    case = varlen_case([8], [8], head_dim=max(HEAD_DIMS[path]) + 8)
    with pytest.raises(NotImplementedError, match="no flash_attn kernel for head_dim"):
        check_case(case)


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("num_heads_k", [1, 2])
def test_gqa_ratios(path: int, ratio: int, num_heads_k: int) -> None:
    check_case(shared_case([100], [[40, 70]], num_heads=ratio * num_heads_k, num_heads_k=num_heads_k))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_walks_longer_than_the_list_of_row_blocks(path: int, causal: bool, head_dim: int) -> None:
    """The sm_80 backward lists 64 or 128 pairs of a query head and a row block at a time; here an item has
    176 or more, of a sequence that begins off the grid of 16 rows."""
    lens = [7, 1300, 20]
    check_case(varlen_case(lens, lens, num_heads=16, num_heads_k=1, head_dim=head_dim, causal=causal))


def test_heads_read_the_right_kv_head(path: int) -> None:
    heads, heads_k = 12, 4
    q = torch.randn(50, heads, 64, device=CUDA, dtype=torch.bfloat16)
    k = torch.randn(50, heads_k, 64, device=CUDA, dtype=torch.bfloat16)
    v = (
        torch.arange(heads_k, device=CUDA, dtype=torch.bfloat16)[None, :, None]
        .expand(50, -1, 64)
        .contiguous()
    )
    segments = torch.tensor([[0, 50, 0, 0, 0, 50]], dtype=torch.int32, device=CUDA)
    out, _ = _calls.attention(
        q, k, v, None, None, segments, None, [], 50, 50, None, True, (-1, -1), 0.0, None, False
    )
    want = torch.arange(heads, device=CUDA) // (heads // heads_k)
    assert torch.equal(out.float(), want.float()[None, :, None].expand_as(out))


GROUPS = {
    "empty responses": ([70], [[0, 5, 0, 0, 130, 0]]),
    "only empty responses": ([70], [[0, 0]]),
    "one token": ([1], [[1]]),
    "no response": ([130], [[]]),
    "many short": ([200], [[1, 2, 3, 4, 5, 6, 7, 8] * 9]),
    "33 groups": ([7] * 33, [[3, 0, 9]] * 33),
    "unequal groups": ([1, 300, 64, 5], [[9, 150], [64], [1] * 40, [257, 0]]),
    "fewer rows than a tile": ([5], [[3, 2]]),
    "1000 groups": ([2] * 1000, [[1, 1]] * 1000),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups(path: int, name: str) -> None:
    prompts, responses = GROUPS[name]
    heads = dict(num_heads=2, num_heads_k=1) if len(prompts) > 100 else {}
    check_case(shared_case(prompts, responses, **heads))


VARLEN = {
    "queries shorter than keys": ([3, 64, 1], [150, 64, 300], None),
    "queries longer than keys": ([150, 64, 9], [20, 64, 0], None),
    "prompt rides in sequence 0": ([100 + 40, 30, 50], [40, 30, 50], 100),
    "queries longer than keys and context": ([90, 10], [5, 10], 30),
    "one key of context": ([40, 30], [40, 30], 1),
    "no context": ([40, 30], [40, 30], 0),
    "no decoded keys": ([40, 30], [0, 0], 77),
    "decoding": ([1] * 20, [100] * 20, 130),
    "no key at all": ([5, 6], [0, 0], None),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", VARLEN)
def test_query_lengths_differ_from_key_lengths(path: int, name: str, causal: bool) -> None:
    check_case(varlen_case(*VARLEN[name], causal=causal))


def test_context_tensor_longer_than_the_context(path: int) -> None:
    """Unused rows of the context tensor get zero gradients, rows between the sequences' keys too."""
    segments = [[0, 40, 0, 90, 5, 45], [40, 100, 0, 90, 70, 130]]
    check_case(Case(segments, 110, 140, 200, **DEFAULTS))


def test_no_rows(path: int) -> None:
    check_case(Case([], 0, 0, **DEFAULTS))
    check_case(Case([], 10, 20, **DEFAULTS))


def test_more_than_65535_sequences(path: int) -> None:
    count = 66_000
    x = [torch.randn(count, h, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for h in (2, 1, 1)]
    begin = torch.arange(count, dtype=torch.int32, device=CUDA)
    zero = torch.zeros_like(begin)
    segments = torch.stack([begin, begin + 1, zero, zero, begin, begin + 1], 1)
    out, _ = _calls.attention(
        *x, None, None, segments, None, [], 1, 1, None, True, (-1, -1), 0.0, None, False
    )
    assert torch.equal(out, x[2].expand_as(out))  # one key each: softmax is 1
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, x, dout)
    assert float(dq.abs().max()) < 1e-2 and float(dk.abs().max()) < 1e-2
    torch.testing.assert_close(dv, dout.float().sum(1, keepdim=True).to(dv.dtype), rtol=2e-2, atol=2e-2)
