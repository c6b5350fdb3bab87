"""Two processes on gloo: data parallel and sequence parallel (Ulysses) updates equal veRL's own engine's."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compare import METRICS, assert_same_parameters
from tiny import model_path

CASES = [
    "data_parallel", "any_partition", "dynamic", "errors", "sequence_parallel",
    "sequence_parallel_one_key_head", "sequence_parallel_fallback", "sequence_parallel_fused",
]  # fmt: skip
TIMEOUT_S = 170  # a hang is a failure, not a wait


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """All cases in one launch, because importing the frameworks takes longer than the cases."""
    folder = tmp_path_factory.mktemp("distributed")
    for kind in ("qwen3", "one_key_head"):
        model_path(folder, kind)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    worker = str(Path(__file__).parent / "worker.py")
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    with logs[0].open("w") as out0, logs[1].open("w") as out1:
        processes = [
            subprocess.Popen(
                [sys.executable, worker, str(folder), str(rank), port, *CASES], stdout=out, stderr=out
            )
            for rank, out in enumerate((out0, out1))
        ]
        try:
            for process in processes:
                process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass  # the missing result says which case hung
        finally:
            for process in processes:
                process.kill()
    for rank, log in enumerate(logs):
        print(f"process {rank}:\n{log.read_text()[-3000:]}")
    return folder


def assert_same_step(plain: dict, shared: dict) -> None:
    """Metrics of every mini-batch and the parameters after them."""
    for name in METRICS:
        torch.testing.assert_close(
            torch.tensor(plain["metrics"][name]), torch.tensor(shared["metrics"][name]), rtol=1e-5, atol=1e-5,
            msg=lambda text, n=name: f"{n}: {text}",
        )  # fmt: skip
    assert all(g > 1e-2 for g in plain["metrics"]["grad_norm"]), "nothing was trained"
    assert_same_parameters(plain["parameters"], shared["parameters"])


def test_an_error_of_one_rank_is_raised_by_all(results):
    found = torch.load(results / "errors.pt", weights_only=False)
    assert found["error"] == "another rank cannot split its rows into micro-batches: see its error"


@pytest.mark.parametrize("case", [case for case in CASES if case != "errors"])
def test_two_processes_equal_the_plain_engine(case, results):
    path = results / f"{case}.pt"
    assert path.exists(), "the processes failed or hung in this case or before it: see the captured output"
    found = torch.load(path, weights_only=False)
    plain, shared = found.pop("sdpa"), found["dualkv"]
    if case != "any_partition":  # there the ranks hold other rows
        torch.testing.assert_close(plain["log_probs"], shared["log_probs"], rtol=1e-5, atol=1e-5)
    for other in found.values():
        assert_same_step(plain, other)
    account = shared["sharing"]
    if case == "sequence_parallel_fallback":
        assert account["fallbacks"] == {"a test": 3} and account["num_shared"] == 0
        assert shared["metrics"]["shared_prompt/fallbacks"] == [1.0, 1.0]
    else:
        assert not account["fallbacks"] and account["num_packed_tokens"] < account["num_replicated_tokens"]
        assert shared["metrics"]["shared_prompt/fallbacks"] == [0.0] * len(shared["metrics"]["loss"])
