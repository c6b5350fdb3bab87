"""A trainer's padded rows as packs of whole groups, and what the packs give back in the trainer's rows.

Rows come as (B, prompt columns + response columns) ids and mask. Groups are found by content, so neither
names nor the order of rows matter. Values per response token return as (B, response columns).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flash_attn.integrations._trl_rows import PaddedRows
from flash_attn.shared_prompt import PackedBatch, unpack_responses
from flash_attn.shared_prompt.cost_model import CostModel, GroupLens
from flash_attn.shared_prompt.layout import move
from flash_attn.shared_prompt.planner import plan_micro_batches


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
    def of(cls, given: PaddedRows, *, max_tokens: int, batch_size: int, cost_model: CostModel) -> SharedStep:
        """Packs of at most `max_tokens`; the replicated pass would run padded, `batch_size` rows a
        forward."""
        lens, width = given.lens, given.prompt_width
        plan = plan_micro_batches(lens, given.groups, max_tokens=max_tokens, over_budget="split")
        micro_batches = plan.ranks[0]
        shared_cost = sum(
            cost_model.cost([_lens(lens, g) for g in m.groups], shared=True) for m in micro_batches
        )
        num_rows, total_width = given.ids.shape
        padded = GroupLens(width, (total_width - width,) * num_rows)
        replicated_cost = cost_model.cost([padded], shared=False, num_calls=-(-num_rows // batch_size))
        return cls(
            [given.pack(m.groups) for m in micro_batches], [m.rows for m in micro_batches], shared_cost,
            replicated_cost, plan.over_budget,
            shares_nothing=all(len(rows) == 1 for rows in given.groups.rows),
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
        order = [row for rows in self.rows for row in rows]
        if order == list(range(len(order))):
            return stacked
        return stacked.index_select(0, move(torch.tensor(order).argsort(), stacked.device))


def _lens(row_lens: Sequence[tuple[int, int]], rows: Sequence[int]) -> GroupLens:
    return GroupLens(row_lens[rows[0]][0], tuple(row_lens[row][1] for row in rows))
