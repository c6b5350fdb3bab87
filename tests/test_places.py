"""Packed sequences whose keys lie in pages, behind padding, or are fewer than cu_seqlens_k says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn import _places, flash_attn_varlen_func
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

H, HK, D, PAGE = 4, 2, 8, 4
Q_LENS, K_LENS = [3, 1, 2], [9, 0, 5]
TABLE = torch.tensor([[5, 0, 3], [1, 1, 1], [2, 4, 99]], dtype=torch.int32)  # the last one is never used


def cu(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def paged() -> tuple[Tensor, Tensor, Tensor]:
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    return make(sum(Q_LENS), H, D), make(6, PAGE, HK, D), make(6, PAGE, HK, D)


def rows_of(pages: Tensor, b: int, n: int) -> Tensor:
    return pages[TABLE[b].long().clamp(max=5)].flatten(0, 1)[:n]


OPTIONS = [{}, dict(causal=True), dict(causal=True, window_size=(3, 0)), dict(alibi_slopes=torch.rand(H))]


@pytest.mark.parametrize("options", OPTIONS)
def test_pages_equal_rows(options: dict[str, Any]) -> None:
    q, k, v = paged()
    numbers = (cu(Q_LENS), cu(K_LENS), 3, 9)
    found = flash_attn_varlen_func(q, k, v, *numbers, block_table=TABLE, return_attn_probs=True, **options)
    joined = [torch.cat([rows_of(x, b, n) for b, n in enumerate(K_LENS)]) for x in (k, v)]
    wanted = flash_attn_varlen_func(q, *joined, *numbers, return_attn_probs=True, **options)
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("given", ["seqused_k", "leftpad_k", "both", "seqused_k, pages"])
def test_used_keys_and_padding(given: str, causal: bool) -> None:
    q, k, v = paged()
    used, pad = torch.tensor([4, 0, 4], dtype=torch.int32), torch.tensor([2, 0, 3], dtype=torch.int32)
    joined = [torch.cat([rows_of(x, b, n) for b, n in enumerate(K_LENS)]) for x in (k, v)]
    keys = (k, v) if "pages" in given else joined
    extra: dict[str, Any] = {"block_table": TABLE} if "pages" in given else {}
    if given != "leftpad_k":
        extra["seqused_k"] = used
    if given in ("leftpad_k", "both"):
        extra["leftpad_k"] = pad
    out, lse, _, _ = _flash_attn_varlen_forward(
        q, *keys, cu(Q_LENS), cu(K_LENS), 3, 9, 0.0, 0.3, causal, **extra
    )
    begin = [int(pad[b]) if "leftpad_k" in extra else 0 for b in range(3)]
    end = [int(used[b]) if "seqused_k" in extra else n for b, n in enumerate(K_LENS)]  # padding counts
    own = [x.split(K_LENS) for x in joined]
    rows = [torch.cat([x[b][begin[b] : end[b]] for b in range(3)]) for x in own]
    lens = [e - b for b, e in zip(begin, end, strict=True)]
    wanted = _flash_attn_varlen_forward(q, *rows, cu(Q_LENS), cu(lens), 3, 9, 0.0, 0.3, causal)
    torch.testing.assert_close((out, lse), wanted[:2], rtol=1e-11, atol=1e-11)


def test_more_padding_than_keys_is_no_key() -> None:
    """Not fewer than none, which would take the next sequence's rows away."""
    q, k, v = paged()
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    lens, used, pad = [4, 1, 5], [0, 1, 5], [3, 0, 2]
    ints = lambda x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    arguments = (cu(Q_LENS), cu(lens))
    out, lse, _, _ = _flash_attn_varlen_forward(
        q, k, v, *arguments, 3, 5, 0.0, 0.3, False, leftpad_k=ints(pad), seqused_k=ints(used)
    )
    assert not out[:3].any() and bool((lse[:, :3] == -torch.inf).all())
    rows = [torch.cat([x[4:5], x[7:10]]) for x in (k, v)]
    wanted = _flash_attn_varlen_forward(q, *rows, cu(Q_LENS), cu([0, 1, 3]), 3, 3, 0.0, 0.3, False)
    torch.testing.assert_close((out, lse), wanted[:2], rtol=1e-11, atol=1e-11)
    _, kept, segments = _places.find(q, k, v, *arguments, 5, None, ints(pad), ints(used))
    assert segments[:, 4:].tolist() == [[3, 3], [4, 5], [7, 10]]
    torch.testing.assert_close(kept[[4, 7, 8, 9]], v[[4, 7, 8, 9]])


