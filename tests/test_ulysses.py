"""A pack spread over 2, 3 and 4 processes: attention and log-probs, as of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sharded_cases
from ranks import Ranks

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


# Hk = 1 and 2, and key heads that are a multiple, a divisor and neither of the ranks.
HEADS = {2: [(4, 2), (4, 1), (8, 4)], 3: [(6, 2), (3, 1), (6, 3)], 4: [(4, 2), (8, 1), (8, 4)]}
WAYS = [("ulysses", 1), ("ulysses", 2), ("context", 1)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("boundary", ["fork", "shared"])
def test_attention_equals_one_process(ranks: Ranks, num_ranks: int, boundary: str) -> None:
    for lengths in sharded_cases.LENGTHS:
        for num_heads, num_heads_k in HEADS.get(num_ranks, [(4, 2)]):
            for method, num_chunks in WAYS:
                heads = (num_heads, num_heads_k, 8, 8)
                case = (lengths, boundary, heads, method, num_chunks, {})
                found = ranks.run(num_ranks, sharded_cases.sharded_attention, *case)
                worst = max(max(errors.values()) for errors in found)
                assert worst < TOLERANCE, (lengths, heads, method, num_chunks, found)


@pytest.mark.parametrize("boundary", ["fork", "shared"])
@pytest.mark.parametrize("method", ["ulysses", "context"])
@pytest.mark.parametrize("loss_mask", [False, True])
def test_log_probs_equal_one_process(ranks: Ranks, boundary: str, method: str, loss_mask: bool) -> None:
    for lengths in sharded_cases.LENGTHS:
        for num_ranks in (2, 3, 4):
            case = (lengths, boundary, method, loss_mask, num_ranks == 3)
            found = ranks.run(num_ranks, sharded_cases.sharded_log_probs, *case)
            worst = max(max(errors.values()) for errors in found)
            assert worst < TOLERANCE, (lengths, num_ranks, found)


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
        assert max(map(max, found)) < TOLERANCE, (boundary, method, found)
