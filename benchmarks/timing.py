"""The one timer: CUDA events, providers interleaved, median and 20th and 80th percentile."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass
class Timing:
    time_ms: float  # median
    p20_ms: float
    p80_ms: float
    rounds: int


SLOW_MS = 400.0  # calls above are run in SLOW_ROUNDS rounds at most
SLOW_ROUNDS = 3
ONCE_MS = 2500.0  # and calls above in one


def prepare(call: Call) -> None:
    """What a call asks to be done before it, untimed: `call.prepare`, if it has one."""
    getattr(call, "prepare", lambda: None)()


def once(call: Call) -> float:
    prepare(call)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def interleaved(calls: dict[str, Call], repeats: int = 15, warmup: int = 2) -> dict[str, Timing]:
    """Each round runs every call once, so that clocks and temperature are the same for all; in a new order,
    so that no call always follows the same one.
    """
    for call in calls.values():
        for _ in range(warmup):
            if once(call) > SLOW_MS:
                break
    torch.cuda.synchronize()
    rounds = dict.fromkeys(calls, repeats)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(repeats):
        for name in random.Random(index).sample(list(calls), len(calls)):
            if index < rounds[name]:
                ms = once(calls[name])
                times[name].append(ms)
                if ms > SLOW_MS:
                    rounds[name] = 1 if ms > ONCE_MS else min(repeats, SLOW_ROUNDS)
    return {name: summary(values) for name, values in times.items()}


def summary(values: list[float]) -> Timing:
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return Timing(at(0.5), at(0.2), at(0.8), len(ordered))


def as_graph(call: Call, stream: torch.cuda.Stream | None = None) -> Call:
    """The call as a replayed CUDA graph: without the cost of launching from Python. A call to autograd needs
    the `stream` on which its forward ran: the backward runs there too.
    """
    stream = stream or torch.cuda.Stream()
    prepare(call)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        keep = call()
    return lambda: (graph.replay(), keep)[0]


@dataclass
class Memory:
    peak_gib: float  # most that was allocated while the call ran, inputs included
    extra_gib: float  # of that, neither there before nor returned: scratch


def memory(call: Call) -> Memory:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak, returned = torch.cuda.max_memory_allocated(), _bytes(result)
    return Memory(peak / 2**30, (peak - before - returned) / 2**30)


def _bytes(result: object) -> int:
    """Memory of the tensors in a result, nested tuples too."""
    return sum({s.data_ptr(): s.nbytes() for s in _storages(result)}.values())


def _storages(result: object) -> list[torch.UntypedStorage]:
    if isinstance(result, torch.Tensor):
        return [result.untyped_storage()]
    parts = result if isinstance(result, list | tuple) else ()
    return [storage for part in parts for storage in _storages(part)]
