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

from flash_attn.shared_prompt import PackedBatch, PromptGroups, SharedPromptLayout, group_by_prompt, pack
from flash_attn.shared_prompt.layout import move


class HostRows(NamedTuple):
    """Rows on the CPU: `ids[i]` and `positions[i]` of the prompt and response of row i."""

    ids: list[torch.Tensor]
    positions: list[torch.Tensor]
    prompt_lens: list[int]

    @classmethod
    def of(cls, data: TensorDict) -> HostRows:
        """Of a batch with nested "input_ids", "position_ids" and "prompts"."""
        lens = data["input_ids"].offsets().diff().tolist()
        ids, positions = (list(data[key].values().cpu().split(lens)) for key in ("input_ids", "position_ids"))
        return cls(ids, positions, data["prompts"].offsets().diff().tolist())

    @property
    def lens(self) -> list[tuple[int, int]]:
        """(prompt, response) tokens of each row."""
        return [(p, len(row) - p) for p, row in zip(self.prompt_lens, self.ids, strict=True)]

    @property
    def groups(self) -> PromptGroups:
        """Rows of equal prompts, groups in the order of their first rows."""
        return group_by_prompt([row[:p] for p, row in zip(self.prompt_lens, self.ids, strict=True)])

    def pack(self, rows: Sequence[int]) -> PackedBatch:
        """These rows, packed, on the CPU."""
        pairs = [(self.ids[r], self.prompt_lens[r]) for r in rows]
        return pack(
            [ids[:p] for ids, p in pairs], [ids[p:] for ids, p in pairs],
            position_ids=[self.positions[r] for r in rows],
        )  # fmt: skip


class PackedStep:
    """One micro-batch on the device: the batch that the engine runs on instead, and the way back.

    `batch`: segments as nested rows. `layout`: of the pack with `pad` rows behind it, which the engine
    appends so that a bucket or the sequence-parallel processes come out even: a group of their own.
    """

    def __init__(
        self, micro_batch: TensorDict, packed: PackedBatch, pad: int, device: torch.device | str | int
    ) -> None:
        self.pad, layout = pad, packed.layout
        if pad:
            layout = SharedPromptLayout.from_lengths([*layout.prompt_lens, pad], [*layout.response_lens, [0]])
        self.layout = layout.to(device)
        self._offsets = move(micro_batch["input_ids"].offsets(), self.layout.device)
        in_pack = packed.grid_to_packed
        self._rows = move(in_pack.masked_select(in_pack >= 0), self.layout.device)
        self.batch = self._substitute(micro_batch, packed)

    def _substitute(self, micro_batch: TensorDict, packed: PackedBatch) -> TensorDict:
        offsets = move(packed.layout.cu_seqlens.long(), self.layout.device)
        batch = TensorDict(
            {
                name: torch.nested.nested_tensor_from_jagged(move(values[0], offsets.device), offsets)
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
