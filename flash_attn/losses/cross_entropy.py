"""`CrossEntropyLoss`: a module over ../_cross_entropy.py, any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn._cross_entropy import cross_entropy


class CrossEntropyLoss(torch.nn.Module):
    """Cross entropy of logits (rows, vocab) with labels (rows,): mean or sum over rows that count, or (rows,)
    fp32.

    Options as in torch's; `logit_scale` is 1 / temperature, `lse_square_scale` weighs the squared
    log-sum-exp, which `return_z_loss` also returns alone; `process_group` splits the vocabulary (see
    `cross_entropy`).
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise ValueError(f'reduction must be "mean", "none" or "sum", got {reduction!r}')
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.logit_scale, self.lse_square_scale = logit_scale, lse_square_scale
        self.inplace_backward, self.process_group = inplace_backward, process_group
        self.return_z_loss = return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        losses, z_losses = cross_entropy(
            input, target, precomputed_lse, self.label_smoothing, self.logit_scale, self.lse_square_scale,
            self.ignore_index, self.inplace_backward, self.process_group,
        )  # fmt: skip
        if self.reduction == "mean":
            count = (target.long() != self.ignore_index).sum()  # -100 would be 156 in 8 bits
            losses, z_losses = losses.sum() / count, z_losses.sum() / count
        elif self.reduction == "sum":
            losses, z_losses = losses.sum(), z_losses.sum()
        return (losses, z_losses) if self.return_z_loss else losses
