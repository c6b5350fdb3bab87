"""Ring attention of ring-flash-attn and yunchang, from their wheels, on two processes: they call flash-attn's
private functions with what these functions say of their own parameters, and give them tensors to fill."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor

from flash_attn import flash_attn_func, flash_attn_varlen_func

modeling = pytest.importorskip("transformers.modeling_flash_attention_utils")
if not hasattr(modeling, "is_flash_attn_greater_or_equal_2_10"):  # until 5.8; ring-flash-attn imports it
    modeling.is_flash_attn_greater_or_equal_2_10 = lambda: True
pytest.importorskip("ring_flash_attn", reason="pip install ring-flash-attn")
pytest.importorskip("yunchang", reason="pip install yunchang")
LENGTHS = (8, 16)  # of the sequences of a packed batch
Cut = Callable[[Tensor, int], Tensor]


def in_order(x: Tensor, rank: int) -> Tensor:
    return x.chunk(2)[rank]


def zigzag(x: Tensor, rank: int) -> Tensor:
    quarters = x.chunk(4)
    return torch.cat((quarters[rank], quarters[3 - rank]))


def striped(x: Tensor, rank: int) -> Tensor:
    return x[rank::2]


def of_each_sequence(cut: Cut) -> Cut:
    return lambda x, rank: torch.cat([cut(part, rank) for part in x.split(LENGTHS)])


KINDS: dict[str, Cut] = {
    "ring_flash_attn_func": in_order, "zigzag_ring_flash_attn_func": zigzag,
    "stripe_flash_attn_func": striped, "ring_flash_attn_varlen_func": of_each_sequence(in_order),
    "zigzag_ring_flash_attn_varlen_func": of_each_sequence(zigzag),
}  # fmt: skip


def errors(group: Any, package: str, name: str) -> list[float]:
    """Of out, dq, dk and dv of this rank's rows, relative to one process's in fp32."""
    packed, cut, rank = "varlen" in name, KINDS[name], group.rank()
    inputs = [torch.randn(24, 4, 16).bfloat16() for _ in range(4)]
    q, k, v, dout = inputs if packed else [x[None] for x in inputs]
    whole = [x.float().requires_grad_() for x in (q, k, v)]
    seqlens = torch.tensor([0, 8, 24], dtype=torch.int32)
    tables = (seqlens, seqlens, 16, 16)
    out = (
        flash_attn_varlen_func(*whole, *tables, causal=True)
        if packed
        else flash_attn_func(*whole, causal=True)
    )
    expected = [out, *torch.autograd.grad(out, whole, dout.float())]

    def own(x: Tensor) -> Tensor:
        return cut(x, rank).contiguous() if packed else cut(x[0], rank)[None].contiguous()

    mine = [own(x).requires_grad_() for x in (q, k, v)]
    function = getattr(importlib.import_module(package), name)
    out = function(*mine, *((seqlens // 2, 8) if packed else ()), causal=True)
    got = [out, *torch.autograd.grad(out, mine, own(dout))]
    pairs = [(x.float(), own(y.detach())) for x, y in zip(got, expected, strict=True)]
    return [float((x - y).norm() / y.norm()) for x, y in pairs]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(2, Path(tmp_path_factory.mktemp("rings")))
    yield pool
    pool.close()


# yunchang's varlen rings pass arguments of flash-attn before 2.7.
CASES = [("ring_flash_attn", name) for name in KINDS] + [("yunchang", name) for name in [*KINDS][:3]]


@pytest.mark.parametrize(("package", "name"), CASES)
def test_a_ring_equals_one_process(package: str, name: str, ranks: Ranks) -> None:
    for found in ranks.run(2, errors, package, name):
        assert max(found) < 1e-2, found
