"""The planner's promises on random batches: every row once, budget kept, ranks balanced, verdicts as
measured."""

from __future__ import annotations

import itertools
import json
import random
import time

import numpy as np
import pytest
import torch

from flash_attn.shared_prompt import SharedPromptLayout, group_by_prompt
from flash_attn.shared_prompt.cost_model import (
    CostModel,
    GroupLens,
    Measurement,
    calibrate,
    fit,
    num_pairs,
    num_tokens,
)
from flash_attn.shared_prompt.planner import MicroBatchPlan, plan_micro_batches

MODEL = CostModel(
    token=1e-6, label=2e-7, pair_shared=1e-10, pair_replicated=1e-10, call_shared=1e-4, call_replicated=1e-4
)


def random_step(seed: int, min_groups: int = 1) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Rows in shuffled order, with prompts and responses of very different lengths, and their groups."""
    rng = random.Random(seed)
    lens, group_of = [], []
    for g in range(rng.randint(min_groups, 12)):
        prompt_len = rng.choice([1, 2, 7, 40, 300])
        for _ in range(rng.choice([1, 1, 2, 5, 16])):
            lens.append((prompt_len, rng.choice([0, 1, 3, 30, 200])))
            group_of.append(g)
    order = list(range(len(lens)))
    rng.shuffle(order)
    groups: dict[int, list[int]] = {}
    for new, old in enumerate(order):
        groups.setdefault(group_of[old], []).append(new)
    return [lens[old] for old in order], list(groups.values())


def packed_tokens(row_lens: list[tuple[int, int]], micro_batch) -> int:
    """From the layout that the micro-batch would be packed with."""
    return SharedPromptLayout.from_lengths(
        [row_lens[g[0]][0] for g in micro_batch.groups],
        [[row_lens[r][1] for r in g] for g in micro_batch.groups],
    ).total


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("over_budget", ["split", "alone"])
def test_every_row_stands_in_one_micro_batch_and_the_budget_holds(seed, over_budget):
    row_lens, groups = random_step(seed)
    num_ranks, max_tokens = 1 + seed % 4, [64, 400, 1500][seed % 3]
    plan = plan_micro_batches(
        row_lens,
        groups,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        cost_model=MODEL,
        over_budget=over_budget,
    )
    assert len(plan.ranks) == num_ranks
    assert {len(rank) for rank in plan.ranks} == {plan.num_micro_batches}
    micro_batches = [m for rank in plan.ranks for m in rank]
    rows = [row for m in micro_batches for row in m.rows]
    assert sorted(rows) == list(range(len(row_lens)))

    whole = {row: set(group) for group in groups for row in group}
    for m in micro_batches:
        assert m.num_tokens == packed_tokens(row_lens, m)
        for group in m.groups:
            assert set(group) <= whole[group[0]]
            if not m.shared:
                assert len(group) == 1
            elif over_budget == "alone":
                assert set(group) == whole[group[0]]
        if m.num_tokens > max_tokens:
            assert len(m.groups) == 1
            if over_budget == "split":
                assert m.rows[0] in plan.over_budget and len(m.rows) == 1
    too_long = sorted(r for r, (p, n) in enumerate(row_lens) if p + n > max_tokens)
    if over_budget == "split":
        assert list(plan.over_budget) == too_long
    again = plan_micro_batches(
        row_lens,
        groups,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        cost_model=MODEL,
        over_budget=over_budget,
    )
    assert again == plan


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("equal_groups", [False, True])
def test_ranks_are_balanced(seed, equal_groups):
    row_lens, groups = random_step(seed, min_groups=4)
    num_ranks = 2 + seed % 3
    if equal_groups:
        groups = groups[: len(groups) // num_ranks * num_ranks]
        rows = [row for group in groups for row in group]
        new = {row: i for i, row in enumerate(rows)}
        row_lens, groups = [row_lens[row] for row in rows], [[new[row] for row in group] for group in groups]
    free = CostModel(token=1.0, label=0.0, pair_shared=1e-3, pair_replicated=1e-3)  # no cost per micro-batch
    plan = plan_micro_batches(
        row_lens, groups, max_tokens=10_000, num_ranks=num_ranks, cost_model=free, equal_groups=equal_groups
    )
    costs = [
        free.cost([GroupLens(row_lens[g[0]][0], tuple(row_lens[r][1] for r in g))], shared=True)
        for g in groups
    ]
    mean, slack = sum(costs) / num_ranks, max(costs)
    assert max(plan.rank_costs) <= mean + slack * (1 - 1 / num_ranks) + 1e-6 or equal_groups
    if equal_groups:
        assert max(plan.rank_costs) - min(plan.rank_costs) <= slack + 1e-6
        group_of = {row: g for g, group in enumerate(groups) for row in group}
        assert len({len({group_of[row] for m in rank for row in m.rows}) for rank in plan.ranks}) == 1
    assert plan.imbalance == pytest.approx(max(plan.rank_costs) * num_ranks / sum(plan.rank_costs))


def test_a_rank_without_work_gets_placeholders():
    plan = plan_micro_batches([(10, 5)] * 3, [[0], [1], [2]], max_tokens=16, num_ranks=2)
    assert plan.num_micro_batches == 2
    empty = [m for rank in plan.ranks for m in rank if not m.groups]
    assert len(empty) == 1 and empty[0].num_tokens == 0 and empty[0].cost == 0


def test_micro_batches_of_a_rank_with_less_work_are_halved_before_placeholders_are_added():
    # Three micro-batches on one rank; those of 55 tokens would fit in pairs into two on the other.
    row_lens = [(90, 10), (90, 10), (50, 5), (50, 5), (50, 5), (50, 5)]
    plan = plan_micro_batches(row_lens, [[r] for r in range(6)], max_tokens=110, num_ranks=2)
    assert all(m.groups for rank in plan.ranks for m in rank)


def test_a_group_above_the_budget_is_raised_by_name():
    with pytest.raises(
        ValueError, match=r"groups\[1\] must fit into max_tokens=50, got 67 tokens: prompt 40, 3 rows"
    ):
        plan_micro_batches([(5, 5), (40, 9), (40, 8), (40, 8)], [[0], [1, 2, 3]], max_tokens=50)


def test_a_group_above_the_budget_is_split_into_few_parts():
    row_lens = [(40, 9)] * 8
    plan = plan_micro_batches(row_lens, [list(range(8))], max_tokens=70, over_budget="split")
    assert [len(m.rows) for m in plan.ranks[0]] == [3, 3, 2]
    assert all(m.num_tokens <= 70 for m in plan.ranks[0])
    assert plan.over_budget == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 0}, "max_tokens and num_ranks must be at least 1, got max_tokens=0"),
        ({"max_tokens": 9, "num_ranks": 0}, "num_ranks=0"),
        ({"max_tokens": 9, "over_budget": "drop"}, "over_budget must be"),
        ({"max_tokens": 9, "groups": [[0]]}, "groups must hold each of the 2 rows exactly once"),
        ({"max_tokens": 9, "groups": [[0, 1], [1]]}, "groups must hold each of the 2 rows exactly once"),
        ({"max_tokens": 9, "groups": [[0, 1], []]}, "groups must hold each of the 2 rows exactly once"),
        ({"max_tokens": 9, "groups": [[2, 0]]}, "groups must hold each of the 2 rows exactly once"),
        (
            {"max_tokens": 9, "row_lens": [(2, 1), (1, 1)]},
            r"row_lens\[1\] must be \(at least 2 prompt tokens",
        ),
        (
            {"max_tokens": 9, "row_lens": [(1, 1), (2, 1)]},
            r"row_lens\[1\] must have the 1 prompt tokens of its group's first row, got 2",
        ),
        ({"max_tokens": float("nan")}, "max_tokens and num_ranks must be at least 1, got max_tokens=nan"),
        (
            {"max_tokens": 9, "row_lens": [(0, 1), (0, 1)]},
            r"row_lens\[0\] must be \(at least 1 prompt tokens",
        ),
        (
            {"max_tokens": 9, "groups": [[0, 1]], "num_ranks": 2, "equal_groups": True},
            "multiple of num_ranks=2",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    values = {"row_lens": [(2, 1), (2, 1)], "groups": [[0, 1]], **arguments}
    with pytest.raises(ValueError, match=message):
        plan_micro_batches(values.pop("row_lens"), values.pop("groups"), **values)


def test_lengths_are_whole_numbers():
    for pair in ((2, 1.5), (True, 1), tuple(torch.tensor([2, 1]))):
        with pytest.raises(TypeError, match=r"row_lens\[0\]\[\d\] must be a Python int, got"):
            plan_micro_batches([pair], [[0]], max_tokens=9)
    (micro_batch,) = plan_micro_batches(np.array([[2, 1], [2, 3]]), [[0, 1]], max_tokens=9).ranks[0]
    assert type(micro_batch.num_tokens) is int and micro_batch.num_tokens == 7


@pytest.mark.parametrize("windows", [(), (0,), (None, -1)])
def test_windows_that_are_none_are_refused(windows):
    with pytest.raises(ValueError, match="windows must be None or at least 1, for one layer or more, got"):
        CostModel(1.0, 0.0, 1.0, 1.0, windows=windows)


def test_groups_with_a_common_prefix_count_their_own_tokens():
    ids = [[1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9], [7, 7]]
    groups = group_by_prompt(ids, longest_common_prefix=True)
    plan = plan_micro_batches([(5, 4), (6, 0), (2, 2)], groups, max_tokens=100)
    (micro_batch,) = plan.ranks[0]
    assert sorted(micro_batch.groups) == [(0, 1), (2,)]
    assert micro_batch.num_tokens == (3 + 6 + 3 + 1) + 4


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("fork", [0, 1])
def test_pairs_and_tokens_equal_a_count_by_hand(window, fork):
    group = GroupLens(6, (4, 0, 1))
    see = (lambda pos: pos + 1) if window is None else (lambda pos: min(pos + 1, window))
    shared = sum(map(see, range(6 - fork))) + sum(see(p) for r in (4, 0, 1) for p in range(6 - fork, 6 + r))
    replicated = sum(see(p) for r in (4, 0, 1) for p in range(6 + r))
    assert num_pairs(group, shared=True, window=window, fork=fork) == shared
    assert num_pairs(group, shared=False, window=window, fork=fork) == replicated
    boundary = "fork" if fork else "shared"
    assert (
        num_tokens(group, shared=True, fork=fork)
        == SharedPromptLayout.from_lengths([6], [[4, 0, 1]], boundary=boundary).total
    )
    assert num_tokens(group, shared=False, fork=fork) == 3 * 6 + 5


def test_sharing_is_refused_where_it_does_not_pay():
    slow_packing = CostModel(
        token=1e-6, label=0.0, pair_shared=0.0, pair_replicated=0.0, call_shared=1e-3, call_replicated=0.0
    )
    long_prompt, short_prompt = GroupLens(2000, (10, 10)), GroupLens(20, (500, 500))
    assert slow_packing.pays([long_prompt]) and not slow_packing.pays([short_prompt])
    assert not slow_packing.pays([GroupLens(5000, (10,))]), "one row has nothing to share"
    # Padding of the replicated batch counts: 480 tokens more per row.
    assert slow_packing.pays([short_prompt], replicated=[GroupLens(1000, (500, 500))])

    row_lens = [(2000, 10)] * 2 + [(20, 500)] * 2
    plan = plan_micro_batches(row_lens, [[0, 1], [2, 3]], max_tokens=2100, cost_model=slow_packing)
    assert {m.rows: m.shared for m in plan.ranks[0]} == {(0, 1): True, (2, 3): False}
    assert sum(slow_packing.call_shared for m in plan.ranks[0] if m.shared) == 1e-3


def test_flop_model_counts_parameters_and_attention():
    model = CostModel.from_flops(
        num_layer_parameters=100, num_head_parameters=10, num_layers=2, num_heads=3, head_dim=4
    )
    group = GroupLens(5, (3, 3))
    tokens, pairs = 5 + 6 + 1, num_pairs(group, shared=True)
    assert model.cost([group], shared=True) == 6 * 100 * tokens + 6 * 10 * 6 + 14 * 2 * 3 * 4 * pairs
    assert CostModel.from_dict(json.loads(json.dumps(model.as_dict()))) == model
    with pytest.raises(ValueError, match="CostModel's fields only, got 'tokens'"):
        CostModel.from_dict({"tokens": 1})
    with pytest.raises(ValueError, match="token must be at least 0, got -1"):
        CostModel(-1, 0, 0, 0)


def test_fit_recovers_the_coefficients():
    truth = CostModel(3e-6, 5e-7, 2e-10, 4e-10, 1e-3, 5e-4, windows=(None, 100))
    measurements = [
        Measurement((GroupLens(p, (r,) * n),), shared, truth.cost([GroupLens(p, (r,) * n)], shared=shared))
        for p, r, n in itertools.product((10, 300, 2000), (20, 400), (2, 8))
        for shared in (True, False)
    ]
    found = fit(measurements, windows=(None, 100))
    assert found.fit_error is not None and found.fit_error < 1e-6
    for name in ("token", "label", "pair_shared", "pair_replicated", "call_shared", "call_replicated"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-4), name
    with pytest.raises(ValueError, match="measurements must be at least 6, got 3"):
        fit(measurements[:3])


def test_small_batches_take_what_the_host_needs():
    """A host that needs longer for shared calls: the verdict turns where replicated work exceeds it."""
    truth = CostModel(3e-6, 5e-7, 2e-10, 4e-10, 0.0, 0.0, 0.012, 0.009)
    generator = torch.Generator().manual_seed(0)
    measurements = []
    for p, r, n in itertools.product((10, 300, 2000, 9000), (20, 400), (2, 8, 24)):
        for shared in (True, False):
            noise = 1 + 0.04 * float(torch.rand((), generator=generator) - 0.5)
            groups = (GroupLens(p, (r,) * n),)
            measurements.append(Measurement(groups, shared, noise * truth.cost(groups, shared=shared)))
    found = fit(measurements)
    assert found.fit_error is not None and found.fit_error < 0.1
    assert found.host_shared == pytest.approx(0.012, rel=0.05)
    assert found.host_replicated == pytest.approx(0.009, rel=0.05)
    for p, pays in ((100, False), (300, False), (900, True), (4000, True)):
        group = [GroupLens(p, (40,) * 8)]
        assert truth.pays(group) == found.pays(group) == pays
    assert found.cost(group, shared=False, num_calls=100) == pytest.approx(100 * found.host_replicated)
    assert CostModel.from_dict(found.as_dict()) == found
    measured = fit(measurements, hosts=(0.012, 0.009))  # known, so no time of the host's passes for work
    assert (measured.host_shared, measured.host_replicated) == (0.012, 0.009)
    assert measured.token == pytest.approx(truth.token, rel=0.2)
    for p, pays in ((100, False), (300, False), (900, True), (4000, True)):
        assert measured.pays([GroupLens(p, (40,) * 8)]) == pays
    few = [m for m in measurements if m.seconds < 0.013]  # nothing clearly above the host: all count
    assert fit(few, hosts=(0.012, 0.009)).host_shared == 0.012
    with pytest.raises(ValueError, match="host_shared must be at least 0, got -1"):
        CostModel(1.0, 0.0, 0.0, 0.0, host_shared=-1)


def test_calibrate_measures_a_machine_within_its_time():
    """The machine sleeps as the model says, so what calibrate finds is known up to the clock's noise."""
    truth = CostModel(4e-6, 0.0, 0.0, 1e-8, 1e-3, 1e-3)
    calls: list[bool] = []

    def run(groups, shared):
        calls.append(shared)
        time.sleep(truth.cost(groups, shared=shared))

    begin = time.perf_counter()
    found = calibrate(run, max_tokens=1024, max_seconds=0.6)
    assert time.perf_counter() - begin < 4
    assert calls.count(True) >= 30 and calls.count(False) >= 30
    for group in (GroupLens(700, (20,) * 4), GroupLens(40, (100,) * 8)):
        assert found.pays([group]) == truth.pays([group])
    with pytest.raises(ValueError, match="max_tokens must be at least 64, got 10"):
        calibrate(run, max_tokens=10)


def test_empty_step():
    plan = plan_micro_batches([], [], max_tokens=10, num_ranks=2)
    assert isinstance(plan, MicroBatchPlan) and plan.ranks == ((), ()) and plan.imbalance == 1.0
    assert torch.tensor(plan.rank_costs).sum() == 0
