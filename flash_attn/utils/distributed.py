"""Differentiable collectives over the first dimension, under flash-attn's names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    """(n, ...) of every rank to (n * ranks, ...), without autograd; the handle where `async_op`."""
    out = input_.new_empty(dist.get_world_size(process_group) * input_.shape[0], *input_.shape[1:])
    return out, dist.all_gather_into_tensor(out, input_.contiguous(), group=process_group, async_op=async_op)


def reduce_scatter_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    """Sum over ranks of (n * ranks, ...), each rank's share (n, ...), without autograd."""
    world = dist.get_world_size(process_group)
    if input_.shape[0] % world:
        raise ValueError(f"rows must divide by the {world} ranks, got {input_.shape[0]}")
    out = input_.new_empty(input_.shape[0] // world, *input_.shape[1:])
    return out, dist.reduce_scatter_tensor(out, input_.contiguous(), group=process_group, async_op=async_op)


def all_reduce_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    """Sum over ranks, in a new tensor, without autograd."""
    out = input_.contiguous().clone()
    return out, dist.all_reduce(out, group=process_group, async_op=async_op)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_gather_raw(x, group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return reduce_scatter_raw(grad, ctx.group)[0], None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return reduce_scatter_raw(x, group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return all_gather_raw(grad, ctx.group)[0], None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return all_reduce_raw(x, group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


def all_gather(input_: Tensor, process_group: Any) -> Tensor:
    """(n, ...) of every rank to (n * ranks, ...); the gradient is summed over ranks and scattered."""
    return _AllGather.apply(input_, process_group)


def reduce_scatter(input_: Tensor, process_group: Any) -> Tensor:
    """Sum over ranks of (n * ranks, ...), each rank's share (n, ...); the gradient is gathered."""
    return _ReduceScatter.apply(input_, process_group)


def all_reduce(input_: Tensor, process_group: Any) -> Tensor:
    """Sum over ranks; the gradient passes unchanged."""
    return _AllReduce.apply(input_, process_group)
