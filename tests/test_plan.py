"""The plan's functions (src/common/plan.h, compiled for the CPU) against tests/plan_oracle.py.

And the oracle's tables against what they promise: a mask by brute force, coverage, and little waste.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from plan_oracle import (
    Plan,
    TileSizes,
    build_plan,
    choose_splits,
    key_capacity,
    query_capacity,
    shared_prompt_segments,
    varlen_segments,
)

NAMES = ("row_span", "block_span", "query_items", "key_items")


@pytest.fixture(scope="module")
def host_plan(tmp_path_factory: pytest.TempPathFactory):
    """plan.h in loops on the CPU (tests/plan_host.cpp)."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    path = tmp_path_factory.mktemp("plan") / "libplan.so"
    source = Path(__file__).with_name("plan_host.cpp")
    subprocess.run(
        [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", str(source), "-o", str(path)], check=True
    )
    library = ctypes.CDLL(str(path))

    def pointer(x: torch.Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(x.data_ptr())

    def build(
        segments, total_q, total_k, total_context=None, *, causal, window_size, tile, num_splits=1,
        few_items=False, check=True, separate=False,
    ) -> Plan:  # fmt: skip
        in_k = total_context is None
        context = total_k if total_context is None else total_context
        count = len(segments)
        right = 0 if causal else window_size[1]
        sizes = [count, total_q, total_k, context, int(in_k), window_size[0], right]
        sizes += [tile.fwd_block_m, tile.bwd_block_n, num_splits, int(separate), int(few_items)]
        sizes_t = torch.tensor(sizes, dtype=torch.int32)
        plan = Plan(
            torch.full((total_q, 4), -7, dtype=torch.int32),
            torch.full((-(-total_q // 64), 8), -7, dtype=torch.int32),
            torch.full((query_capacity(total_q, count, tile), 12), -7, dtype=torch.int32),
            torch.full(
                (key_capacity(total_k, context, in_k, count, tile, num_splits), 8), -7, dtype=torch.int32
            ),
        )
        assert library.plan_query_capacity(total_q, count, tile.fwd_block_m) == len(plan.query_items)
        assert library.plan_key_capacity(
            total_k, context, int(in_k), count, tile.bwd_block_n, num_splits
        ) == len(plan.key_items)
        overflow = library.plan_on_host(
            pointer(segments.contiguous()), pointer(sizes_t), *(pointer(t) for t in plan.tensors())
        )
        assert not (check and overflow)
        return plan

    return build


def random_lengths(rng: np.random.Generator, count: int) -> list[int]:
    top = int(rng.choice([3, 70, 300]))
    return [int(x) * int(rng.random() > 0.2) for x in rng.integers(0, top, count)]


def random_case(rng: np.random.Generator) -> dict:
    """A table as the layouts and the flash-attn functions build them, with padding, gaps and empty parts."""
    kind = rng.choice(["shared", "fork", "varlen", "dualkv"])
    count = int(rng.choice([0, 1, 2, 5, 40, 140]))
    pad_q, pad_k = (int(x) for x in rng.integers(0, 130, 2) * rng.integers(0, 2, 2))
    total_context = None
    if kind in ("shared", "fork"):
        groups = int(rng.integers(1, 4))
        prompts = [1 + int(x) for x in rng.integers(0, rng.choice([4, 200, 600]), groups)]
        segments = shared_prompt_segments(prompts, [random_lengths(rng, count // groups) for _ in prompts])
        if kind == "fork":  # contexts end one row before the prompt does
            segments[:, 3] = torch.maximum(segments[:, 3] - 1, segments[:, 2])
        if rng.random() < 0.2:  # nothing stands in the first rows of k
            segments[:, 2:] += 9
        total_q, total_k = int(segments[-1, 1]) + pad_q, int(segments[:, 2:].max()) + pad_k
    else:
        q, k = random_lengths(rng, count), random_lengths(rng, count)
        context = int(rng.choice([0, 1, 64, 130, 500])) if kind == "dualkv" else 0
        segments = varlen_segments(q, k, context)
        if count and rng.random() < 0.3:  # gaps between the sequences' keys
            segments[:, 4:] += 5 * torch.arange(count, dtype=torch.int32)[:, None]
        total_q = sum(q) + pad_q
        total_k = (int(segments[:, 5].max()) if count else 0) + pad_k
        if kind == "dualkv":
            total_context = context + int(rng.integers(0, 80))
    window = tuple(int(x) for x in rng.choice([-1, -1, 0, 1, 40, 200, 10**9], 2))
    tile = TileSizes(int(rng.choice([64, 128, 192])), int(rng.choice([64, 80, 128])))
    return dict(
        segments=segments,
        total_q=total_q,
        total_k=total_k,
        total_context=total_context,
        causal=bool(rng.random() < 0.6),
        window_size=window,
        tile=tile,
        num_splits=int(rng.choice([1, 1, 2, 4])),
        few_items=bool(rng.random() < 0.5),
    )


def visible(case: dict) -> tuple[np.ndarray, np.ndarray]:
    """(total_q, context rows) and (total_q, total_k) masks straight from the definition of a segment."""
    context_rows = case["total_k"] if case["total_context"] is None else case["total_context"]
    context = np.zeros((case["total_q"], context_rows), bool)
    decoded = np.zeros((case["total_q"], case["total_k"]), bool)
    left, right = (np.inf if w < 0 else w for w in case["window_size"])
    right = 0 if case["causal"] else right
    for qb, qe, cb, ce, kb, ke in case["segments"].tolist():
        p, lk, lq = ce - cb, ke - kb, qe - qb
        pos = (p + lk - lq + np.arange(lq))[:, None]
        key = np.arange(p + lk)[None, :]
        sees = (key >= pos - left) & (key <= pos + right)
        context[qb:qe, cb:ce] |= sees[:, :p]
        decoded[qb:qe, kb:ke] |= sees[:, p:]
    return context, decoded


def check_against_mask(case: dict, plan: Plan) -> None:
    context, decoded = visible(case)
    region = {0: decoded, 1: context}
    for row, (cb, ce, db, de) in enumerate(plan.row_span.tolist()):
        for mask, begin, end in ((context, cb, ce), (decoded, db, de)):
            assert mask[row].sum() == end - begin and mask[row, begin:end].all()

    def check_span(rows: slice, span: list[int], mask: np.ndarray) -> None:
        begin, full_begin, full_end, end = span
        seen = np.flatnonzero(mask[rows].any(0))
        assert (begin, end) == ((seen[0], seen[-1] + 1) if len(seen) else (0, 0))
        assert begin <= full_begin <= full_end <= end and mask[rows, full_begin:full_end].all()

    for i, block in enumerate(plan.block_span.tolist()):
        check_span(slice(64 * i, 64 * i + 64), block[:4], context)
        check_span(slice(64 * i, 64 * i + 64), block[4:], decoded)
    rows_covered = np.zeros(case["total_q"], int)
    for row_begin, num_rows, _cost, _, *spans in plan.query_items.tolist():
        if num_rows:
            rows = slice(row_begin, row_begin + num_rows)
            rows_covered[rows] += 1
            check_span(rows, spans[:4], context)
            check_span(rows, spans[4:], decoded)
    assert (rows_covered == 1).all()

    keys_covered = {0: np.zeros(case["total_k"], int), 1: np.zeros(context.shape[1], int)}
    pairs = {0: np.zeros_like(decoded, int), 1: np.zeros_like(context, int)}
    for where, begin, num_keys, row_begin, row_end, _cost, split, _ in plan.key_items.tolist():
        keys = slice(begin, begin + num_keys)
        keys_covered[where][keys] += split <= 0
        pairs[where][row_begin:row_end, keys] += 1
    for where, mask in region.items():
        assert (pairs[where][mask] == 1).all(), "each visible pair belongs to one item"
    if case["total_context"] is None:
        assert (keys_covered[0] + keys_covered[1] == 1).all()
    else:
        assert (keys_covered[0] == 1).all() and (keys_covered[1] == 1).all()


@pytest.mark.parametrize("seed", range(12))
def test_plan_functions_equal_the_oracle(host_plan, seed: int) -> None:
    """1,200 random tables, every number of every table."""
    rng = np.random.default_rng(1000 + seed)
    for index in range(100):
        case = random_case(rng)
        want = build_plan(**case)
        got = host_plan(**case)
        for name, a, b in zip(NAMES, got.tensors(), want.tensors(), strict=True):
            assert torch.equal(a, b), (seed, index, name, case)


def test_oracle_covers_every_visible_pair_once() -> None:
    rng = np.random.default_rng(7)
    for _ in range(12):
        case = random_case(rng)
        check_against_mask(case, build_plan(**case))


def test_wrong_tables_stay_inside_the_tensors(host_plan) -> None:
    """Garbage from a GPU tensor cannot be refused without a sync: it is clamped."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        total_q, total_k, count = (int(x) for x in rng.integers(0, 300, 3))
        table = torch.from_numpy(rng.integers(-(2**31), 2**31 - 1, (count, 6)).astype(np.int32))
        if rng.random() < 0.5:
            table = (table // 2**22).contiguous()
        # Rows and keys may then be listed twice, which can exceed the capacities: surplus items are dropped.
        settings = dict(causal=True, window_size=(-1, -1), tile=TileSizes(), check=False)
        plan = host_plan(table, total_q, total_k, **settings)
        for row_begin, num_rows, _cost, _, *spans in plan.query_items.tolist():
            assert row_begin >= 0 and num_rows >= 0 and row_begin + num_rows <= total_q
            assert min(spans) >= 0 and max(spans) <= total_k
        for _, begin, num_keys, row_begin, row_end, *_ in plan.key_items.tolist():
            assert begin >= 0 and num_keys >= 0 and begin + num_keys <= total_k
            assert 0 <= row_begin <= row_end <= total_q
        spans = plan.row_span
        assert spans.numel() == 0 or (int(spans.min()) >= 0 and int(spans.max()) <= total_k)


def test_cu_seqlens_that_goes_back_is_an_empty_sequence(host_plan) -> None:
    """[0, 150, 100]: rows and items agree on the clamped table; kernels read one by way of the other."""

    def segments(cu: list[int]) -> torch.Tensor:
        rows = [[b, e, 0, 0, b, e] for b, e in itertools.pairwise(cu)]
        return torch.tensor(rows, dtype=torch.int32)

    settings = dict(causal=True, window_size=(-1, -1), tile=TileSizes())
    got = host_plan(segments([0, 150, 100]), 200, 200, **settings)
    want = build_plan(segments([0, 150, 150]), 200, 200, **settings)
    for name, a, b in zip(NAMES, got.tensors(), want.tensors(), strict=True):
        assert torch.equal(a, b), name


def tile_work(plan: Plan) -> int:
    """Key columns that the forward's tiles visit, whole 128-key tiles and 128 a tile for the rest."""
    items = plan.query_items[plan.query_items[:, 1] > 0].long()
    tiles = -(-(items[:, 7] - items[:, 4]) // 128) - (-(items[:, 11] - items[:, 8]) // 128)
    return int((tiles * 128 + 128).sum())


def key_work(plan: Plan) -> int:
    items = plan.key_items[plan.key_items[:, 2] > 0].long()
    return int((-(-(items[:, 4] - items[:, 3]) // 128) * 128 + 128).sum())


RAGGED = np.random.default_rng(0).integers(1, 64, 200).tolist()
WASTE_CASES = {
    "plain, 500 each": (varlen_segments([500] * 16, [500] * 16), 1.02),
    "plain, 4096 each": (varlen_segments([4096] * 4, [4096] * 4), 1.02),
    "plain, 20 each": (varlen_segments([20] * 100, [20] * 100), 1.02),
    "plain, ragged and short": (varlen_segments(RAGGED, RAGGED), 1.05),
    "decoding (split on purpose, for parallelism)": (varlen_segments([1] * 32, [3000] * 32), 1.07),
    "ragged and short on 4096": (shared_prompt_segments([4096], [RAGGED]), 1.02),
    "2000 on 4096": (shared_prompt_segments([4096], [[2000] * 8]), 1.02),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", WASTE_CASES)
def test_tiles_span_sequences_only_where_that_saves_work(name: str, causal: bool) -> None:
    segments, limit = WASTE_CASES[name]
    total_q, total_k = int(segments[-1, 1]), int(segments[-1, 5])
    for work in (tile_work, key_work):
        auto, always, never = (
            work(build_plan(segments, total_q, total_k, causal=causal, spanning=s))
            for s in ("auto", "always", "never")
        )
        assert auto <= limit * min(always, never), (work.__name__, auto, always, never)


def test_splits_fill_the_gpu() -> None:
    def splits(context_rows: int, total_q: int, num_heads_k: int, path: int = 90) -> int:
        return choose_splits(context_rows, total_q, num_heads_k, 132, TileSizes(), path)

    assert splits(1024, 3072, 8) == 2 and splits(1024, 3072, 8, 80) == 4
    for path in (80, 90):
        assert splits(16384, 73728, 8, path) == 1
        assert splits(128, 3072, 1, path) == 4
        assert splits(0, 3072, 8, path) == 1
        assert splits(2048, 67584, 8, path) == 4  # 128 items of 67584 rows
        assert splits(4096, 61440, 8, path) == 2
        assert splits(2048, 15000, 8, path) == 2
        assert splits(512, 2560, 8, path) == 4


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("seed", range(4))
def test_separate_segments(host_plan, causal: bool, seed: int) -> None:
    """Plans for ALiBi and dropout: items of one segment, which they name; a query item's keys begin at a
    multiple of 16 from its first. All else is as without: rows, keys and spans of rows are covered once."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    q_lens, k_lens = random_lengths(rng, count), random_lengths(rng, count)
    window = tuple(int(x) for x in rng.choice([-1, 5, 40], 2))
    segments, tile = varlen_segments(q_lens, k_lens, 0), TileSizes(64, 32)
    options = dict(causal=causal, window_size=window, tile=tile)
    total_q, total_k = sum(q_lens) + 3, sum(k_lens) + 2
    plan = host_plan(segments, total_q, total_k, **options, separate=True)
    joined = host_plan(segments, total_q, total_k, **options)
    assert torch.equal(plan.row_span, joined.row_span) and torch.equal(plan.block_span, joined.block_span)
    table, seen_rows, seen_keys = segments.tolist(), [], []
    for row, num_rows, _, segment, *spans in plan.query_items.tolist():
        seen_rows += range(row, row + num_rows)
        if num_rows == 0 or row >= sum(q_lens):
            continue
        q_begin, q_end, _, _, k_begin, k_end = table[segment]
        assert q_begin <= row and row + num_rows <= q_end
        begin, _, _, end = spans[4:]
        if begin < end:
            assert (begin - k_begin) % 16 == 0 and k_begin <= begin and end <= k_end
            spans_of_rows = plan.row_span[row : row + num_rows, 2:]
            seen = spans_of_rows[spans_of_rows[:, 0] < spans_of_rows[:, 1]]
            assert begin <= int(seen[:, 0].min()) < begin + 16 and end == int(seen[:, 1].max())
    for _, key, num_keys, first, last, _, split, _ in plan.key_items.tolist():
        seen_keys += range(key, key + num_keys)
        if first < last:
            assert split < 0
            q_begin, q_end, _, _, k_begin, _ = table[-1 - split]
            assert q_begin <= first and last <= q_end and (key - k_begin) % 32 == 0
    assert sorted(seen_rows) == list(range(total_q)) and sorted(seen_keys) == list(range(total_k))
