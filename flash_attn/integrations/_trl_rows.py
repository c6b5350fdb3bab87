"""A trainer's padded rows, prompts on the left and responses on the right, packed on the device they are on.

The host reads three numbers per row (lengths, a hash of the prompt) and whether prompts of equal hash are
equal; ids never leave the device. Rows of a group then stand in the pack as `shared_prompt.pack` puts them,
found by arithmetic instead of a search: every segment is one stretch of one row of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flash_attn.shared_prompt import PackedBatch, SharedPromptLayout
from flash_attn.shared_prompt.grouping import PromptGroups
from flash_attn.shared_prompt.layout import move
from flash_attn.shared_prompt.packing import IGNORE_INDEX

# Odd multipliers of a 64-bit mix (as signed numbers); what they mix is multiplied with ids and summed.
_MIX = (-7046029254386353131, -4658895280553007687)


class PaddedRows(NamedTuple):
    """Rows (B, W) whose first `prompt_width` columns are the prompts', left-padded; responses are
    right-padded.

    `lens[i]`: (prompt, response) tokens of row i. `groups`: rows of equal prompts.
    """

    ids: torch.Tensor
    prompt_width: int
    lens: list[tuple[int, int]]
    groups: PromptGroups

    @classmethod
    def of(
        cls, input_ids: torch.Tensor, attention_mask: torch.Tensor, response_width: int
    ) -> tuple[PaddedRows | None, str | None]:
        """(the rows, None), or (None, why they cannot share). Waits for the GPU twice."""
        width = input_ids.shape[1] - response_width
        mask = attention_mask.bool()
        prompt_mask, response_mask = mask[:, :width], mask[:, width:]
        holes = (prompt_mask[:, 1:] < prompt_mask[:, :-1]).any(1)
        holes = holes | (response_mask[:, 1:] > response_mask[:, :-1]).any(1)
        facts = [prompt_mask.sum(1), response_mask.sum(1), holes, _hashes(input_ids[:, :width], prompt_mask)]
        prompt_lens, response_lens, has_holes, hashes = torch.stack(facts).tolist()
        if not all(prompt_lens):
            return None, "a row has an empty prompt"
        if any(has_holes):
            return None, "a row has masked tokens among the real ones"
        rows_of: dict[tuple[int, int], list[int]] = {}
        for row, key in enumerate(zip(hashes, prompt_lens, strict=True)):
            rows_of.setdefault(key, []).append(row)
        groups = list(rows_of.values())
        first = [rows_of[key][0] for key in zip(hashes, prompt_lens, strict=True)]
        if len(groups) < len(first):
            prompts = input_ids[:, :width]
            firsts = prompts.index_select(0, move(torch.tensor(first), prompts.device))
            if not bool(((prompts == firsts) | ~prompt_mask).all()):
                return None, "different prompts have the same hash"
        lens = list(zip(prompt_lens, response_lens, strict=True))
        found = PromptGroups(groups, [prompt_lens[rows[0]] for rows in groups])
        return cls(input_ids.long(), width, lens, found), None

    def pack(self, groups: Sequence[Sequence[int]]) -> PackedBatch:
        """These groups of rows, as `shared_prompt.pack` packs the grid of their rows, boundary "fork"."""
        rows = [row for group in groups for row in group]
        device, width = self.ids.device, self.ids.shape[1]
        layout = SharedPromptLayout.from_lengths(
            [self.lens[group[0]][0] for group in groups],
            [[self.lens[row][1] for row in group] for group in groups],
            device,
        )
        local: list[tuple[int, ...]] = []  # the groups' rows in the grid of `rows`
        begin: list[int] = []  # of each segment, the grid index of its first token
        own_segment: list[int] = []  # of each row
        for group in groups:
            first = len(own_segment)
            begin.append(first * width + self.prompt_width - self.lens[group[0]][0])
            for row in range(first, first + len(group)):
                own_segment.append(len(begin))
                begin.append(row * width + self.prompt_width - 1)
            local.append(tuple(range(first, first + len(group))))
        numbers = move(torch.tensor([*begin, *own_segment, *rows]), device)
        begins, segment_of, row_of = numbers.split([len(begin), len(rows), len(rows)])
        grid = self.ids if rows == list(range(len(self.ids))) else self.ids.index_select(0, row_of)
        flat, pred_index = grid.flatten(), layout.pred_index
        segments = layout.segments.long()
        lens = segments[:, 1] - segments[:, 0]
        offset = torch.repeat_interleave(begins - segments[:, 0], lens, output_size=layout.total)
        packed_to_grid = offset + torch.arange(layout.total, device=device)
        labels = flat[packed_to_grid[pred_index] + 1]
        row_labels = torch.full((layout.total,), IGNORE_INDEX, device=device)
        return PackedBatch(
            input_ids=flat[packed_to_grid][None],
            position_ids=layout.position_ids[None],
            labels=labels,
            pred_index=pred_index,
            layout=layout,
            packed_to_grid=packed_to_grid,
            grid_to_packed=self._grid_to_packed(segments[segment_of]),
            grid_to_response=self._grid_to_response(layout.cu_responses),
            rows=tuple(local),
            row_lens=tuple(self.lens[row] for row in rows),
            row_labels=row_labels.index_copy(0, pred_index, labels),
            list_lens=None,
        )

    def _grid_to_packed(self, own: torch.Tensor) -> torch.Tensor:
        """(B, W) pack rows from the rows' own segments (B, 6); -1 at padding."""
        q_begin, q_end, context_begin, context_end = own[:, :4, None].unbind(1)
        last = self.prompt_width - 1  # column of the last prompt token, the first of the own segment
        column = torch.arange(self.ids.shape[1], device=own.device)
        in_own = q_begin + column - last
        in_context = context_end + column - last
        packed = torch.where(column < last, in_context, in_own)
        real = (in_context >= context_begin) & (in_own < q_end)
        return torch.where(real, packed, -1)

    def _grid_to_response(self, cu_responses: torch.Tensor) -> torch.Tensor:
        """(B, response columns) indices of the response tokens; -1 at padding."""
        begin, end = cu_responses[:-1, None], cu_responses[1:, None]
        index = begin + torch.arange(self.ids.shape[1] - self.prompt_width, device=begin.device)
        return torch.where(index < end, index, -1)


def _hashes(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B,) sum over real tokens of id * weight modulo 2**64; weights by distance to the prompt's end."""
    weight = torch.arange(ids.shape[1], 0, -1, device=ids.device) * _MIX[0]
    weight = ((weight ^ (weight >> 31)) * _MIX[1]) | 1
    return (ids * weight * mask).sum(1)
