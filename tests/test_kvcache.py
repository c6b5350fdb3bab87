"""flash_attn_with_kvcache against dense attention on the keys that each sequence has, in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flash_attn import (
    _kvcache,
    _kvcache_checks,
    _kvcache_op,
    checks,
    flash_attn_func,
    flash_attn_with_kvcache,
)
from flash_attn._kvcache_op import choose_splits
from flash_attn.layers.rotary import apply_rotary_emb

B, CAPACITY, H, HK, D = 3, 24, 4, 2, 8


def tensors(seqlen_q: int = 1, new: int = 0, blocks: int = B, length: int = CAPACITY) -> dict[str, Any]:
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    made = dict(
        q=make(B, seqlen_q, H, D), k_cache=make(blocks, length, HK, D), v_cache=make(blocks, length, HK, D)
    )
    if new:
        made |= dict(k=make(B, new, HK, D), v=make(B, new, HK, D))
    return made


def expected(q: Tensor, keys: list[Tensor], values: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Dense attention of each sequence on its own keys (n, Hk, D)."""
    results = [
        flash_attn_func(q[b : b + 1], k[None], v[None], return_attn_probs=True, **options)[:2]
        for b, (k, v) in enumerate(zip(keys, values, strict=True))
    ]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def check(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-10, atol=1e-10)


OPTIONS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(4, 1)),
    "causal window": dict(causal=True, window_size=(6, -1)),
    "softcap, scale": dict(softcap=3.0, softmax_scale=0.7),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("seqlen_q", [1, 3, 40])
@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("num_splits", [0, 5])
def test_ragged_caches(options: dict[str, Any], seqlen_q: int, new: int, num_splits: int) -> None:
    x = tensors(seqlen_q, new)
    lengths = [9, 0, 20]
    before = {name: value.clone() for name, value in x.items()}
    got = flash_attn_with_kvcache(
        **x, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), num_splits=num_splits,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    rows = [[], []]
    for b, length in enumerate(lengths):
        for kind, name in enumerate("kv"):
            own = before[f"{name}_cache"][b, :length]
            rows[kind].append(torch.cat((own, x[name][b])) if new else own)
            if new:
                torch.testing.assert_close(
                    x[f"{name}_cache"][b, length : length + new], x[name][b], rtol=0, atol=0
                )
                untouched = x[f"{name}_cache"][b].clone()
                untouched[length : length + new] = before[f"{name}_cache"][b, length : length + new]
                torch.testing.assert_close(untouched, before[f"{name}_cache"][b], rtol=0, atol=0)
    check(got, expected(x["q"], *rows, **options))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 4, 40])
def test_pages(seqlen_q: int, causal: bool) -> None:
    page = 8
    x = tensors(seqlen_q, 2, blocks=10, length=page)
    table = torch.tensor([[7, 2, 9], [0, 4, 1], [7, 3, 5]], dtype=torch.int32)  # page 7 is shared
    lengths = [15, 0, 22]
    got = flash_attn_with_kvcache(
        **x, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), block_table=table, causal=causal,
        return_softmax_lse=True,
    )  # fmt: skip
    rows = [
        [x[f"{name}_cache"][table[b].long()].flatten(0, 1)[: n + 2] for b, n in enumerate(lengths)]
        for name in "kv"
    ]
    for kind, name in enumerate("kv"):
        for b, n in enumerate(lengths):
            torch.testing.assert_close(rows[kind][b][n:], x[name][b], rtol=0, atol=0)
    check(got, expected(x["q"], *rows, causal=causal))


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_batch_index_and_left_padding(seqlen_q: int) -> None:
    x = tensors(seqlen_q, blocks=5)
    index, lengths, leftpad = [4, 0, 2], [9, 24, 20], [3, 0, 20]
    got = flash_attn_with_kvcache(
        **x, causal=True, return_softmax_lse=True, cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        cache_batch_idx=torch.tensor(index, dtype=torch.int32),
        cache_leftpad=torch.tensor(leftpad, dtype=torch.int32),
    )  # fmt: skip
    rows = [[x[f"{n}_cache"][i, a:b] for i, a, b in zip(index, leftpad, lengths, strict=True)] for n in "kv"]
    check(got, expected(x["q"], *rows, causal=True))


