"""Dense batches in CUDA graphs: which tables a graph builds at each replay, and which it reads."""

from __future__ import annotations

import gc
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn import _calls, _ops, flash_attn_func


def batch(seqlen: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seqlen)
    shapes = [(2, seqlen, 4, 64), (2, seqlen, 2, 64), (2, seqlen, 2, 64)]
    made = [torch.randn(s, device="cuda", dtype=torch.bfloat16, generator=generator) for s in shapes]
    return [x.requires_grad_() for x in made]


def step(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    out = flash_attn_func(*tensors, causal=True)
    return out, *torch.autograd.grad(out, tensors, torch.ones_like(out))


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every plan that is built, whether a graph is being captured."""
    built: list[bool] = []
    tables = _ops.plan_tables

    def count(*args: Any, **kwargs: Any) -> list[Tensor]:
        built.append(torch.cuda.is_current_stream_capturing())
        return tables(*args, **kwargs)

    monkeypatch.setattr(_ops, "plan_tables", count)
    monkeypatch.setattr(_calls, "_batches", {})
    monkeypatch.setattr(_calls, "_tables", OrderedDict())
    monkeypatch.setattr(_calls, "_in_graphs", {})  # what is kept for the test's graph goes with the test
    return built


@pytest.mark.parametrize("same_stream", [True, False])
def test_a_graph_reads_the_tables_of_its_warm_up(path: int, same_stream: bool, plans: list[bool]) -> None:
    """They stay when the shape is forgotten. On another stream they might not be written yet."""
    tensors, warm = batch(150 + path), torch.cuda.Stream()
    stream = warm if same_stream else torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        step(tensors)
        graph = torch.cuda.CUDAGraph()
        warm.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        results = step(tensors)
    assert plans == ([False] if same_stream else [False, True])
    with torch.cuda.stream(warm):
        for seqlen in range(1, _calls._MAX_TABLES + 2):
            flash_attn_func(*batch(seqlen))
    gc.collect()
    torch.cuda.synchronize()
    with torch.cuda.stream(warm):  # the freed tables' stream and sizes: what is free is overwritten
        rest = [
            torch.full((n,), 2**31 - 1, dtype=torch.int32, device="cuda")
            for n in (16, 64, 256, 1024, 4096)
            for _ in range(2000)
        ]
    torch.cuda.synchronize()
    with torch.no_grad():
        for x in tensors:
            x.copy_(torch.randn_like(x))
    graph.replay()
    wanted = step(tensors)
    del rest
    for x, y in zip(results, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-7, atol=2**-7)
