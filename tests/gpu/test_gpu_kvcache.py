"""flash_attn_with_kvcache on the kernels: split-KV, prefill, pages, against the reference on each cache."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gpu_cases import CUDA, poisoned
from numerics import assert_close
from torch import Tensor

from flash_attn import flash_attn_with_kvcache, reference

LENGTHS = [700, 0, 1023, 1, 300]
BATCH, CAPACITY, PAGE = len(LENGTHS), 1280, 256
OPTIONS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window_size=(200, 0)),
    "softcap": dict(softcap=20.0, causal=True),
}


def expected(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], low: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The reference on caches k, v (B, capacity, Hk, D) of which `lengths` rows are there."""
    batch, seqlen_q = q.shape[:2]
    table = [
        [b * seqlen_q, (b + 1) * seqlen_q, 0, 0, b * k.shape[1], b * k.shape[1] + n]
        for b, n in enumerate(lengths)
    ]
    dtype = q.dtype if low else torch.float64
    rows = [x.flatten(0, 1).to(dtype) for x in (q, k, v)]
    out, lse = reference.attention(*rows, segments=torch.tensor(table), low=low, **options)
    return out.unflatten(0, (batch, seqlen_q)), lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)


def check(got: tuple[Tensor, Tensor], *cache: Any) -> None:
    wanted, low = expected(*cache[:4], False, cache[4]), expected(*cache[:4], True, cache[4])
    for name, x, y, z in zip(("out", "lse"), got, low, wanted, strict=True):
        assert_close(name, x, y, z, torch.bfloat16 if name == "out" else torch.float32)


def tensors(seqlen_q: int, new: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator(CUDA).manual_seed(seqlen_q + new)
    shapes = dict(
        q=(BATCH, seqlen_q, num_heads, head_dim), k_cache=(BATCH, CAPACITY, 2, head_dim),
        v_cache=(BATCH, CAPACITY, 2, head_dim), k=(BATCH, new, 2, head_dim), v=(BATCH, new, 2, head_dim),
    )  # fmt: skip
    made = {n: torch.randn(s, device=CUDA, dtype=dtype, generator=generator) for n, s in shapes.items()}
    return made if new else {n: made[n] for n in ("q", "k_cache", "v_cache")}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("seqlen_q", "new"), [(1, 1), (3, 2), (130, 130), (1, 0)])
def test_ragged_caches(path: int, options: dict[str, Any], seqlen_q: int, new: int) -> None:
    x = tensors(seqlen_q, new, 8, 128, torch.bfloat16)
    for b, n in enumerate(LENGTHS):  # what is not in the cache yet must reach nothing
        x["k_cache"][b, n:] = x["v_cache"][b, n:] = torch.nan if new == 0 else 0
    cache_seqlens = torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)
    with poisoned():
        got = flash_attn_with_kvcache(**x, cache_seqlens=cache_seqlens, return_softmax_lse=True, **options)
    k, v = x["k_cache"].nan_to_num(), x["v_cache"].nan_to_num()
    for b, n in enumerate(LENGTHS if new else []):
        assert torch.equal(k[b, n : n + new], x["k"][b]) and torch.equal(v[b, n : n + new], x["v"][b])
    check(got, x["q"], k, v, [n + new for n in LENGTHS], options)


@pytest.mark.parametrize(("seqlen_q", "head_dim", "dtype"), [(1, 64, torch.float16), (2, 96, torch.bfloat16)])
@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_splits(path: int, seqlen_q: int, head_dim: int, dtype: torch.dtype, num_splits: int) -> None:
    x = tensors(seqlen_q, 0, 4, head_dim, dtype)
    got = flash_attn_with_kvcache(
        **x, cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA), num_splits=num_splits,
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    wanted, low = (
        expected(x["q"], x["k_cache"], x["v_cache"], LENGTHS, flag, dict(causal=True))
        for flag in (False, True)
    )
    assert_close("out", got[0], low[0], wanted[0], dtype)
    assert_close("lse", got[1], low[1], wanted[1], torch.float32)


@pytest.mark.parametrize("seqlen_q", [1, 130])
def test_pages(path: int, seqlen_q: int) -> None:
    x = tensors(seqlen_q, 1, 8, 128, torch.bfloat16)
    pages = torch.randperm(BATCH * CAPACITY // PAGE, device=CUDA).int().view(BATCH, -1)
    paged = {n: torch.empty(pages.numel(), PAGE, 2, 128, device=CUDA, dtype=torch.bfloat16) for n in "kv"}
    for n, b in itertools.product("kv", range(BATCH)):
        paged[n][pages[b].long()] = x[f"{n}_cache"][b].unflatten(0, (-1, PAGE))
    got = flash_attn_with_kvcache(
        x["q"], paged["k"], paged["v"], x["k"], x["v"], causal=True, block_table=pages,
        return_softmax_lse=True, cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA),
    )  # fmt: skip
    for n, b in itertools.product("kv", range(BATCH)):
        x[f"{n}_cache"][b, LENGTHS[b]] = x[n][b, 0]
        assert torch.equal(paged[n][pages[b].long()].flatten(0, 1), x[f"{n}_cache"][b])
    check(got, x["q"], x["k_cache"], x["v_cache"], [n + 1 for n in LENGTHS], dict(causal=True))


def test_the_layers_of_a_step_and_the_next_step(path: int) -> None:
    """Tables are kept for a step's layers and built again when cache_seqlens changes in place."""
    x = tensors(1, 1, 8, 128, torch.bfloat16)
    cache_seqlens = torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)
    for step in range(2):
        for _ in range(2):
            got = flash_attn_with_kvcache(**x, cache_seqlens=cache_seqlens, return_softmax_lse=True)
            lengths = [n + step + 1 for n in LENGTHS]
            check(got, x["q"], x["k_cache"], x["v_cache"], lengths, {})
        cache_seqlens += 1