@pytest.mark.parametrize("lengths", [[9, -1, 20], [-1, -1, -1], [23, 24, -1]])
@pytest.mark.parametrize("paged", [False, True])
def test_padding_of_a_batch_writes_nothing(
    lengths: list[int], paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers pads captured batches with sequences of -1 keys and pages -1. As on GPUs: unread."""
    monkeypatch.setattr(checks, "values_are_read", lambda x: False)
    x = tensors(1, 1, *((9, 8) if paged else ()))
    table = torch.arange(9).int().view(3, 3)
    extra: dict[str, Any] = {}
    if paged:
        extra["block_table"] = table.where((torch.tensor(lengths) >= 0)[:, None], -1).int()
    cache = {n: x[f"{n}_cache"].clone() for n in "kv"}
    got = flash_attn_with_kvcache(**x, cache_seqlens=torch.tensor(lengths), return_softmax_lse=True, **extra)
    for b, length in enumerate(lengths):
        for n in "kv":
            if 0 <= length < CAPACITY:
                rows = cache[n].view(B, CAPACITY, HK, D) if paged else cache[n]
                rows[b, length] = x[n][b, 0]
        if length < 0:
            assert torch.equal(got[0][b], torch.zeros(1, H, D)) and got[1][b].isneginf().all()
    assert all(torch.equal(x[f"{n}_cache"], cache[n]) for n in "kv")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 3, 40])
def test_alibi(options: dict[str, Any], per_sequence: bool, seqlen_q: int) -> None:
    """Distances count among a sequence's keys; lse as of flash_attn_func, whose causal bias is absolute."""
    x = tensors(seqlen_q, blocks=5)
    index, lengths, leftpad = [4, 0, 2], [9, 24, 20], [3, 0, 20]
    slopes = torch.rand(*([B] if per_sequence else []), H)
    got = flash_attn_with_kvcache(
        **x, return_softmax_lse=True, cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        cache_batch_idx=torch.tensor(index, dtype=torch.int32), alibi_slopes=slopes,
        cache_leftpad=torch.tensor(leftpad, dtype=torch.int32), **options,
    )  # fmt: skip
    for b, (i, begin, end) in enumerate(zip(index, leftpad, lengths, strict=True)):
        keys = [x[f"{n}_cache"][i : i + 1, begin:end] for n in "kv"]
        own = dict(alibi_slopes=slopes[b : b + 1] if per_sequence else slopes, **options)
        out, lse, _ = flash_attn_func(x["q"][b : b + 1], *keys, return_attn_probs=True, **own)
        if 0 < end - begin <= options.get("window_size", (0, 0))[0]:
            lse = got[1][b : b + 1]  # a window of all keys is none there; here that of the cache counts
        check((got[0][b : b + 1], got[1][b : b + 1]), (out, lse))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(interleaved: bool, causal: bool) -> None:
    x = tensors(3, 3)
    angle = torch.randn(40, D // 2, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    lengths = torch.tensor([9, 0, 20], dtype=torch.int32)
    cache = {n: x[f"{n}_cache"].clone() for n in "kv"}
    got = flash_attn_with_kvcache(
        **x, cache_seqlens=lengths, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved,
        causal=causal, return_softmax_lse=True,
    )  # fmt: skip
    k = apply_rotary_emb(x["k"], cos, sin, interleaved, seqlen_offsets=lengths)
    if causal:
        q = apply_rotary_emb(x["q"], cos, sin, interleaved, seqlen_offsets=lengths)
    else:  # every row at the first new position
        rows = [
            apply_rotary_emb(x["q"][:, i : i + 1], cos, sin, interleaved, seqlen_offsets=lengths)
            for i in range(3)
        ]
        q = torch.cat(rows, 1)
    keys = [torch.cat((cache["k"][b, :n], k[b])) for b, n in enumerate(lengths.tolist())]
    values = [torch.cat((cache["v"][b, :n], x["v"][b])) for b, n in enumerate(lengths.tolist())]
    check(got, expected(q, keys, values, causal=causal))


def test_rotary_counts_from_the_caches_first_row_under_left_padding() -> None:
    x = tensors(2, 2)
    angle = torch.randn(40, D // 2, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    lengths, leftpad = torch.tensor([9, 4, 20]), torch.tensor([3, 4, 0])
    cache = {n: x[f"{n}_cache"].clone() for n in "kv"}
    got = flash_attn_with_kvcache(
        **x, cache_seqlens=lengths.int(), cache_leftpad=leftpad.int(), rotary_cos=cos, rotary_sin=sin,
        rotary_interleaved=False, causal=True, return_softmax_lse=True,
    )  # fmt: skip
    q, k = (apply_rotary_emb(x[name], cos, sin, seqlen_offsets=lengths) for name in "qk")
    begins_ends = list(zip(leftpad.tolist(), lengths.tolist(), strict=True))
    keys = [torch.cat((cache["k"][b, i:n], k[b])) for b, (i, n) in enumerate(begins_ends)]
    values = [torch.cat((cache["v"][b, i:n], x["v"][b])) for b, (i, n) in enumerate(begins_ends)]
    check(got, expected(q, keys, values, causal=True))


def test_lengths_as_int_and_none() -> None:
    x = tensors(2)
    for given, length in ((7, 7), (None, CAPACITY)):
        got = flash_attn_with_kvcache(**x, cache_seqlens=given, return_softmax_lse=True)
        rows = [list(x[f"{n}_cache"][:, :length]) for n in "kv"]
        check(got, expected(x["q"], *rows))


@pytest.mark.parametrize("make", [np.int64, np.int32, np.array])
def test_a_number_of_numpy_is_a_length(make: Any) -> None:
    x = tensors(1)
    assert torch.equal(
        flash_attn_with_kvcache(**x, cache_seqlens=make(7)), flash_attn_with_kvcache(**x, cache_seqlens=7)
    )


@pytest.mark.parametrize(
    ("number", "kind"), [(np.array(7.0), "ndarray"), (np.float32(7), "float32"), (7.0, "float")]
)
def test_a_number_that_is_not_whole_is_no_length(number: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"cache_seqlens must be an int32 tensor, got {kind}"):
        flash_attn_with_kvcache(**tensors(1), cache_seqlens=number)


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_one_cache_expanded_to_all_sequences_is_read(seqlen_q: int) -> None:
    x = tensors(seqlen_q)
    for name in ("k_cache", "v_cache"):
        x[name] = x[name][:1].expand(B, -1, -1, -1)
    got = flash_attn_with_kvcache(**x, cache_seqlens=ints(B) + 7, return_softmax_lse=True, causal=True)
    rows = [[x[name][b, :7] for b in range(B)] for name in ("k_cache", "v_cache")]
    check(got, expected(x["q"], *rows, causal=True))


def test_a_slice_of_a_longer_cache_is_written_in_place() -> None:
    x = tensors(1, 2)
    whole = {n: torch.randn(B, 2 * CAPACITY, HK, D, dtype=torch.float64) for n in "kv"}
    for n in "kv":
        whole[n][:, :CAPACITY] = x[f"{n}_cache"]
        x[f"{n}_cache"] = whole[n][:, :CAPACITY]
    got = flash_attn_with_kvcache(**x, cache_seqlens=5, return_softmax_lse=True)
    rows = [[torch.cat((whole[n][b, :5], x[n][b])) for b in range(B)] for n in "kv"]
    for n in "kv":
        torch.testing.assert_close(whole[n][:, 5:7], x[n], rtol=0, atol=0)
    check(got, expected(x["q"], *rows))


def test_values_of_another_head_dim() -> None:
    x = tensors(1)
    x["v_cache"] = x["v_cache"][..., :5].contiguous()
    got = flash_attn_with_kvcache(**x, cache_seqlens=7, return_softmax_lse=True)
    rows = [list(x[f"{n}_cache"][:, :7]) for n in "kv"]
    check(got, expected(x["q"], *rows))


def test_splits_fill_the_gpu() -> None:
    assert choose_splits(1, 8, 131072, 132) == 33
    assert choose_splits(128, 8, 131072, 132) == 1
    assert choose_splits(1, 8, 1024, 132) == 4
    assert choose_splits(1, 1, 100, 132) == 1
    assert choose_splits(1, 1, 1 << 20, 132) == 128


def ints(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def test_strides_that_no_rows_have() -> None:
    x = tensors(1)
    x["k_cache"] = x["k_cache"].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(
        ValueError, match="k_cache must have a batch stride that is a multiple of its row stride"
    ):
        flash_attn_with_kvcache(**x, cache_seqlens=5)


def test_pages_behind_the_keys_may_be_any() -> None:
    x = tensors(1, blocks=2, length=8)
    x["q"] = x["q"][:2]
    results = [
        flash_attn_with_kvcache(
            **x, cache_seqlens=7, block_table=torch.tensor([[1, last], [0, last]], dtype=torch.int32)
        )
        for last in (-1, 99, 0)
    ]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[2])


def test_a_batch_without_sequences() -> None:
    x = tensors(2, 1)
    none = {name: value[:0] if name in ("q", "k", "v") else value for name, value in x.items()}
    before = x["k_cache"].clone()
    for place in ({"cache_batch_idx": ints(0)}, {"block_table": ints(0, 2)}):
        out, lse = flash_attn_with_kvcache(**none, cache_seqlens=ints(0), return_softmax_lse=True, **place)
        assert out.shape == (0, 2, H, D) and lse.shape == (0, H, 2)
    assert torch.equal(x["k_cache"], before)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="eager", dynamic=dynamic)
    lengths = torch.tensor([9, 0, 20], dtype=torch.int32)
    x, y = tensors(1, 2), tensors(1, 2)
    out = compiled(**x, cache_seqlens=lengths, causal=True)
    assert torch.equal(out, flash_attn_with_kvcache(**y, cache_seqlens=lengths, causal=True))
    assert torch.equal(x["k_cache"], y["k_cache"]) and torch.equal(x["v_cache"], y["v_cache"])


def test_caches_of_other_strides_are_not_taken_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences, or two with a gap: as many rows, which are remembered by what they are made of."""
    known: dict[Any, Any] = {}
    monkeypatch.setattr(
        _kvcache_op,
        "_remembered",
        lambda *key_and_make: known.setdefault(key_and_make[:3], key_and_make[3]()),
    )
    whole = tensors(1, blocks=3, length=10)
    index, lengths = ints(3) + 1, ints(3) + 7
    for caches in (lambda x: x, lambda x: x.flatten(0, 1).unfold(0, 10, 20).permute(0, 3, 1, 2)):
        k, v = (caches(whole[f"{n}_cache"]) for n in "kv")
        got = flash_attn_with_kvcache(
            whole["q"], k, v, cache_seqlens=lengths, cache_batch_idx=index, return_softmax_lse=True
        )
        check(got, expected(whole["q"], *[[x[1, :7]] * 3 for x in (k, v)]))


@pytest.mark.parametrize("window_size", [(-1, 2**31 - 1), (2**40, 0), (50, 2**63 - 1)])
def test_windows_past_every_key_are_unlimited(
    window_size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels' int32 does not hold such sides: they are -1 before any kernel sees them."""
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 20, 2, 8), torch.randn(2, 20, 2, 8)
    lengths = torch.tensor([20, 7], dtype=torch.int32)
    sides: list[tuple[int, int]] = []
    visible = _kvcache_op.visible
    monkeypatch.setattr(_kvcache_op, "visible", lambda *a: sides.append(a[-1]) or visible(*a))
    found = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, window_size=window_size)
    assert sides == [(-1, 0 if window_size[1] == 0 else -1)]
    right = 0 if window_size[1] == 0 else -1
    torch.testing.assert_close(
        found, flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, window_size=(-1, right))
    )


def test_a_number_is_checked_where_tensors_are_not_read() -> None:
    for before in (-1, 22):
        with pytest.raises(ValueError, match=rf"within the cache's 24 rows, got {before} \+ 3"):
            _kvcache_checks.length(before, 3, 24)
    _kvcache_checks.length(21, 3, 24)


@pytest.mark.parametrize("before", [None, 22])
def test_a_number_is_checked_before_the_kernels_run(
    before: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kvcache._decode, "usable", lambda *_: True)
    monkeypatch.setattr(checks, "values_are_read", lambda _: False)
    q, cache, new = torch.randn(2, 3, 4, 8), torch.zeros(2, 24, 2, 8), torch.randn(2, 3, 2, 8)
    with pytest.raises(ValueError, match=rf"within the cache's 24 rows, got {before or 24} \+ 3"):
        flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=before)
