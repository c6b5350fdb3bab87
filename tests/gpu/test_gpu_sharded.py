"""Several GPUs, NCCL: a pack spread over all of them, in bf16, by the same rule as on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sharded_gpu_cases
import torch
from ranks import Ranks

pytestmark = pytest.mark.multi_gpu


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(torch.cuda.device_count(), tmp_path_factory.mktemp("gpus"), "nccl")
    yield pool
    pool.close()


@pytest.mark.parametrize("way", sharded_gpu_cases.WAYS, ids=str)
@pytest.mark.parametrize("boundary", ["fork", "shared"])
def test_attention_obeys_the_rule(ranks: Ranks, boundary: str, way: tuple[str, int]) -> None:
    size = len(ranks.processes)
    for heads in sharded_gpu_cases.HEADS:
        for options in sharded_gpu_cases.OPTIONS:
            found = ranks.run(size, sharded_gpu_cases.attention, boundary, heads, way, options)
            assert not any(found), (heads, options, found)


@pytest.mark.parametrize("method", ["ulysses", "context"])
@pytest.mark.parametrize("boundary", ["fork", "shared"])
def test_model_equals_one_gpu(ranks: Ranks, boundary: str, method: str) -> None:
    found = ranks.run(len(ranks.processes), sharded_gpu_cases.model, boundary, method)
    assert all(values < 0.05 and grads < 0.03 for values, grads in found), found