def test_nan_between_the_sequences_reaches_nothing() -> None:
    """Tiles of the kernels span several short sequences, and what lies between them."""
    q, k, v = paged()
    table, used = TABLE.clamp(max=5), [range(9), [], range(5)]
    seen = torch.zeros(6, PAGE, dtype=torch.bool)
    for b, positions in enumerate(used):
        for i in positions:
            seen[table[b, i // PAGE], i % PAGE] = True
    poisoned = [x.where(seen[..., None, None], torch.nan) for x in (k, v)]
    numbers = (cu(Q_LENS), cu(K_LENS))
    found = flash_attn_varlen_func(q, *poisoned, *numbers, 3, 9, block_table=table)
    torch.testing.assert_close(found, flash_attn_varlen_func(q, k, v, *numbers, 3, 9, block_table=table))
    _, rows, segments = _places.find(q, *poisoned, *numbers, 9, table, None, None)
    taken = torch.cat([rows[begin:end] for begin, end in segments[:, 4:].tolist()])
    assert int(rows.isfinite().all(-1).all(-1).sum()) == len(rows) and int(
        (rows != 0).any(-1).any(-1).sum()
    ) == len(taken)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (dict(block_table=TABLE.long()), TypeError, "block_table must be an int32 tensor, got torch.int64"),
        (dict(block_table=TABLE[0]), ValueError, r"block_table must be \(batch, pages\) = \[3, \*\] on cpu"),
        (dict(block_table=TABLE[:, :2]), ValueError, r"keys must be within the \[8, 8, 8\] rows .*9, 0, 5"),
        (dict(block_table=TABLE + 2), ValueError, "block_table must be within k's 6 pages where keys are"),
        (dict(block_table=TABLE, k=torch.zeros(24, HK, D)), ValueError, r"k must be \(num_blocks, .*24, 2"),
        (dict(block_table=TABLE, k=None), TypeError, "k must be a tensor, got NoneType"),
        (dict(block_table=TABLE, v=None), TypeError, "v must be a tensor, got NoneType"),
        (dict(block_table=TABLE, v=torch.zeros(24, HK, D)), ValueError, r"v must be \(num_blocks, .*24, 2"),
        (
            dict(block_table=TABLE, v=torch.zeros(3, PAGE, HK, D, dtype=torch.float64)), ValueError,
            r"v must have k's \[6, 4\] pages and rows, got \[3, 4\]",
        ),
        (
            dict(block_table=TABLE, v=torch.zeros(6, 2, HK, D, dtype=torch.float64)), ValueError,
            r"v must have k's \[6, 4\] pages and rows, got \[6, 2\]",
        ),
        (dict(block_table=TABLE, q=None), TypeError, "q must be a tensor, got NoneType"),
        (dict(block_table=TABLE, q=[1.0]), TypeError, "q must be a tensor, got list"),
        (
            dict(block_table=TABLE, q=torch.tensor(1.0)), ValueError,
            r"q must be \(total_q, num_heads, head_dim\), got \[\]",
        ),
        (
            {n: torch.zeros(0, PAGE, HK, D, dtype=torch.float64) for n in "kv"}
            | dict(block_table=TABLE, cu_seqlens_k=cu([0, 0, 0])), ValueError,
            r"k must have a page, got \[0, 4, 2, 8\]",
        ),
    ],
)  # fmt: skip
def test_wrong_pages(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    q, k, v = paged()
    arguments = dict(q=q, k=k, v=v, cu_seqlens_q=cu(Q_LENS), cu_seqlens_k=cu(K_LENS), max_seqlen_q=3)
    with pytest.raises(kind, match=message):
        flash_attn_varlen_func(**{**arguments, **changes, "max_seqlen_k": 9})


@pytest.mark.parametrize("learns", ["q", "k", "v"])
def test_forward_only(learns: str) -> None:
    """As flash-attn does, tensors that require gradients are taken; their gradients are refused by name."""
    tensors = dict(zip("qkv", paged(), strict=True))
    numbers = (cu(Q_LENS), cu(K_LENS), 3, 9)
    wanted = flash_attn_varlen_func(*tensors.values(), *numbers, block_table=TABLE)
    tensors[learns].requires_grad_()
    given = dict(block_table=TABLE, return_attn_probs=True)
    out, lse, _ = flash_attn_varlen_func(*tensors.values(), *numbers, **given)  # type: ignore[arg-type]
    torch.testing.assert_close(out, wanted)
    for x in (out, lse):
        with pytest.raises(NotImplementedError, match=r"block_table, .* are forward only: no gradients"):
            x.sum().backward()
    with torch.no_grad():
        assert not flash_attn_varlen_func(*tensors.values(), *numbers, block_table=TABLE).requires_grad


def test_pages_are_checked_where_used_keys_are() -> None:
    q, k, v = paged()
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    table = ints(0, -1, 1, 99, 2, -1).view(3, 2)
    tail = (3, 8, 0.0, 0.3, False)
    few = dict(block_table=table, seqused_k=ints(3, 4, 0))
    found = _flash_attn_varlen_forward(q, k, v, cu(Q_LENS), cu([8, 8, 8]), *tail, **few)
    rows = [torch.cat([x[0, :3], x[1]]) for x in (k, v)]
    wanted = _flash_attn_varlen_forward(q, *rows, cu(Q_LENS), cu([3, 4, 0]), *tail)
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-11, atol=1e-11)
    many = dict(block_table=table, seqused_k=ints(8, 8, 8))
    with pytest.raises(ValueError, match=r"block_table must be within k's 6 pages .*, got \[\[0, -1"):
        _flash_attn_varlen_forward(q, k, v, cu(Q_LENS), cu([2, 2, 2]), *tail, **many)
    more = dict(block_table=TABLE.clamp(max=5), seqused_k=ints(0, 9, 0))
    with pytest.raises(ValueError, match=r"seqused_k must be at most max_seqlen_k = 8, got \[0, 9, 0\]"):
        _flash_attn_varlen_forward(q, k, v, cu(Q_LENS), cu([8, 8, 8]), *tail, **more)
    for wrong in (None, torch.tensor(1.0)):
        with pytest.raises((TypeError, ValueError), match=r"q must be (a tensor, got NoneType|\(total_q)"):
            _flash_attn_varlen_forward(wrong, k, v, cu(Q_LENS), cu([8, 8, 8]), *tail, **few)


