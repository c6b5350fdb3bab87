"""What sequence parallelism asks of the kernels, on one GPU: rows [q | k | v], and parts of packs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sharded_gpu_cases as cases
import torch
import torch.distributed as dist


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    """An NCCL group of this process alone: its exchanges are copies."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("way", cases.WAYS, ids=str)
def test_one_rank_obeys_the_rule(path: int, one_rank: Any, way: tuple[str, int]) -> None:
    for heads, options in zip(cases.HEADS, cases.OPTIONS, strict=True):
        assert not cases.attention(one_rank, "fork", heads, way, options), (heads, options)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("boundary", ["fork", "shared"])
def test_parts_of_packs_obey_the_rule(path: int, boundary: str, num_ranks: int) -> None:
    for heads in cases.HEADS:
        problems = cases.context_parts(num_ranks, boundary, heads)
        assert not problems, (heads, problems)


def test_views_of_exchanged_rows(path: int) -> None:
    """Views of rows [q | k | v] give the same result, bit for bit, as contiguous tensors."""
    from flash_attn import flash_attn_shared_prompt_func
    from flash_attn.shared_prompt import SharedPromptLayout

    layout = SharedPromptLayout.from_lengths(*cases.LENGTHS, device="cuda")
    torch.manual_seed(0)
    rows = torch.randn(layout.total, 8 * 128, device="cuda", dtype=torch.bfloat16)
    views = [x.unflatten(1, (-1, 128)) for x in rows.split([4 * 128, 2 * 128, 2 * 128], 1)]
    assert not views[0].is_contiguous()
    out = flash_attn_shared_prompt_func(*views, layout)
    assert torch.equal(out, flash_attn_shared_prompt_func(*(x.contiguous() for x in views), layout))
