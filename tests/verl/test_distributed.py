"""Two processes on gloo: data parallel and sequence parallel (Ulysses) updates equal veRL's own engine's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compare import METRICS, assert_same_parameters
from tiny import model_path
from two_processes import result_of, run_cases

CASES = [
    "data_parallel", "any_partition", "dynamic", "errors", "sequence_parallel",
    "sequence_parallel_one_key_head", "sequence_parallel_fallback", "sequence_parallel_fused",
    "sequence_parallel_critic",
]  # fmt: skip
TIMEOUT_S = 170


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    for kind in ("qwen3", "one_key_head"):
        model_path(folder, kind)
    run_cases(Path(__file__).parent / "worker.py", folder, CASES, TIMEOUT_S)
    return folder


def assert_same_step(plain: dict, shared: dict) -> None:
    """Metrics of every mini-batch and the parameters after them."""
    for name in (name for name in METRICS if name in plain["metrics"]):
        torch.testing.assert_close(
            torch.tensor(plain["metrics"][name]), torch.tensor(shared["metrics"][name]), rtol=1e-5, atol=1e-5,
            msg=lambda text, n=name: f"{n}: {text}",
        )  # fmt: skip
    assert all(g > 1e-2 for g in plain["metrics"]["grad_norm"]), "nothing was trained"
    assert_same_parameters(plain["parameters"], shared["parameters"])


def test_an_error_of_one_rank_is_raised_by_all(results):
    found = result_of("errors", results)
    assert found["error"] == "another rank cannot split its rows into micro-batches: see its error"


@pytest.mark.parametrize("case", [case for case in CASES if case != "errors"])
def test_two_processes_equal_the_plain_engine(case, results):
    found = result_of(case, results)
    plain, shared = found.pop("sdpa"), found["dualkv"]
    if case != "any_partition":  # there the ranks hold other rows
        torch.testing.assert_close(plain["log_probs"], shared["log_probs"], rtol=1e-5, atol=1e-5)
    for other in found.values():
        assert_same_step(plain, other)
    account = shared["sharing"]
    if case == "sequence_parallel_fallback":
        assert account["fallbacks"] == {"a test": 3} and account["num_shared_passes"] == 0
        assert shared["metrics"]["shared_prompt/fallbacks"] == [1.0, 1.0]
    else:
        assert not account["fallbacks"] and account["num_packed_tokens"] < account["num_replicated_tokens"]
        assert shared["metrics"]["shared_prompt/fallbacks"] == [0.0] * len(shared["metrics"]["loss"])
