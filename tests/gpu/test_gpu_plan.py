"""The plan kernels against the emulator, number for number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from plan_oracle import (
    FEW_ITEMS_PER_SM,
    Plan,
    TileSizes,
    build_plan,
    choose_splits,
    shared_prompt_segments,
    varlen_segments,
)
from test_plan import NAMES, random_case

from flash_attn import _backend, _ops


def tile_sizes(path: int, head_dim: int) -> TileSizes:
    """What the library was built with: one row of queries, or keys, more than a tile makes one more item."""
    assert _backend._load_library() is None
    sizes = []
    for index, column in ((2, 1), (3, 2)):
        tables = plan_on_gpu(varlen_segments([1024], [1024]), 1024, 1024, None, head_dim=head_dim)
        items = tables[index]
        sizes.append(int(items[items[:, column] > 0][:, column].max()))
    return TileSizes(*sizes)


def plan_on_gpu(segments, total_q, total_k, total_context, *, causal=True, window_size=(-1, -1), head_dim=64,
                context_rows=0) -> list[torch.Tensor]:  # fmt: skip
    tables = _ops.plan_tables(
        segments.cuda(),
        total_q,
        total_k,
        total_context,
        context_rows,
        num_heads_k=1,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        causal=causal,
        window_size=window_size,
    )
    return [t.cpu() for t in tables]


def expected_plan(path: int, *arguments: Any, **options: Any) -> Plan:
    """The oracle's for one kv head on this GPU."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    plan = build_plan(*arguments, **options, few_items=True)
    few = path == 90 and len(plan.key_items) <= FEW_ITEMS_PER_SM * num_sms
    return plan if few else build_plan(*arguments, **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_plan_equals_the_oracle(path: int, head_dim: int) -> None:
    tile = tile_sizes(path, head_dim)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    rng = np.random.default_rng(head_dim)
    for index in range(100):
        case = random_case(rng)
        del case["tile"], case["num_splits"], case["few_items"]
        context_rows = int(rng.choice([0, 0, 1, 66 * tile.bwd_block_n]))
        splits = choose_splits(context_rows, case["total_q"], 1, num_sms, tile, path)
        want = expected_plan(path, **case, tile=tile, num_splits=splits)
        arguments = [case.pop(name) for name in ("segments", "total_q", "total_k", "total_context")]
        got = plan_on_gpu(*arguments, **case, head_dim=head_dim, context_rows=context_rows)
        for name, a, b in zip(NAMES, got, want.tensors(), strict=True):
            assert torch.equal(a, b), (index, name, splits, case)


LARGE = {
    "70,000 sequences": lambda: varlen_segments([1, 2] * 35_000, [2, 1] * 35_000),
    "1,100 groups": lambda: shared_prompt_segments([3] * 1100, [[2, 0, 5]] * 1100),
    "28 on 16384": lambda: shared_prompt_segments([16384], [[2048] * 28]),
    "one token": lambda: varlen_segments([1], [1]),
    "no segment": lambda: varlen_segments([], []),
}


@pytest.mark.parametrize("name", LARGE)
def test_plans_of_unusual_sizes(path: int, name: str) -> None:
    if name == "70,000 sequences" and path == 90:
        pytest.skip("the same plan kernels as on the other path, and the emulator takes 20 s")
    segments = LARGE[name]()
    total_q = int(segments[-1, 1]) if len(segments) else 70
    total_k = int(segments[-1, 5]) if len(segments) else 70
    tile = tile_sizes(path, 64)
    got = plan_on_gpu(segments, total_q, total_k, None)
    for table, a, b in zip(
        NAMES, got, expected_plan(path, segments, total_q, total_k, tile=tile).tensors(), strict=True
    ):
        assert torch.equal(a, b), table


def test_garbage_tables_are_clamped(path: int) -> None:
    """Values on the GPU are not checked without a sync: they must lead nowhere out of bounds."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        segments = torch.randint(-(2**31), 2**31 - 1, (300, 6), generator=generator, dtype=torch.int64).int()
        row_span, block_span, query_items, key_items = plan_on_gpu(segments, 500, 700, None)
        for table, limit in ((row_span, 700), (block_span, 700), (query_items[:, 4:], 700)):
            assert int(table.min()) >= 0 and int(table.max()) <= limit
        assert int((query_items[:, 0] + query_items[:, 1]).max()) <= 500
        assert int((key_items[:, 1] + key_items[:, 2]).max()) <= 700 and int(key_items[:, 4].max()) <= 500


def test_plan_needs_no_host_sync(path: int) -> None:
    segments = shared_prompt_segments([300], [[50] * 8]).cuda()
    arguments = dict(num_heads_k=2, head_dim=64, dtype=torch.bfloat16, causal=True, window_size=(-1, -1))
    _ops.plan_tables(segments, 700, 700, None, 300, **arguments)  # loads the library
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _ops.plan_tables(segments, 700, 700, None, 300, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
