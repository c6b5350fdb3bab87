"""A pack spread over 2, 3 and 4 processes: attention and log-probs, as of one process."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sharded_cases
from ranks import Ranks

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


def worst(errors: Iterable[float]) -> float:
    """The largest of them; NaN is infinitely large."""
    return max(error if error == error else float("inf") for error in errors)


def too_large(cases: list[Any], found: list[dict[str, float]]) -> list[Any]:
    """The cases with an error above the tolerance, and their errors."""
    return [(c, errors) for c, errors in zip(cases, found, strict=True) if worst(errors.values()) > TOLERANCE]


# Hk = 1 and 2, and key heads that are a multiple, a divisor and neither of the ranks.
HEADS = {2: [(4, 2), (4, 1), (8, 4)], 3: [(6, 2), (3, 1), (6, 3)], 4: [(4, 2), (8, 1), (8, 4)]}
WAYS = [("ulysses", 1), ("ulysses", 2), ("context", 1)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("boundary", ["fork", "shared"])
def test_attention_equals_one_process(ranks: Ranks, num_ranks: int, boundary: str) -> None:
    cases = [
        (lengths, boundary, (*heads, 8, 8), method, num_chunks, {})
        for lengths in sharded_cases.LENGTHS
        for heads in HEADS.get(num_ranks, [(4, 2)])
        for method, num_chunks in WAYS
    ]
    for found in ranks.run(num_ranks, sharded_cases.each, sharded_cases.sharded_attention, cases):
        assert not too_large(cases, found)


@pytest.mark.parametrize("boundary", ["fork", "shared"])
@pytest.mark.parametrize("method", ["ulysses", "context"])
@pytest.mark.parametrize("loss_mask", [False, True])
def test_log_probs_equal_one_process(ranks: Ranks, boundary: str, method: str, loss_mask: bool) -> None:
    for num_ranks in (2, 3, 4):
        cases = [(name, boundary, method, loss_mask, num_ranks == 3) for name in sharded_cases.LENGTHS]
        for found in ranks.run(num_ranks, sharded_cases.each, sharded_cases.sharded_log_probs, cases):
            assert not too_large(cases, found), num_ranks


@pytest.mark.parametrize(
    "kind, lengths, changes",
    [
        ("llama", "odd total, empty responses, uneven groups", {}),
        ("qwen3", "fewer rows than ranks", {"num_key_value_heads": 1}),
        ("gpt_oss", "long prompt", {}),  # windows and sinks
        ("gemma4_text", "long responses", {}),  # shared keys, head dims by layer
        ("deepseek_v3", "long prompt", {}),  # values of another head dim
    ],
)
def test_models_equal_one_process(ranks: Ranks, kind: str, lengths: str, changes: dict[str, int]) -> None:
    for boundary, method in (("fork", "ulysses"), ("shared", "context"), ("shared", "ulysses")):
        found = ranks.run(2, sharded_cases.sharded_model, kind, lengths, boundary, method, None, changes)
        assert max(map(worst, found)) < TOLERANCE, (boundary, method, found)


@pytest.mark.parametrize(
    "options, heads",
    [
        ({"window_size": (5, 0), "softcap": 2.0, "softmax_scale": 0.3}, (8, 4, 8, 8)),
        ({"sinks": True, "return_softmax_lse": True}, (8, 1, 8, 8)),
        ({"return_softmax_lse": True, "deterministic": True}, (12, 6, 8, 8)),
        ({}, (8, 4, 16, 8)),  # values of another head dim
    ],
)
def test_options_of_attention(ranks: Ranks, options: dict[str, object], heads: tuple[int, ...]) -> None:
    for method, num_chunks in WAYS:
        for num_ranks in (2, 4):
            case = ("odd total, empty responses, uneven groups", "fork", heads, method, num_chunks, options)
            found = ranks.run(num_ranks, sharded_cases.sharded_attention, *case)
            assert max(worst(errors.values()) for errors in found) < TOLERANCE, (method, num_ranks, found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_models_equal_one_process(ranks: Ranks, reentrant: bool) -> None:
    """Recomputation repeats the exchanges, on every rank in the same order."""
    lengths = "odd total, empty responses, uneven groups"
    for num_ranks, method in ((2, "ulysses"), (3, "context")):
        found = ranks.run(
            num_ranks, sharded_cases.sharded_model, "llama", lengths, "shared", method, reentrant, {}
        )
        assert max(map(worst, found)) < TOLERANCE, (num_ranks, method, found)


def test_windows_between_a_rank_and_the_pack(ranks: Ranks) -> None:
    """A window longer than a rank's rows is still a window."""
    changes = {"sliding_window": 28}
    found = ranks.run(
        2, sharded_cases.sharded_model, "gpt_oss", "long prompt", "fork", "ulysses", None, changes
    )
    assert max(map(worst, found)) < TOLERANCE, found


@pytest.mark.parametrize("num_ranks, method", [(2, "ulysses"), (3, "context")])
def test_fsdp2_with_checkpointing(ranks: Ranks, num_ranks: int, method: str) -> None:
    found = ranks.run(num_ranks, sharded_cases.fsdp_model, method)
    assert max(map(worst, found)) < TOLERANCE, found


