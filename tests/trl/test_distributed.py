"""Two processes on gloo: DDP training and an FSDP2 step equal the parent's, with other work on either
process."""

from __future__ import annotations

from pathlib import Path

import pytest
from compare import assert_same_logs
from tiny import model_path
from two_processes import parameter_error, result_of, run_cases

CASES = ["ddp", "split_group", "unequal_forwards", "fsdp2"]
TIMEOUT_S = 150


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    model_path(folder)
    run_cases(Path(__file__).parent / "worker.py", folder, CASES, TIMEOUT_S)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_the_parents_two_processes(case, results):
    sides = result_of(case, results)
    parent, shared = sides["parent"], sides["shared"]
    counts = shared["sharing"]
    assert counts["fallbacks"] == {} and counts["num_shared_passes"] > 0
    assert counts["num_packed_tokens"] < counts["num_replicated_tokens"]
    assert_same_logs(parent["logs"], shared["logs"])
    assert parameter_error(parent["weights"], shared["weights"]) <= 1e-4
    if case == "unequal_forwards":
        assert counts["num_forwards"] > counts["num_shared_passes"]
