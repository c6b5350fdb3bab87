"""For tests/trl and tests/verl, each in an environment of its own: cases in two processes on gloo, and how
far apart parameters are."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch


def run_cases(worker: Path, folder: Path, cases: Sequence[str], timeout_s: float) -> None:
    """`worker FOLDER RANK PORT CASE...` as two processes; each case leaves `folder / f"{case}.pt"`.

    All cases in one launch, because importing the frameworks takes longer than the cases. A hang is a
    failure, not a wait: the missing result says which case it was.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    with logs[0].open("w") as out0, logs[1].open("w") as out1:
        processes = [
            subprocess.Popen(
                [sys.executable, str(worker), str(folder), str(rank), port, *cases], stdout=out, stderr=out
            )
            for rank, out in enumerate((out0, out1))
        ]
        try:
            for process in processes:
                process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                process.kill()
    for rank, log in enumerate(logs):
        print(f"process {rank}:\n{log.read_text()[-3000:]}")


def result_of(case: str, folder: Path) -> dict:
    """What process 0 wrote of `case`; fails where it wrote nothing."""
    path = folder / f"{case}.pt"
    assert path.exists(), "the processes failed or hung in this case or before it: see the captured output"
    return torch.load(path, weights_only=False)


def parameter_error(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """|a - b| / |a| over all parameters together."""
    assert a.keys() == b.keys()
    difference = sum(float((a[k] - b[k]).double().square().sum()) for k in a)
    return (difference / sum(float(a[k].double().square().sum()) for k in a)) ** 0.5
