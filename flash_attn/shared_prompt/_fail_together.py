"""When one rank of a group raises, the others raise too, instead of waiting in a collective for its timeout.

The rank that fails says so in the group's store; every rank watches the store from a thread. When it reads of
a failure, NCCL's collectives are aborted, and exchanges of this package that wait on the CPU stop waiting.
(Gloo cannot be aborted: other collectives on CPUs end when the process that failed does.)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

POLL_SECONDS = 0.2
_uses: dict[str, int] = {}
_open: list[_Watch] = []


class _Watch:
    """One block of one rank: the store's key, and whether a rank has failed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        name = group.group_name
        _uses[name] = _uses.get(name, 0) + 1
        self.store: Any = dist.distributed_c10d._get_process_group_store(group)
        self.key, self.group = f"flash_attn/failed/{name}/{_uses[name]}", group
        self.done = threading.Event()
        self.failure: str | None = None
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def look(self) -> str | None:
        """What the store says of a failure."""
        if self.failure is None:
            with contextlib.suppress(RuntimeError):  # the store's host may be gone
                if self.store.check([self.key]):
                    self.failure = self.store.get(self.key).decode()
        return self.failure

    def tell(self, error: BaseException) -> None:
        with contextlib.suppress(RuntimeError):
            self.store.set(self.key, f"rank {self.group.rank()}: {type(error).__name__}: {error}")

    def watch(self) -> None:
        while not self.done.wait(POLL_SECONDS):
            if self.look() is not None:
                _abort_nccl()
                return

    def close(self) -> None:
        self.done.set()
        self.thread.join()


def _abort_nccl() -> None:
    """Ends the collectives of every NCCL group of this process: a rank may wait in any of them."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if isinstance(group, dist.ProcessGroup) and "nccl" in dist.get_backend(group):
            group.abort()


@contextlib.contextmanager
def fail_together(group: dist.ProcessGroup) -> Iterator[None]:
    """Within the block, an exception of one rank ends the block on every rank of `group`, with RuntimeError
    on the others, naming the rank and its error. Groups cannot be used afterwards: end the process.

    Enter and leave it on all ranks, the same number of times, around a training loop or a step.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group, got {type(group).__name__}")
    watch = _Watch(group)
    _open.append(watch)
    try:
        yield
    except BaseException as error:
        failure = watch.look()
        if failure is None:
            watch.tell(error)
            raise
        raise RuntimeError(f"sequence parallelism stopped, {failure}") from error
    else:
        failure = watch.look()
        if failure is not None:
            raise RuntimeError(f"sequence parallelism stopped, {failure}")
    finally:
        _open.remove(watch)
        watch.close()


def wait_together(work: Any, device: torch.device) -> None:
    """`work.wait()`, which on the CPU raises RuntimeError once a rank has failed within `fail_together`."""
    if device.type != "cpu" or not _open:
        work.wait()
        return
    while True:
        try:
            work.wait(timedelta(seconds=POLL_SECONDS))
            return
        except RuntimeError:  # also where only the time is over
            if any(watch.failure is not None for watch in _open):
                raise
            if work.is_completed():
                work.wait()
                return
