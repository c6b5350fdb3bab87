"""A pool of processes for tests of several ranks (gloo, or NCCL): started once, then given functions to run.

`run(num_ranks, function, *arguments)` calls the function on ranks 0..num_ranks-1, each with a process group
of exactly those, and returns what every rank returned. An exception or silence of a rank fails the test.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 30.0


def _serve(rank: int, size: int, backend: str, store: str, connection: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    wait = timedelta(seconds=TIMEOUT_SECONDS)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=wait
    )
    groups = {n: dist.new_group(list(range(n)), timeout=wait) for n in range(1, size)} | {
        size: dist.group.WORLD
    }
    connection.send("ready")
    while (message := connection.recv()) is not None:
        num_ranks, function, arguments = message
        try:
            torch.manual_seed(0)
            connection.send(("returned", function(groups[num_ranks], *arguments)))
        except BaseException:
            connection.send(("raised", traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """`size` processes that wait for work; with "nccl" each has the GPU of its rank."""

    def __init__(self, size: int, folder: Path, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("spawn")
        self.connections, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, backend, str(folder / "store"), theirs), daemon=True
            )
            process.start()
            self.connections.append(ours)
            self.processes.append(process)
        for rank, connection in enumerate(self.connections):
            assert connection.poll(120), f"rank {rank} did not start"
            assert connection.recv() == "ready"

    def run(self, num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returned on each rank; AssertionError with a rank's traceback where it raised."""
        results = self.outcomes(num_ranks, function, *arguments)
        # The first to raise is the one to read; the others then wait in vain.
        failed = [f"rank {i} {kind}:\n{text}" for i, (kind, text) in enumerate(results) if kind != "returned"]
        assert not failed, "\n".join(failed)
        return [value for _, value in results]

    def outcomes(
        self, num_ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = TIMEOUT_SECONDS
    ) -> list[tuple[str, Any]]:
        """("returned", value), ("raised", traceback) or ("hangs", None) of each rank."""
        for connection in self.connections[:num_ranks]:
            connection.send((num_ranks, function, arguments))
        deadline, results = time.monotonic() + seconds, []
        for connection in self.connections[:num_ranks]:
            there = connection.poll(max(deadline - time.monotonic(), 0.1))
            results.append(connection.recv() if there else ("hangs", None))
        return results

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
