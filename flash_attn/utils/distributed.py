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


class AllGatherFunc(torch.autograd.Function):
    """`all_gather`, as flash-attn names its autograd class."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_gather_raw(x, group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return reduce_scatter_raw(grad, ctx.group)[0], None


class ReduceScatterFunc(torch.autograd.Function):
    """`reduce_scatter`, likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return reduce_scatter_raw(x, group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return all_gather_raw(grad, ctx.group)[0], None


class AllReduceFunc(torch.autograd.Function):
    """`all_reduce`, likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return all_reduce_raw(x, group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


def all_gather(input_: Tensor, process_group: Any) -> Tensor:
    """(n, ...) of every rank to (n * ranks, ...); the gradient is summed over ranks and scattered."""
    return AllGatherFunc.apply(input_, process_group)


def reduce_scatter(input_: Tensor, process_group: Any) -> Tensor:
    """Sum over ranks of (n * ranks, ...), each rank's share (n, ...); the gradient is gathered."""
    return ReduceScatterFunc.apply(input_, process_group)


def all_reduce(input_: Tensor, process_group: Any) -> Tensor:
    """Sum over ranks; the gradient passes unchanged."""
    return AllReduceFunc.apply(input_, process_group)


def sync_shared_params(model: torch.nn.Module, process_group: Any) -> None:
    """Gives every rank the group's first rank's values of the parameters that have `_shared_params = True`.

    They are sent in the order of their names: ranks may hold different numbers of other parameters.
    """
    source = dist.get_global_rank(process_group, 0)
    for _, parameter in sorted(_marked(model, "_shared_params")):
        with torch.no_grad():
            dist.broadcast(parameter, src=source, group=process_group)


def allreduce_sequence_parallel_grad(model: torch.nn.Module, process_group: Any) -> None:
    """Sums over ranks the gradients of the parameters that have `_sequence_parallel = True`, in one call.

    Each rank of a sequence-parallel group has seen its part of the sequence only. All ranks must have the
    same of these gradients; parameters without one are left out.
    """
    grads = [p.grad for _, p in sorted(_marked(model, "_sequence_parallel")) if p.grad is not None]
    if not grads:
        return
    with torch.no_grad():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=process_group)
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def _marked(model: torch.nn.Module, mark: str) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if getattr(p, mark, False)]


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """This rank's share of `dim` in units of `multiple_of`; the first ranks take one unit more where the
    units do not divide by `world_size`."""
    units, more = divmod(dim // multiple_of, world_size)
    return (units + (local_rank < more)) * multiple_of
