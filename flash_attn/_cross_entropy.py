"""Cross entropy of one label a row over logits (rows, vocab), in fp32 and a few rows at a time:

    lse = logsumexp(s x), loss = lse - (1 - e) s x[label] - e mean(s x) + z lse^2
with logit_scale s, label_smoothing e, lse_square_scale z. The vocabulary may be split over the ranks of a
process group. Shared by losses/cross_entropy.py and ops/triton/cross_entropy.py. Where Triton is, the passes
over the logits are its kernels (_cross_entropy_kernel.py), else PyTorch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn import _triton, checks

_CHUNK_ELEMENTS = 1 << 25  # of fp32 logits at a time: 128 MiB
_BLOCK = 4096  # columns that a Triton program reads at a time


def _chunks(x: Tensor) -> range:
    return range(0, x.shape[0], max(1, _CHUNK_ELEMENTS // max(x.shape[1], 1)))


@functools.cache
def _module() -> Any:
    """The kernels' module, or None without Triton; said once."""
    return _triton.load(
        "_cross_entropy_kernel", "'s cross entropy runs in PyTorch", not _triton.interpreted()
    )


def _kernels(logits: Tensor) -> Any:
    """The kernels where they take these logits: on a GPU (or interpreted), the columns side by side."""
    if not (logits.is_cuda or _triton.interpreted()) or torch.compiler.is_compiling():
        return None
    fits = logits.dtype in (torch.float32, torch.bfloat16, torch.float16) and logits.stride(1) == 1
    return _module() if fits and logits.numel() else None


