"""veRL's rows (nested tensors, without padding) as packs, and what the packs give back in veRL's rows.

The engine's own code runs on a substitute batch whose "rows" are the pack's segments: it rolls labels, scales
by temperature, pads and slices exactly as it does with rows, and with boundary "fork" the token behind a
pack row is the one that row predicts. A gather then copies each row's values out of the pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import NonTensorData, TensorDict
from verl.utils import tensordict_utils as tu

from flash_attn.shared_prompt import PromptGroups, SharedPromptLayout
from flash_attn.shared_prompt.grouping import group_rows
from flash_attn.shared_prompt.layout import move


class RowPack(NamedTuple):
    """Rows of a micro-batch with each group's prompt once (boundary "fork"), on the CPU.

    `input_ids`, `position_ids` (T,): of the pack. `in_pack`: pack row of each token, row by row in the
    micro-batch's order. `rows`: of each group, places in the micro-batch.
    """

    layout: SharedPromptLayout
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    in_pack: torch.Tensor
    rows: list[list[int]]

    @property
    def num_packed_tokens(self) -> int:
        """Tokens that the model processes."""
        return self.layout.total

    @property
    def num_replicated_tokens(self) -> int:
        """Tokens that it would process with every prompt replicated."""
        return len(self.in_pack)


class HostRows(NamedTuple):
    """Rows on the CPU: `ids[i]` and `positions[i]` of the prompt and response of row i, and the groups of
    rows with equal prompts (ids and positions), in the order of their first rows."""

    ids: list[torch.Tensor]
    positions: list[torch.Tensor]
    prompt_lens: list[int]
    groups: PromptGroups

    @classmethod
    def of(cls, data: TensorDict) -> HostRows:
        """Of a batch with nested "input_ids", "position_ids" and "prompts"."""
        lens = data["input_ids"].offsets().diff().tolist()
        prompt_lens = data["prompts"].offsets().diff().tolist()
        both = torch.stack([data[key].values() for key in ("input_ids", "position_ids")], 1).cpu()
        prompts = [row[:p] for p, row in zip(prompt_lens, both.split(lens), strict=True)]
        groups = group_rows(prompts, None, False, 1)
        ids, positions = both.t().contiguous()
        return cls(list(ids.split(lens)), list(positions.split(lens)), prompt_lens, groups)

    @property
    def lens(self) -> list[tuple[int, int]]:
        """(prompt, response) tokens of each row."""
        return [(p, len(row) - p) for p, row in zip(self.prompt_lens, self.ids, strict=True)]

    def grouped(self, rows: Sequence[int]) -> list[list[int]]:
        """Places in `rows` of the rows of each group."""
        group_of = {row: g for g, own in enumerate(self.groups.rows) for row in own}
        found: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            found.setdefault(group_of[row], []).append(place)
        return list(found.values())

    def pack(self, rows: Sequence[int]) -> RowPack:
        """These rows, packed.

        The device often waits for this, so it is slices and copies only: 0.7 ms for four rows of 10K tokens,
        where `shared_prompt.pack`, which takes padding and masks, needs 13 ms.
        """
        lens_of_all = self.lens
        lens, groups = [lens_of_all[row] for row in rows], self.grouped(rows)
        layout = SharedPromptLayout.from_lengths(
            [lens[own[0]][0] for own in groups], [[lens[place][1] for place in own] for own in groups]
        )
        pieces: list[tuple[int, slice]] = []  # (row, its tokens) in pack order
        spans: list[tuple[slice, slice]] = [(slice(0), slice(0))] * len(rows)  # of each row, in the pack
        end = 0
        for own in groups:
            context = slice(end, end := end + lens[own[0]][0] - 1)
            pieces.append((rows[own[0]], slice(context.stop - context.start)))
            for place in own:
                fork = slice(lens[place][0] - 1, sum(lens[place]))
                spans[place] = (context, slice(end, end := end + fork.stop - fork.start))
                pieces.append((rows[place], fork))
        every = torch.arange(end)
        return RowPack(
            layout,
            torch.cat([self.ids[row][tokens] for row, tokens in pieces]),
            torch.cat([self.positions[row][tokens] for row, tokens in pieces]),
            torch.cat([every[span] for pair in spans for span in pair]),
            groups,
        )


class PackedStep:
    """One micro-batch on the device: the batch that the engine runs on instead, and the way back.

    `batch`: segments as nested rows. `layout`: of the pack with `pad` rows behind it, which the engine
    appends so that a bucket or the sequence-parallel processes come out even: a group of their own.
    """

    def __init__(
        self, micro_batch: TensorDict, packed: RowPack, pad: int, device: torch.device | str | int
    ) -> None:
        self.pad, layout = pad, packed.layout
        if pad:
            layout = SharedPromptLayout.from_lengths([*layout.prompt_lens, pad], [*layout.response_lens, [0]])
        self.layout = layout.to(device)
        self._offsets = move(micro_batch["input_ids"].offsets(), self.layout.device)
        self._rows = move(packed.in_pack, self.layout.device)
        self.batch = self._substitute(micro_batch, packed)

    def _substitute(self, micro_batch: TensorDict, packed: RowPack) -> TensorDict:
        offsets = move(packed.layout.cu_seqlens.long(), self.layout.device)
        batch = TensorDict(
            {
                name: torch.nested.nested_tensor_from_jagged(move(values, offsets.device), offsets)
                for name, values in (("input_ids", packed.input_ids), ("position_ids", packed.position_ids))
            },
            batch_size=[packed.layout.num_segments],
        )
        for key in micro_batch.keys():  # noqa: SIM118  (a TensorDict iterates over rows)
            value = micro_batch.get(key)
            if isinstance(value, NonTensorData):  # a setting; values per row are tensors or stacks
                tu.assign_non_tensor_data(batch, key, value.data)
        temperature = micro_batch["temperature"]
        if isinstance(temperature, torch.Tensor):
            row_of_segment = [r for rows in packed.rows for r in (rows[0], *rows)]
            batch["temperature"] = temperature[torch.tensor(row_of_segment)].to(offsets.device)
        return batch

    def in_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Nested values per pack row as nested values per token of the micro-batch's rows."""
        return torch.nested.nested_tensor_from_jagged(
            values.values().index_select(0, self._rows), self._offsets
        )

    def outputs_in_rows(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """`in_rows` of each output; None stays."""
        return {name: v if v is None else self.in_rows(v) for name, v in outputs.items()}