def test_wrong_places() -> None:
    q, k, v = paged()
    flat = k.flatten(0, 1), v.flatten(0, 1)
    arguments = (cu(Q_LENS), cu(K_LENS), 3, 9, 0.0, 0.3, False)
    with pytest.raises(NotImplementedError, match="block_table cannot be combined with leftpad_k"):
        pad = torch.zeros(3, dtype=torch.int32)
        _flash_attn_varlen_forward(q, k, v, *arguments, block_table=TABLE, leftpad_k=pad)
    with pytest.raises(ValueError, match=r"keys must be within .* got \[10, 0, 0\] behind \[0, 0, 0\]"):
        used = torch.tensor([10, 0, 0], dtype=torch.int32)
        _flash_attn_varlen_forward(q, *flat, *arguments, seqused_k=used)
    for name in ("leftpad_k", "seqused_k"):
        with pytest.raises(ValueError, match=rf"{name} must be >= 0, got \[1, -1, 0\]"):
            extra: dict[str, Any] = {name: torch.tensor([1, -1, 0], dtype=torch.int32)}
            _flash_attn_varlen_forward(q, *flat, *arguments, **extra)
    with pytest.raises(ValueError, match=r"keys must be within .* got \[0, 0, 5\] behind \[10, 0, 0\]"):
        pad = torch.tensor([10, 0, 0], dtype=torch.int32)
        _flash_attn_varlen_forward(q, *flat, *arguments, leftpad_k=pad)
    with pytest.raises(TypeError, match="seqused_k must be an int32 tensor, got list"):
        _flash_attn_varlen_forward(q, *flat, *arguments, seqused_k=[1, 2, 3])
