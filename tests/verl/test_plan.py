"""Micro-batches of whole groups: every row once, as many as the ranks agreed on; positions are veRL's own."""

from __future__ import annotations

import pytest
import torch
from compare import LENS
from tiny import make_batch

from flash_attn.integrations._verl_batch import HostRows
from flash_attn.integrations._verl_plan import Limits, StepPlan, lengthen, rows_of_micro_batches
from flash_attn.shared_prompt import pack
from flash_attn.shared_prompt.planner import TOKENS_ONLY

SIZES = [(20, [5, 9, 1, 7, 6, 2]), (13, [8, 3]), (9, [4] * 5), (30, [1, 2, 3])]


def flat(micro_batches: list[list[int]]) -> list[int]:
    return sorted(row for rows in micro_batches for row in rows)


@pytest.mark.parametrize("limits", [Limits(4, None), Limits(16, None), Limits(None, 60), Limits(None, 1000)])
def test_any_number_of_micro_batches_holds_every_row_once(limits):
    host = HostRows.of(make_batch(SIZES, shuffle=True))
    planned = rows_of_micro_batches(host, limits, TOKENS_ONLY)
    assert flat(planned) == list(range(16))
    if limits.num_rows is not None:
        assert {len(rows) for rows in planned} == {limits.num_rows}
    for count in range(len(planned), 17):
        longer = lengthen(planned, count, host)
        assert len(longer) == count and flat(longer) == list(range(16)) and all(longer)


def test_packed_tokens_stay_within_the_budget():
    host = HostRows.of(make_batch(SIZES, shuffle=True))
    for budget in (42, 60, 100, 150):
        for rows in rows_of_micro_batches(host, Limits(None, budget), TOKENS_ONLY):
            assert host.pack(rows).num_packed_tokens <= budget


def test_lengthening_halves_between_groups_first():
    host = HostRows.of(make_batch([(20, [5] * 4), (20, [5] * 4)]))
    halves = lengthen([list(range(8))], 2, host)
    assert sorted(map(sorted, halves)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_groups_that_fill_micro_batches_come_first():
    """A group of another size does not shift the others over the borders of micro-batches."""
    host = HostRows.of(make_batch([(20, [5, 4]), (13, [3] * 4), (9, [6] * 4), (8, [2, 2])]))
    planned = rows_of_micro_batches(host, Limits(4, None), TOKENS_ONLY)
    groups = [{r for r in range(2, 6)}, {r for r in range(6, 10)}, {0, 1, 10, 11}]
    assert [set(rows) for rows in planned] == groups


def test_positions_are_the_batchs_own_and_rows_of_other_positions_do_not_share():
    batch = make_batch(LENS)
    batch["position_ids"] = torch.nested.nested_tensor_from_jagged(
        2 * batch["position_ids"].values(), batch["input_ids"].offsets()
    )
    packed = HostRows.of(batch).pack([0, 1])
    assert packed.rows == [[0, 1]]
    assert torch.equal(packed.position_ids, 2 * packed.layout.position_ids)
    batch["position_ids"][1] += 1
    assert HostRows.of(batch).pack([0, 1]).rows == [[0], [1]]


@pytest.mark.parametrize("rows", [range(16), [7, 2, 15, 3, 0], [4]])
def test_packs_are_those_of_the_general_packing(rows):
    host = HostRows.of(make_batch([*SIZES[:-1], (1, [3, 0, 2])], shuffle=True))
    packed, lens = host.pack(rows), host.lens
    general = pack(
        [host.ids[row][: lens[row][0]] for row in rows], [host.ids[row][lens[row][0] :] for row in rows],
        position_ids=[host.positions[row] for row in rows],
    )  # fmt: skip
    assert torch.equal(packed.input_ids, general.input_ids[0])
    assert torch.equal(packed.position_ids, general.position_ids[0])
    assert torch.equal(packed.in_pack, general.grid_to_packed[general.grid_to_packed >= 0])
    assert torch.equal(packed.layout.segments, general.layout.segments)
    assert tuple(map(tuple, packed.rows)) == general.rows
    counts = (general.num_packed_tokens, general.num_replicated_tokens)
    assert (packed.num_packed_tokens, packed.num_replicated_tokens) == counts


def test_micro_batches_are_packed_in_their_turn():
    batch = make_batch([(20, [5] * 4), (13, [3] * 4)])
    plan = StepPlan([[0, 1, 2, 3], [4, 5, 6, 7]], HostRows.of(batch))
    micro_batches, rows = plan.micro_batches(plan.attach(batch))
    assert rows == plan.rows and [len(m) for m in micro_batches] == [4, 4]
    assert plan.num_packed_tokens == 0  # nothing is packed before the first one runs
    first = plan.next_pack()
    assert plan.num_packed_tokens == first.num_packed_tokens == 20 - 1 + 4 * 6
    with pytest.raises(RuntimeError, match=r"did not run the shared-prompt plan of 2 .* \(1 are left\)"):
        plan.check_done()
    plan.next_pack()
    plan.check_done()
    assert (plan.num_packed_tokens, plan.num_replicated_tokens) == (43 + 12 + 16, 4 * 25 + 4 * 16)


def test_one_micro_batch_of_all_rows_is_the_batch_itself():
    batch = make_batch([(20, [5] * 4)])
    plan = StepPlan([[0, 1, 2, 3]], HostRows.of(batch))
    ((whole,), _) = plan.micro_batches(plan.attach(batch))
    assert whole["input_ids"].values().data_ptr() == batch["input_ids"].values().data_ptr()
    turned = StepPlan([[1, 0, 2, 3]], HostRows.of(batch))
    ((copy,), _) = turned.micro_batches(turned.attach(batch))
    assert torch.equal(copy["input_ids"][0], batch["input_ids"][1])
