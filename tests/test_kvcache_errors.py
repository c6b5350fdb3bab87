"""flash_attn_with_kvcache refuses wrong arguments by name, and two sequences that append to one row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_kvcache import HK, D, ints, tensors

from flash_attn import flash_attn_with_kvcache

FOUR = torch.zeros(4, 24, HK, D).double()
TABLES = {"rotary_cos": torch.zeros(40, 4), "rotary_sin": torch.zeros(40, 4)}
META = torch.zeros(3, 2, HK, D, dtype=torch.float64, device="meta")
WRONG = [
    ({"k": None}, ValueError, "k and v must be given together"),
    ({"rotary_cos": torch.zeros(40, 4)}, ValueError, "rotary_cos and rotary_sin must be given together"),
    ({"k": None, "v": None} | TABLES, ValueError, "rotary_cos must come with k and v"),
    ({"cache_seqlens": 23}, ValueError, r"within the cache's 24 rows, got \[25, 25, 25\]"),
    ({"cache_seqlens": [1, 2, 3]}, TypeError, "cache_seqlens must be an int32 tensor, got list"),
    ({"cache_seqlens": ints(2)}, ValueError, r"cache_seqlens must be \(batch,\) = \[3\] on cpu, got \[2\]"),
    ({"cache_leftpad": ints(3) + 9}, ValueError, "cache_leftpad must be within"),
    ({"k_cache": torch.zeros(3, 24, 16)}, ValueError, r"k_cache must be \(batch, .*got \[3, 24, 16\]"),
    ({"v_cache": FOUR[:3, :23]}, ValueError, "v_cache must have k_cache's rows and heads"),
    ({"v_cache": FOUR}, ValueError, r"v_cache must have k_cache's \[3, 24\] rows, got \[4, 24\]"),
    ({"k": torch.zeros(3, 2, 1, D)}, ValueError, r"k must be .* = \[3, \*, 2, 8\], got \[3, 2, 1, 8\]"),
    ({"v": torch.zeros(3, 1, HK, D)}, ValueError, "v must have k's 2 rows, got 1"),
    ({"k_cache": FOUR, "v_cache": FOUR}, ValueError, "k_cache must have q's batch size 3"),
    ({"alibi_slopes": torch.zeros(3)}, ValueError, r"alibi_slopes must be \(num_heads,\) or .* \(3, 4\)"),
    ({"block_table": torch.zeros(3, 1)}, TypeError, "block_table must be an int32 tensor, got torch.float32"),
    ({"block_table": ints(2, 1)}, ValueError, r"block_table must be .*got \[2, 1\]"),
    (
        {"block_table": ints(3, 1), "cache_leftpad": ints(3)},
        NotImplementedError,
        "block_table cannot be combined with cache_batch_idx or cache_leftpad",
    ),
    ({"num_splits": -1}, ValueError, "num_splits must be >= 0, got -1"),
    ({"num_splits": 129}, ValueError, r"num_splits must be at most 128 \(0: chosen\), got 129"),
    ({"cache_seqlens": 2**70}, ValueError, "cache_seqlens must be an int of 64 bits, got 118"),
    ({"cache_seqlens": 5.0}, TypeError, "cache_seqlens must be an int32 tensor, got float"),
    (
        {"k_cache": torch.zeros(0, 8, HK, D), "v_cache": torch.zeros(0, 8, HK, D), "block_table": ints(3, 1)},
        ValueError,
        r"k_cache must have a page, got \[0, 8, 2, 8\]",
    ),
    ({"k_cache": torch.zeros(0, 8, HK, D)}, ValueError, r"k_cache must have a sequence, got \[0, 8, 2, 8\]"),
    (
        {"k_cache": torch.zeros(1, 24, HK, D, dtype=torch.float64).expand(3, -1, -1, -1)},
        ValueError,
        r"k_cache must have memory for each sequence, row and head to append to, got strides \(0, 16, 8, 1\)",
    ),
    (
        {"k_cache": torch.zeros(3, 24, 1, D, dtype=torch.float64).expand(-1, -1, HK, -1)},
        ValueError,
        r"k_cache must have memory for each .*, got strides \(192, 8, 0, 1\)",
    ),
    (
        {"v_cache": torch.zeros(3, 1, HK, D, dtype=torch.float64).expand(-1, 24, -1, -1)},
        ValueError,
        r"v_cache must have memory for each .*, got strides \(16, 0, 8, 1\)",
    ),
    ({"block_table": ints(3, 1).to("meta")}, ValueError, "block_table must be on q's device cpu, got meta"),
    ({"q": None}, TypeError, "q must be a tensor, got NoneType"),
    ({"cache_seqlens": -1}, ValueError, r"within the cache's 24 rows, got \[1, 1, 1\]"),
    ({"cache_batch_idx": ints(3) + 3}, ValueError, r"cache_batch_idx must be .* 3 seq.*, got \[3, 3, 3\]"),
    ({"cache_batch_idx": ints(3) - 1}, ValueError, r"cache_batch_idx must be .* got \[-1, -1, -1\]"),
    (
        {"block_table": ints(3, 1) + 3},
        ValueError,
        r"block_table must be .* 3 pages where keys are, got \[\[3\]",
    ),
    (
        {"cache_batch_idx": ints(3) + 1},
        ValueError,
        r"cache_batch_idx must name each sequence once where keys are appended, got \[1, 1, 1\]",
    ),
    (
        {"block_table": ints(3, 1) + 1},
        ValueError,
        r"block_table must give each sequence rows of its own .*, got \[\[1\], .* from \[5, 5, 5\]",
    ),
    ({"k": [1], "v": [1]}, TypeError, "k must be a tensor, got list"),
    ({"v": torch.zeros(3, 2, HK, D)}, TypeError, "v must have q's dtype torch.float64, got torch.float32"),
    ({"v": META}, ValueError, "v must be on q's device cpu, got meta"),
    ({"rotary_cos": [1], "rotary_sin": [1]}, TypeError, "rotary_cos must be a tensor, got list"),
    (TABLES | {"rotary_sin": META[0, 0]}, ValueError, "rotary_sin must be on q's device cpu, got meta"),
    (TABLES | {"rotary_sin": torch.zeros(40, 1)}, ValueError, r"rotary_sin must be .* got \[40, 1\]"),
    (dict.fromkeys(TABLES, torch.zeros(23, 4)), ValueError, r"the cache's 24 positions .* got \[23, 4\]"),
    (dict.fromkeys(TABLES, torch.zeros(24, 5)), ValueError, r"rotary_dim of at most 8, got \[24, 5\]"),
    (dict.fromkeys(TABLES, torch.zeros(1, 24, 4)), ValueError, r"rotary_cos must be .* got \[1, 24, 4\]"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**(tensors(1, 2) | {"cache_seqlens": 5} | change))


def test_one_cache_for_several_sequences() -> None:
    """Read by all, or in pages of a common prompt behind which each appends to its own."""
    x = tensors(1)
    index = torch.tensor([1, 1, 1], dtype=torch.int32)
    flash_attn_with_kvcache(**x, cache_seqlens=5, cache_batch_idx=index)
    pages = tensors(1, 2, blocks=4, length=8)
    table = torch.tensor([[0, 1], [0, 2], [0, 3]], dtype=torch.int32)
    flash_attn_with_kvcache(**pages, cache_seqlens=9, block_table=table)
    with pytest.raises(ValueError, match="block_table must give each sequence rows of its own"):
        flash_attn_with_kvcache(**pages, cache_seqlens=7, block_table=table)
