"""A trainer's padded rows as packs of whole groups, and what the packs give back in the trainer's rows.

Rows come as (B, prompt columns + response columns) ids and mask. Ids are read on the host once; groups are
found by content, so neither names nor the order of rows matter. Values per response token return as
(B, response columns).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flash_attn.shared_prompt import PackedBatch, group_by_prompt, pack, unpack_responses
from flash_attn.shared_prompt.cost_model import CostModel, GroupLens
from flash_attn.shared_prompt.planner import plan_micro_batches


class HostRows(NamedTuple):
    """The rows on the CPU; the first `prompt_width` columns of `ids` and `mask` (B, W) are the prompts'."""

    ids: torch.Tensor
    mask: torch.Tensor
    prompt_width: int
    device: torch.device

    @classmethod
    def of(cls, input_ids: torch.Tensor, attention_mask: torch.Tensor, response_width: int) -> HostRows:
        """Copies ids and mask to the host: the one wait for the GPU."""
        both = torch.stack([input_ids.long(), attention_mask.long()]).cpu()
        return cls(both[0], both[1].bool(), input_ids.shape[1] - response_width, input_ids.device)

    @property
    def lens(self) -> list[tuple[int, int]]:
        """(prompt, response) tokens of each row, padding left out."""
        prompts, responses = self.mask[:, : self.prompt_width], self.mask[:, self.prompt_width :]
        return list(zip(prompts.sum(1).tolist(), responses.sum(1).tolist(), strict=True))

    def pack(self, rows: Sequence[int]) -> PackedBatch:
        """These rows, packed, on the trainer's device."""
        ids, mask, width = self.ids[list(rows)], self.mask[list(rows)], self.prompt_width
        return pack(
            ids[:, :width], ids[:, width:], prompt_mask=mask[:, :width], response_mask=mask[:, width:],
            device=self.device,
        )  # fmt: skip


class SharedStep(NamedTuple):
    """One log-prob pass over a trainer's rows: its packs, and its cost beside the replicated one.

    `rows[i]`: the trainer's rows of pack i. `over_budget`: rows that exceed the budget alone.
    `shares_nothing`: no prompt stands in two rows.
    """

    packs: list[PackedBatch]
    rows: list[tuple[int, ...]]
    shared_cost: float
    replicated_cost: float
    over_budget: tuple[int, ...]
    shares_nothing: bool

    @classmethod
    def of(cls, host: HostRows, *, max_tokens: int, batch_size: int, cost_model: CostModel) -> SharedStep:
        """Packs of at most `max_tokens`; the replicated pass would run padded, `batch_size` rows a
        forward."""
        width = host.prompt_width
        groups = group_by_prompt(host.ids[:, :width], attention_mask=host.mask[:, :width])
        lens = host.lens
        plan = plan_micro_batches(lens, groups, max_tokens=max_tokens, over_budget="split")
        micro_batches = plan.ranks[0]
        shared_cost = sum(
            cost_model.cost([_lens(lens, g) for g in m.groups], shared=True) for m in micro_batches
        )
        num_rows, total_width = host.ids.shape
        padded = GroupLens(max(width, 1), (total_width - width,) * num_rows)
        replicated_cost = cost_model.cost([padded], shared=False, num_calls=-(-num_rows // batch_size))
        packs = [host.pack(m.rows) for m in micro_batches]
        return cls(
            packs, [m.rows for m in micro_batches], shared_cost, replicated_cost, plan.over_budget,
            shares_nothing=all(len(rows) == 1 for rows in groups.rows),
        )  # fmt: skip

    @property
    def num_packed_tokens(self) -> int:
        """Tokens that pass through the model."""
        return sum(p.num_packed_tokens for p in self.packs)

    @property
    def num_replicated_tokens(self) -> int:
        """Tokens of the same rows without sharing, padding left out."""
        return sum(p.num_replicated_tokens for p in self.packs)

    def in_rows(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Values (n,) per response token of each pack, as (B, response columns), 0 where masked."""
        grids = [unpack_responses(v, p) for v, p in zip(values, self.packs, strict=True)]
        stacked = torch.cat([g for g in grids if isinstance(g, torch.Tensor)])
        order = torch.tensor([row for rows in self.rows for row in rows])
        return stacked.index_select(0, order.argsort().to(stacked.device))


def _lens(row_lens: Sequence[tuple[int, int]], rows: Sequence[int]) -> GroupLens:
    return GroupLens(row_lens[rows[0]][0], tuple(row_lens[row][1] for row in rows))
