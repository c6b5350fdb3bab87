"""flash_attn_with_kvcache on the kernels: split-KV, prefill, pages, against the reference on each cache."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gpu_cases import CUDA, poisoned
from numerics import assert_close
from torch import Tensor

from flash_attn import (
    _decode_again,
    flash_attn_func,
    flash_attn_shared_prompt_with_kvcache,
    flash_attn_with_kvcache,
    reference,
)
from flash_attn._calls import varlen_segments
from flash_attn.layers.rotary import apply_rotary_emb


@pytest.fixture(autouse=True, params=["kernels", "op"])
def decode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries run on the decode kernels, or where Triton is missing through the op."""
    monkeypatch.setenv("FLASH_ATTN_DECODE", "op" if request.param == "op" else "")


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


@pytest.mark.parametrize("kind", ["plain", "pages", "places", "one split"])
def test_calls_like_one_before(path: int, kind: str) -> None:
    """New tensors and lengths in launches that are kept, call by call and in a graph: bit by bit what a call
    gives that is looked at anew."""
    x = tensors(1, 1, 8, 128, torch.bfloat16)
    angle = torch.randn(CAPACITY, 32, device=CUDA)
    options: dict[str, Any] = dict(rotary_cos=angle.cos().bfloat16(), rotary_sin=angle.sin().bfloat16())
    options |= dict(causal=True, return_softmax_lse=True, num_splits=1 if kind == "one split" else 0)
    places = torch.randperm(BATCH, device=CUDA).int()
    if kind == "places":
        options |= dict(cache_batch_idx=places, cache_leftpad=torch.zeros_like(places))
    if kind == "pages":
        options["block_table"] = torch.randperm(BATCH * CAPACITY // PAGE, device=CUDA).int().view(BATCH, -1)
        for n in ("k_cache", "v_cache"):
            x[n] = x[n].reshape(-1, PAGE, 2, 128)

    def results(y: dict[str, Tensor], seqlens: Tensor) -> list[Tensor]:
        out, lse = flash_attn_with_kvcache(**y, cache_seqlens=seqlens, **options)
        return [out, lse, y["k_cache"], y["v_cache"]]

    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)
    for step in range(3):
        given = {n: torch.randn_like(y) for n, y in x.items()}
        lengths = lengths.roll(1) + step
        _decode_again._known.clear()
        new = results({n: y.clone() for n, y in given.items()}, lengths)
        torch.testing.assert_close(results(given, lengths.clone()), new, rtol=0, atol=0)
    if CUDA == "cpu":
        return
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    again = {n: torch.randn_like(y) for n, y in x.items()}
    source = {n: y.clone() for n, y in again.items()}
    with torch.cuda.graph(graph):
        found = results(again, lengths)
    lengths.copy_(lengths.roll(2))
    graph.replay()
    _decode_again._known.clear()
    torch.testing.assert_close(found, results(source, lengths), rtol=0, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_rotary(path: int, interleaved: bool, paged: bool) -> None:
    """Append and turn; the same from rows turned before the call."""
    x = tensors(2, 2, 8, 128, torch.bfloat16)
    angle = torch.randn(CAPACITY, 32, device=CUDA)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    cache_seqlens = torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)
    options: dict[str, Any] = dict(causal=True, cache_seqlens=cache_seqlens, return_softmax_lse=True)
    if paged:
        options["block_table"] = torch.arange(BATCH * CAPACITY // PAGE, device=CUDA).int().view(BATCH, -1)
        for n in ("k_cache", "v_cache"):
            x[n] = x[n].reshape(-1, PAGE, 2, 128)
    turned = {n: y.clone() for n, y in x.items()}
    for n in "qk":
        turned[n] = apply_rotary_emb(x[n], cos, sin, interleaved, seqlen_offsets=cache_seqlens)
    wanted = flash_attn_with_kvcache(**turned, **options)
    with poisoned():
        got = flash_attn_with_kvcache(
            **x, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved, **options
        )
    for n in ("k_cache", "v_cache"):  # a rounding apart: a product may be fused with its sum
        torch.testing.assert_close(x[n], turned[n], rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize(("num_sequences", "seqlen_q"), [(3, 1), (16, 1), (4, 2)])
def test_sequences_on_one_prompt(path: int, num_sequences: int, seqlen_q: int) -> None:
    """Two prompts of `num_sequences` each, against the reference on prompt and own keys joined."""
    batch, longest, capacity, num_heads = 2 * num_sequences, 700, 300, 16
    generator = torch.Generator(CUDA).manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA, dtype=torch.bfloat16, generator=generator)

    q = make(batch, seqlen_q, num_heads, 128)
    new = make(batch, seqlen_q, 2, 128), make(batch, seqlen_q, 2, 128)
    prompts = make(2, longest, 2, 128), make(2, longest, 2, 128)
    own = make(batch, capacity, 2, 128), make(batch, capacity, 2, 128)
    prompt_lens, own_lens = [700, 333], [(37 * b) % 290 for b in range(batch)]
    joined = [make(batch, longest + capacity, 2, 128) for _ in range(2)]
    lengths = []
    for b in range(batch):
        p, n = prompt_lens[b // num_sequences], own_lens[b]
        for x, prompt, cache, added in zip(joined, prompts, own, new, strict=True):
            x[b, : p + n + seqlen_q] = torch.cat((prompt[b // num_sequences, :p], cache[b, :n], added[b]))
        lengths.append(p + n + seqlen_q)
    with poisoned():
        got = flash_attn_shared_prompt_with_kvcache(
            q, *prompts, *own, *new, prompt_seqlens=torch.tensor(prompt_lens, device=CUDA),
            cache_seqlens=torch.tensor(own_lens, device=CUDA), causal=True, return_softmax_lse=True,
        )  # fmt: skip
    check(got, q, *joined, lengths, dict(causal=True))


@pytest.mark.parametrize("causal", [False, True])
def test_alibi(path: int, causal: bool) -> None:
    """Against flash_attn_func in fp64 on the CPU, sequence by sequence."""
    x = tensors(2, 0, 8, 128, torch.bfloat16)
    slopes = torch.rand(BATCH, 8, device=CUDA)
    cache_seqlens = torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)
    got = flash_attn_with_kvcache(
        **x, cache_seqlens=cache_seqlens, alibi_slopes=slopes, causal=causal, return_softmax_lse=True
    )
    for b, n in enumerate(LENGTHS):
        rows = x["q"][b : b + 1], x["k_cache"][b : b + 1, :n], x["v_cache"][b : b + 1, :n]
        options = dict(causal=causal, alibi_slopes=slopes[b].cpu(), return_attn_probs=True)
        out, lse, _ = flash_attn_func(*(y.double().cpu() for y in rows), **options)
        torch.testing.assert_close(got[0][b].cpu().double(), out[0], rtol=2**-6, atol=2**-7)
        torch.testing.assert_close(got[1][b].cpu().double(), lse[0], rtol=1e-4, atol=1e-4)


def test_tables_of_lengths_are_of_the_stream_that_made_them(path: int) -> None:
    """Another stream might read a table that this one has yet to write: it makes its own."""
    cu_seqlens = torch.tensor([0, 5, 9], dtype=torch.int32, device=CUDA)
    here = varlen_segments(cu_seqlens, cu_seqlens)
    assert varlen_segments(cu_seqlens, cu_seqlens) is here
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        there = varlen_segments(cu_seqlens, cu_seqlens)
        assert varlen_segments(cu_seqlens, cu_seqlens) is there
    torch.cuda.current_stream().wait_stream(stream)
    assert there is not here and torch.equal(there, here)
    cu_seqlens[1] = 4
    assert varlen_segments(cu_seqlens, cu_seqlens)[0].tolist() == [0, 4, 0, 0, 0, 4]


@pytest.mark.multi_gpu
def test_on_a_gpu_that_is_not_the_current_one() -> None:
    x = tensors(1, 1, 8, 128, torch.bfloat16)
    there = {name: y.to("cuda:1") for name, y in x.items()}
    lengths = torch.tensor([700, 0, 1023, 1, 300], dtype=torch.int32)
    wanted = flash_attn_with_kvcache(**x, cache_seqlens=lengths.to(CUDA))
    with torch.cuda.device(0):
        got = flash_attn_with_kvcache(**there, cache_seqlens=lengths.to("cuda:1"))
    torch.testing.assert_close(got.cpu(), wanted.cpu(), rtol=0, atol=0)
    assert torch.equal(there["k_cache"].cpu(), x["k_cache"].cpu())