def _row_sums(
    logits: Tensor, column: Tensor, scale: float, lse: Tensor | None, with_total: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """lse, the label's logit and the sum of logits (rows, vocab) times scale: (rows,) fp32 each.

    `column` (rows,) int64 is the label's, -1 picks 0. A given `lse` (rows,) is copied: the caller may write
    over it before the backward. Without `with_total` the sums are 0.
    """
    rows, vocab = logits.shape
    picked, total = (torch.zeros(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    found = torch.empty_like(picked)
    if lse is not None:
        found.copy_(lse)
    kernels = _kernels(logits)
    if kernels is not None:
        with torch.cuda.device_of(logits):
            kernels.row_sums[(rows,)](
                logits, column, found, picked, total, logits.stride(0), vocab, scale,
                WITH_SUMS=lse is None or with_total, WITH_LSE=lse is None, WITH_TOTAL=with_total,
                BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip
        return found, picked, total
    step = _chunks(logits)
    for begin in step:
        part = slice(begin, begin + step.step)
        x = logits[part].float() * scale
        if lse is None:
            found[part] = x.logsumexp(-1)
        own = x.gather(1, column[part].clamp(min=0)[:, None])[:, 0] if vocab else picked[part]
        picked[part] = torch.where(column[part] >= 0, own, 0.0)
        if with_total:
            total[part] = x.sum(-1)
    return found, picked, total


def _gradients(
    logits: Tensor,
    column: Tensor,
    lse: Tensor,
    weight: Tensor,
    dlogits: Tensor,
    options: tuple[float, float, float, float],
) -> None:
    """Writes dlogits (rows, vocab), of the logits' dtype, which may be the logits themselves.

    `column` (rows,) int64, -1: no label here; `lse` (rows,) fp32; `weight` (rows,) fp32: of each row's loss,
    scale included. `options`: scale, smoothing, smoothing / all columns, lse_square_scale.
    """
    (rows, vocab), (scale, smoothing, smooth_share, lse_square_scale) = logits.shape, options
    kernels = _kernels(logits) if dlogits.stride(1) == 1 else None
    if kernels is not None:
        with torch.cuda.device_of(logits):
            kernels.gradients[(rows, -(-vocab // _BLOCK))](
                logits, column, lse, weight, dlogits, logits.stride(0), dlogits.stride(0), vocab, scale,
                smoothing, smooth_share, lse_square_scale, BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip
        return
    step = _chunks(logits)
    for begin in step:
        part = slice(begin, begin + step.step)
        d = (logits[part].float() * scale - lse[part, None]).exp_()
        d *= (1 + 2 * lse_square_scale * lse[part])[:, None]
        if smooth_share:
            d -= smooth_share
        taken = torch.where(column[part] >= 0, 1 - smoothing, 0.0)[:, None]
        d.scatter_add_(1, column[part].clamp(min=0)[:, None], -taken)
        own = weight[part, None]
        dlogits[part] = torch.where(own == 0, 0.0, d * own).to(dlogits.dtype)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        precomputed_lse: Tensor | None,
        smoothing: float,
        logit_scale: float,
        lse_square_scale: float,
        ignore_index: int,
        inplace_backward: bool,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        vocab = logits.shape[1]
        world, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        local = labels - rank * vocab
        here = (labels != ignore_index) & (local >= 0) & (local < vocab)
        column = torch.where(here, local, -1)
        lse, label_logit, total = _row_sums(logits, column, logit_scale, precomputed_lse, smoothing != 0)
        mean = total / max(vocab * world, 1)
        if world > 1:
            if precomputed_lse is None:
                shares = [torch.empty_like(lse) for _ in range(world)]
                dist.all_gather(shares, lse, group=group)
                lse = torch.stack(shares).logsumexp(0)
            dist.all_reduce(label_logit, group=group)
            if smoothing:
                dist.all_reduce(mean, group=group)
        counted = labels != ignore_index
        z_losses = torch.where(counted, lse_square_scale * lse.square(), 0.0)
        losses = torch.where(counted, lse - (1 - smoothing) * label_logit - smoothing * mean, 0.0) + z_losses
        ctx.save_for_backward(logits, column, counted, lse)
        ctx.options = logit_scale, smoothing, smoothing / max(vocab * world, 1), lse_square_scale
        ctx.inplace = inplace_backward
        ctx.mark_non_differentiable(z_losses)
        return losses, z_losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        checks.no_double_backward("cross_entropy")
        logits, column, counted, lse = ctx.saved_tensors
        dlogits = logits if ctx.inplace else torch.empty_like(logits)
        weight = torch.where(counted, grad * ctx.options[0], 0.0)
        _gradients(logits, column, lse, weight, dlogits, ctx.options)
        return dlogits, *[None] * 8


_LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _check(logits: Tensor, labels: Tensor, lse: Tensor | None, ignore_index: int, world: int) -> None:
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            "logits must be (rows, vocab) and labels (rows,), "
            f"got {list(logits.shape)} and {list(labels.shape)}"
        )
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    if labels.dtype not in _LABEL_DTYPES:
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    checks.integer("ignore_index", ignore_index)
    if lse is not None and lse.shape != labels.shape:
        raise ValueError(f"precomputed_lse must be (rows,), got {list(lse.shape)}")
    if checks.values_are_read(labels):
        vocab = logits.shape[1] * world
        values = labels.long()  # 8 bits do not hold the vocabulary's size
        wrong = ((values < 0) | (values >= vocab)) & (values != ignore_index)
        if wrong.any():
            raise ValueError(
                f"labels must be in [0, {vocab}) or {ignore_index}, got {labels[wrong][0].item()}"
            )


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Losses (rows,) fp32 of logits (rows, vocab) and labels (rows,), and the squared lse's share in them.

    Rows whose label is `ignore_index` give 0. `logit_scale` is 1 / temperature. `precomputed_lse` (rows,)
    fp32 is that of the scaled logits. `inplace_backward` writes the gradient over the logits. With
    `process_group` each rank holds an equal share of the vocabulary's columns, in rank order, and labels
    count over all of them. Labels outside the vocabulary raise ValueError where reading them is free (on the
    CPU, or with FLASH_ATTN_CHECK=1).
    """
    world = 1 if process_group is None else dist.get_world_size(process_group)
    _check(logits, labels, precomputed_lse, ignore_index, world)
    return _CrossEntropy.apply(
        logits, labels.long(), precomputed_lse, label_smoothing, logit_scale, lse_square_scale,
        int(ignore_index), inplace_backward, process_group,
    )  # fmt: skip
