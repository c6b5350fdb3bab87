"""A trainer's padded rows packed on their own device: every map as `shared_prompt.pack` gives it."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from flash_attn.integrations._trl_batch import SharedStep
from flash_attn.integrations._trl_rows import PaddedRows
from flash_attn.shared_prompt import PackedBatch, pack
from flash_attn.shared_prompt.planner import TOKENS_ONLY


def padded(
    rows: list[tuple[list[int], list[int]]], prompt_width: int, response_width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of (prompt, response) rows; padding repeats a real id."""
    ids = torch.full((len(rows), prompt_width + response_width), 7)
    mask = torch.zeros_like(ids)
    for i, (prompt, response) in enumerate(rows):
        begin, end = prompt_width - len(prompt), prompt_width + len(response)
        ids[i, begin:end] = torch.tensor([*prompt, *response])
        mask[i, begin:end] = 1
    return ids, mask


def random_rows(seed: int) -> list[tuple[list[int], list[int]]]:
    """Three prompts, one a suffix of another, one of a single token; shuffled; some responses empty."""
    rng = random.Random(seed)
    long = [rng.randrange(20) for _ in range(9)]
    rows = [
        (prompt, [rng.randrange(20) for _ in range(rng.choice([0, 1, 3, 5]))])
        for prompt in (long, long[4:], [3])
        for _ in range(rng.randrange(1, 5))
    ]
    rng.shuffle(rows)
    return rows


def assert_equal(ours: PackedBatch, wanted: PackedBatch) -> None:
    for field in dataclasses.fields(PackedBatch):
        a, b = getattr(ours, field.name), getattr(wanted, field.name)
        if field.name == "layout":
            assert (a.prompt_lens, a.response_lens) == (b.prompt_lens, b.response_lens)
        elif isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), field.name
        else:
            assert a == b, field.name


@pytest.mark.parametrize("seed", range(8))
def test_packs_like_pack(seed: int) -> None:
    rows = random_rows(seed)
    ids, mask = padded(rows, prompt_width=10, response_width=6)
    given, reason = PaddedRows.of(ids, mask, 6)
    assert given is not None and reason is None
    order = [row for group in given.groups.rows for row in group]
    picked, kept = ids[order], mask[order]
    wanted = pack(picked[:, :10], picked[:, 10:], prompt_mask=kept[:, :10], response_mask=kept[:, 10:])
    assert_equal(given.pack(given.groups.rows), wanted)
    part = given.groups.rows[-1:]
    wanted = pack(
        ids[part[0], :10], ids[part[0], 10:], prompt_mask=mask[part[0], :10], response_mask=mask[part[0], 10:]
    )
    assert_equal(given.pack(part), wanted)


def test_values_return_to_the_trainers_rows() -> None:
    rows = random_rows(3)
    ids, mask = padded(rows, prompt_width=9, response_width=5)
    given, _ = PaddedRows.of(ids, mask, 5)
    assert given is not None
    step = SharedStep.of(given, max_tokens=24, batch_size=len(rows), cost_model=TOKENS_ONLY)
    assert len(step.packs) > 1
    values = step.in_rows([p.labels.double() for p in step.packs])
    assert torch.equal(values, (ids * mask)[:, 9:].double())


@pytest.mark.parametrize(("column", "part"), [(4, "prompt"), (7, "response")])
def test_masked_tokens_among_real_ones_are_refused(column: int, part: str) -> None:
    ids, mask = padded([([1, 2, 3, 4], [5, 6, 7])] * 2, prompt_width=6, response_width=4)
    mask[1, column] = 0
    given, reason = PaddedRows.of(ids, mask, 4)
    assert given is None and reason == "a row has masked tokens among the real ones", part


def test_an_empty_prompt_is_refused() -> None:
    ids, mask = padded([([1], [5]), ([], [5])], prompt_width=3, response_width=2)
    assert PaddedRows.of(ids, mask, 2) == (None, "a row has an empty prompt")


def test_equal_hashes_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "flash_attn.integrations._trl_rows._hashes",
        lambda ids, mask: torch.zeros(len(ids), dtype=torch.int64),
    )
    ids, mask = padded([([1, 2], [5]), ([1, 2], [6]), ([1, 3], [5])], prompt_width=3, response_width=2)
    assert PaddedRows.of(ids, mask, 2) == (None, "different prompts have the same hash")
    given, _ = PaddedRows.of(ids[:2], mask[:2], 2)
    assert given is not None and given.groups.rows == [[0, 1]]
