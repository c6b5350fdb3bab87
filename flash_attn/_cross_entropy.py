"""Cross entropy of one label a row over logits (rows, vocab), in fp32 and a few rows at a time:

    lse = logsumexp(s x), loss = lse - (1 - e) s x[label] - e mean(s x) + z lse^2
with logit_scale s, label_smoothing e, lse_square_scale z. The vocabulary may be split over the ranks of a
process group. Shared by losses/cross_entropy.py and ops/triton/cross_entropy.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 25  # of fp32 logits at a time: 128 MiB


def _chunks(x: Tensor) -> range:
    return range(0, x.shape[0], max(1, _CHUNK_ELEMENTS // max(x.shape[1], 1)))


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
        rows, vocab = logits.shape
        world, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        local = labels - rank * vocab
        here = (labels != ignore_index) & (local >= 0) & (local < vocab)
        lse = logits.new_empty(rows, dtype=torch.float32)
        label_logit, mean = torch.zeros_like(lse), torch.zeros_like(lse)
        step = _chunks(logits)
        for begin in step:
            part = slice(begin, begin + step.step)
            x = logits[part].float() * logit_scale
            if precomputed_lse is None:
                lse[part] = x.logsumexp(-1)
            picked = x.gather(1, local[part].clamp(0, max(vocab - 1, 0))[:, None])[:, 0]
            label_logit[part] = torch.where(here[part], picked, 0.0)
            if smoothing:
                mean[part] = x.sum(-1) / (vocab * world)
        if precomputed_lse is not None:
            lse.copy_(precomputed_lse)
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
        ctx.save_for_backward(logits, local, here, counted, lse)
        ctx.options = smoothing, logit_scale, lse_square_scale, inplace_backward, vocab * world
        ctx.mark_non_differentiable(z_losses)
        return losses, z_losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        logits, local, here, counted, lse = ctx.saved_tensors
        smoothing, logit_scale, lse_square_scale, inplace, total_vocab = ctx.options
        dlogits = logits if inplace else torch.empty_like(logits)
        weight = torch.where(counted, grad * logit_scale, 0.0)
        step = _chunks(logits)
        for begin in step:
            part = slice(begin, begin + step.step)
            d = (logits[part].float() * logit_scale - lse[part, None]).exp_()
            d *= (1 + 2 * lse_square_scale * lse[part])[:, None]
            if smoothing:
                d -= smoothing / total_vocab
            taken = torch.where(here[part], 1 - smoothing, 0.0)[:, None]
            d.scatter_add_(1, local[part].clamp(0, max(logits.shape[1] - 1, 0))[:, None], -taken)
            dlogits[part] = torch.where(counted[part, None], d * weight[part, None], 0.0).to(dlogits.dtype)
        return dlogits, *[None] * 8


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
    count over all of them.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            "logits must be (rows, vocab) and labels (rows,), "
            f"got {list(logits.shape)} and {list(labels.shape)}"
        )
    if precomputed_lse is not None and precomputed_lse.shape != labels.shape:
        raise ValueError(f"precomputed_lse must be (rows,), got {list(precomputed_lse.shape)}")
    return _CrossEntropy.apply(
        logits, labels.long(), precomputed_lse, label_smoothing, logit_scale, lse_square_scale, ignore_index,
        inplace_backward, process_group,
    )  # fmt: skip
