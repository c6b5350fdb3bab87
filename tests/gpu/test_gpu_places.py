"""Keys that do not simply follow each other: varlen in pages, behind padding, or fewer than cu_seqlens_k
says; decoding behind padding, and with windows at the ends of int32. Everything that is no key holds NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_cases import CUDA, poisoned
from numerics import assert_close
from torch import Tensor

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache, reference
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

Q_LENS, K_LENS, PAGE = [3, 1, 130, 2, 17], [100, 0, 300, 1, 228], 128
HEADS, HEADS_K, HEAD_DIM = 8, 2, 64
OPTIONS: list[dict[str, Any]] = [{}, dict(causal=True), dict(causal=True, window_size=(50, 0))]


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


def cu(lens: list[int]) -> Tensor:
    return ints([0, *lens]).cumsum(0).int()


def random(*shape: int) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(len(shape) + shape[0])
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16, generator=generator)


def expected(
    q: Tensor, rows: list[tuple[Tensor, Tensor]], lens: list[int], low: bool, **options: Any
) -> tuple[Tensor, Tensor]:
    """The reference on every sequence's own keys and values, joined."""
    q_ends, k_ends = cu(lens).tolist(), cu([len(k) for k, _ in rows]).tolist()
    table = [[q_ends[b], q_ends[b + 1], 0, 0, k_ends[b], k_ends[b + 1]] for b in range(len(lens))]
    k, v = (torch.cat(x) for x in zip(*rows, strict=True))
    tensors = [x if low else x.double() for x in (q, k, v)]
    return reference.attention(*tensors, segments=torch.tensor(table), low=low, **options)


def check(got: Any, q: Tensor, rows: list[tuple[Tensor, Tensor]], lens: list[int], **options: Any) -> None:
    wanted = expected(q, rows, lens, False, **options)
    low = expected(q, rows, lens, True, **options)
    for name, x, y, z in zip(("out", "lse"), got[:2], low, wanted, strict=True):
        assert_close(name, x, y, z, torch.bfloat16 if name == "out" else torch.float32)


def without(x: Tensor, kept: Tensor) -> Tensor:
    return x.where(kept.view(-1, *[1] * (x.dim() - 1)), torch.nan)


