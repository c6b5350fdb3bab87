"""When one rank of a group raises, the others raise too, instead of waiting in a collective for its timeout.

The rank that fails says so in the group's store and aborts its side; every rank watches the store from a
thread and aborts its own side when it reads of a failure, which ends the collectives that are under way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

POLL_SECONDS = 0.2
_uses: dict[str, int] = {}


@contextlib.contextmanager
def fail_together(group: dist.ProcessGroup) -> Iterator[None]:
    """Within the block, an exception of one rank ends the block on every rank of `group`, with RuntimeError
    on the others, naming the rank and its error. The group cannot be used afterwards: destroy it.

    Enter and leave it on all ranks, the same number of times, around a training loop or a step.
    """
    store: Any = dist.distributed_c10d._get_process_group_store(group)
    name = group.group_name
    _uses[name] = _uses.get(name, 0) + 1
    key, done = f"flash_attn/failed/{name}/{_uses[name]}", threading.Event()
    watcher = threading.Thread(target=_watch, args=(store, key, group, done), daemon=True)
    watcher.start()
    try:
        yield
    except BaseException as error:
        failed = _failure(store, key)
        if failed is None:
            with contextlib.suppress(RuntimeError):  # the store's host may be gone
                store.set(key, f"rank {group.rank()}: {type(error).__name__}: {error}")
            raise
        raise RuntimeError(f"sequence parallelism stopped, {failed}") from error
    else:
        failed = _failure(store, key)
        if failed is not None:
            raise RuntimeError(f"sequence parallelism stopped, {failed}")
    finally:
        done.set()
        watcher.join()


def _failure(store: Any, key: str) -> str | None:
    with contextlib.suppress(RuntimeError):
        if store.check([key]):
            return store.get(key).decode()
    return None


def _watch(store: Any, key: str, group: dist.ProcessGroup, done: threading.Event) -> None:
    while not done.wait(POLL_SECONDS):
        if _failure(store, key) is not None:
            group.abort()
            return
