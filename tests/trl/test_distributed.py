"""Two processes on gloo: DDP training and an FSDP2 step equal the parent's, with other work on either
process."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compare import assert_same_logs, parameter_error
from tiny import model_path

CASES = ["ddp", "split_group", "unequal_forwards", "fsdp2"]
TIMEOUT_S = 150  # a hang is a failure, not a wait


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """All cases in one launch, because importing the frameworks takes longer than the cases."""
    folder = tmp_path_factory.mktemp("distributed")
    model_path(folder)
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


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_the_parents_two_processes(case, results):
    path = results / f"{case}.pt"
    assert path.exists(), "the processes failed or hung in this case or before it: see the captured output"
    sides = torch.load(path, weights_only=False)
    parent, shared = sides["parent"], sides["shared"]
    counts = shared["sharing"]
    assert counts["fallbacks"] == {} and counts["num_shared_passes"] > 0
    assert counts["num_packed_tokens"] < counts["num_replicated_tokens"]
    assert_same_logs(parent["logs"], shared["logs"])
    assert parameter_error(parent["weights"], shared["weights"]) <= 1e-4
    if case == "unequal_forwards":
        assert counts["num_forwards"] > counts["num_shared_passes"]