@pytest.mark.parametrize("options", OPTIONS, ids=["full", "causal", "window"])
@pytest.mark.parametrize("fewer", [False, True], ids=["cu_seqlens_k", "seqused_k"])
def test_varlen_in_pages(path: int, fewer: bool, options: dict[str, Any]) -> None:
    """Pages in random order, the rows behind each length and the unused pages NaN."""
    lens = [max(n - 9, 0) for n in K_LENS] if fewer else K_LENS
    pages_of = [-(-n // PAGE) for n in K_LENS]
    order = torch.randperm(sum(pages_of) + 3, generator=torch.Generator().manual_seed(0)).tolist()
    table = [[order.pop() for _ in range(n)] + [0] * (3 - n) for n in pages_of]
    num_pages = sum(pages_of) + 3
    used = torch.zeros(num_pages * PAGE, dtype=torch.bool, device=CUDA)
    places = []
    for b, n in enumerate(lens):
        where = torch.tensor([table[b][i // PAGE] * PAGE + i % PAGE for i in range(n)], device=CUDA).long()
        used[where] = True
        places.append(where)
    q = random(sum(Q_LENS), HEADS, HEAD_DIM)
    k, v = (without(x, used) for x in random(2, num_pages * PAGE, HEADS_K, HEAD_DIM))
    paged = [x.unflatten(0, (num_pages, PAGE)) for x in (k, v)]
    numbers = (cu(Q_LENS), cu(K_LENS), max(Q_LENS), max(K_LENS))
    with poisoned(), torch.no_grad():
        if fewer:
            window = options.get("window_size", (-1, -1))
            got = _flash_attn_varlen_forward(
                q, *paged, *numbers, 0.0, HEAD_DIM**-0.5, options.get("causal", False), *window,
                block_table=ints(table), seqused_k=ints(lens),
            )  # fmt: skip
        else:
            extra = dict(block_table=ints(table), return_attn_probs=True)
            got = flash_attn_varlen_func(q, *paged, *numbers, **extra, **options)
    check(got, q, [(k[x], v[x]) for x in places], Q_LENS, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("given", ["seqused_k", "leftpad_k", "both"])
def test_varlen_with_fewer_keys_or_padding(path: int, given: str, causal: bool) -> None:
    """NaN behind the keys that are used, in front of those behind padding."""
    pad = [7, 0, 64, 0, 129] if given != "seqused_k" else [0] * 5
    lens = [n - p for n, p in zip(K_LENS, pad, strict=True)]
    if given != "leftpad_k":
        lens = [n - n // 3 for n in lens]
    begins = [int(x) + p for x, p in zip(cu(K_LENS)[:-1], pad, strict=True)]
    used = torch.zeros(sum(K_LENS), dtype=torch.bool, device=CUDA)
    for begin, n in zip(begins, lens, strict=True):
        used[begin : begin + n] = True
    q = random(sum(Q_LENS), HEADS, HEAD_DIM)
    k, v = (without(x, used) for x in random(2, sum(K_LENS), HEADS_K, HEAD_DIM))
    ends = [p + n for p, n in zip(pad, lens, strict=True)]  # the padding counts as used
    extra = {"seqused_k": ints(ends)} if given != "leftpad_k" else {}
    if given != "seqused_k":
        extra["leftpad_k"] = ints(pad)
    numbers = (cu(Q_LENS), cu(K_LENS), max(Q_LENS), max(K_LENS))
    with poisoned():
        got = _flash_attn_varlen_forward(q, k, v, *numbers, 0.0, HEAD_DIM**-0.5, causal, **extra)
    rows = [(k[i : i + n], v[i : i + n]) for i, n in zip(begins, lens, strict=True)]
    check(got, q, rows, Q_LENS, causal=causal)


CAPACITY = 400


def decode(seqlen_q: int, begins: list[int], lens: list[int], **options: Any) -> tuple[Any, ...]:
    """flash_attn_with_kvcache on caches whose keys are rows [begin, begin + n), NaN elsewhere."""
    batch, position = len(lens), torch.arange(CAPACITY, device=CUDA)
    begin, length = ints(begins)[:, None], ints(lens)[:, None]
    used = ((position >= begin) & (position < begin + length))[..., None, None]
    q = random(batch, seqlen_q, HEADS, HEAD_DIM)
    k, v = (x.where(used, torch.nan) for x in random(2, batch, CAPACITY, HEADS_K, HEAD_DIM))
    with poisoned():
        got = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=(begin + length)[:, 0], return_softmax_lse=True, **options
        )
    rows = [(k[b, i : i + n], v[b, i : i + n]) for b, (i, n) in enumerate(zip(begins, lens, strict=True))]
    out, lse = got[0].flatten(0, 1), got[1].transpose(0, 1).flatten(1)
    return (out, lse), q.flatten(0, 1), rows, [seqlen_q] * batch


@pytest.fixture(params=["kernels", "op"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries run on the decode kernels, or where Triton is missing through the op."""
    monkeypatch.setenv("FLASH_ATTN_DECODE", "op" if request.param == "op" else "")


@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("options", [dict(causal=True), dict(num_splits=3)], ids=["causal", "splits"])
def test_decoding_behind_padding(path: int, way: None, seqlen_q: int, options: dict[str, Any]) -> None:
    begins, lens = [3, 0, 129, 64], [200, 17, 271, 1]
    *case, num_q = decode(seqlen_q, begins, lens, cache_leftpad=ints(begins), **options)
    check(*case, num_q, causal=options.get("causal", False))


@pytest.mark.parametrize("window", [(2**31 - 1, 0), (2**31 - 1, 2**31 - 1), (-1, 2**31 - 2), (10, 2**31 - 1)])
def test_decoding_with_windows_at_the_ends_of_int32(path: int, way: None, window: tuple[int, int]) -> None:
    case = decode(2, [0, 0, 0], [300, 17, 64], window_size=window)
    near = (window[0] if window[0] < CAPACITY else -1, window[1] if window[1] < CAPACITY else -1)
    check(*case, window_size=near)
