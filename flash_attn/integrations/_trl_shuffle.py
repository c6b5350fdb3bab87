"""TRL shuffles single rows over its micro-batches, which takes groups apart; here whole groups are shuffled.

Runs after the parent's `_prepare_inputs`: the buffered micro-batches are put together again with rows of one
prompt side by side. Groups stand in the order of their first rows after the parent's shuffle, which is
random.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.shared_prompt import group_by_prompt


class GroupShuffleMixin:
    """Micro-batches of whole groups; the order of groups, and of rows within them, stays random.

    Where a micro-batch holds a multiple of `num_generations` rows groups stay whole, else they are cut at its
    ends. The losses of TRL do not depend on which rows meet in a micro-batch, except what is a mean over the
    micro-batch's own tokens (`bnpo`, the bonus of `entropy_coef`, the auxiliary loss of experts) or chosen
    among them (`top_entropy_quantile`): what these estimate is the same, their value per step is not.
    """

    _buffered_inputs: list[dict[str, Any]] | None

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if self._buffered_inputs is before or self._buffered_inputs is None:
            return inputs
        self._buffered_inputs = regroup(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]  # type: ignore[attr-defined]


def regroup(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows with those of equal prompts side by side, in micro-batches of the same sizes.

    Values are tensors or lists with one entry per row; scalars and None stay where they are. Batches with
    images come back as they are: their pixels are not one entry per row.
    """
    if "pixel_values" in batches[0]:
        return batches
    ids, mask = (torch.cat([b[key] for b in batches]) for key in ("prompt_ids", "prompt_mask"))
    order = [row for rows in group_by_prompt(ids, attention_mask=mask).rows for row in rows]
    sizes = [len(b["prompt_ids"]) for b in batches]
    new: list[dict[str, Any]] = [{} for _ in batches]
    for key, value in batches[0].items():
        parts: list[Any] = [b[key] for b in batches]
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            merged = torch.cat(parts)[torch.tensor(order, device=value.device)]
            parts = list(merged.split(sizes))
        elif isinstance(value, list):
            flat = [row for part in parts for row in part]
            rows = iter([flat[i] for i in order])
            parts = [[next(rows) for _ in range(size)] for size in sizes]
        for target, part in zip(new, parts, strict=True):
            target[key] = part
    return new