@pytest.mark.parametrize("method", ["ulysses", "context"])
def test_rows_are_gathered_in_the_order_of_the_pack(ranks: Ranks, method: str) -> None:
    assert ranks.run(3, sharded_cases.gathered_values, method) == [(True, True)] * 3


def test_shift_labels_are_the_rows_own(ranks: Ranks) -> None:
    for expected, found in ranks.run(4, sharded_cases.unpacked_parts, "fork"):
        assert found == expected


def test_method_is_chosen_by_measured_cost(ranks: Ranks) -> None:
    found = ranks.run(2, sharded_cases.chosen_method)
    method, num_chunks, seconds, same, without_even_heads = found[0]
    assert found[0] == found[1], "ranks disagree"
    assert set(seconds) == {("ulysses", 1), ("ulysses", 2), ("context", 1)} and min(seconds.values()) > 0
    assert (method, num_chunks) == min(seconds, key=seconds.get) and same
    assert without_even_heads == "context"


MESSAGES = {
    "layout": "TypeError: layout must be a SharedPromptLayout, got PackedBatch",
    "group": "TypeError: group must be a process group .* got int",
    "method": 'ValueError: method must be "ulysses" or "context", got .ring.',
    "num_chunks": "ValueError: num_chunks must be at least 1, got 0",
    "kind of num_chunks": "TypeError: num_chunks must be a Python int, got float",
    "twice": "ValueError: layout must be a whole pack's, got one that is already spread over a group",
    "empty": "ValueError: layout must have at least one row, got an empty pack",
    "capacities": 'NotImplementedError: method "context" does not support layouts with capacities',
    "packed": "TypeError: packed must be a PackedBatch, got SharedPromptLayout",
    "shape": 'ValueError: shape must be given with method "auto"',
    "kind of shape": "TypeError: shape must be an AttentionShape, got int",
    "group of fail_together": "TypeError: group must be a process group, got NoneType",
    "heads": "ValueError: num_heads must be a multiple of the group's 2 ranks .* got 3",
    "auto heads": "ValueError: num_heads must be a multiple of the group's 2 ranks where .* got 3",
    "few rows": "ValueError: q must have at least the layout's 6 rows, got 1",
    "many rows": "ValueError: q must have this rank's 6 rows, got 12",
    "second derivative": "NotImplementedError: flash_attn: double backward .* is not supported",
    "plain layout": "TypeError: layout must be a ShardedLayout, got SharedPromptLayout",
    "local_rows": r"ValueError: values must have the 11 rows of the pack, got \[3\]",
    "gather_rows": r"ValueError: values must have this rank's 6 rows, got \[1\]",
    "hidden": "ValueError: hidden must have the .* rows of the pack",
    "few temperatures": r"ValueError: temperature must be a number or one per label \(\d+,\) on cpu",
    "one temperature": "ValueError: temperature must be > 0, got 0.0",
    "no dimensions": r"ValueError: temperature must be a number or one per label .* got \[\]",
    "vocabulary": r"ValueError: labels must be in \[0, \d+\) or -100, got \d+",
    "segments": "AttributeError: segments of a sequence-parallel layout .* layout.whole.segments",
    "other attribute": "AttributeError: ShardedLayout has no attribute 'nothing'",
    "copy_": "NotImplementedError: copy_ is not supported on a sequence-parallel layout",
    "pickle": "TypeError: a sequence-parallel layout cannot be pickled",
    "router": "NotImplementedError: output_router_logits is not supported with sequence parallelism",
    "labels": "ValueError: labels must not be given with a ShardedBatch",
}


def test_wrong_arguments_are_refused_by_every_rank(ranks: Ranks) -> None:
    for texts in ranks.run(2, sharded_cases.rejected):
        wrong = {name: text for name, text in texts.items() if not re.match(MESSAGES[name], text)}
        assert not wrong and texts.keys() == MESSAGES.keys()


def test_no_rank_waits_when_one_raises(tmp_path: Path) -> None:
    pool, failing = Ranks(3, tmp_path), 1
    try:
        begin = time.monotonic()
        outcomes = pool.outcomes(3, sharded_cases.failing_rank, failing)
        assert time.monotonic() - begin < 25  # gloo would wait for 30
        for rank, (kind, text) in enumerate(outcomes):
            assert kind == "raised" and "the disk of this rank is full" in text, (rank, kind, text)
            if rank != failing:
                assert re.search(
                    f"RuntimeError: sequence parallelism stopped, rank {failing}: ValueError", text
                )
    finally:
        pool.close()


def test_replicated_baseline_of_the_benchmark(ranks: Ranks) -> None:
    for num_ranks in (2, 4):  # as many key heads as ranks, and fewer
        found = ranks.run(num_ranks, sharded_cases.replicated_baseline)
        assert max(worst(errors.values()) for errors in found) < TOLERANCE, (num_ranks, found)


def test_gradients_of_keys_are_summed_in_fp32(ranks: Ranks) -> None:
    """In bf16 256 + 1 is 256; the sum over two ranks is 516."""
    assert ranks.run(2, sharded_cases.summed_in_fp32) == [[516.0], [0.0]]
