"""From the caller's rows (prompt, response) to one pack in which each group's prompt stands once, and back.

The caller's *grid* is (num_rows, width): the prompts' columns, then the responses' columns. A pack row holds
one token of the grid; a shared prompt token stands for that of every row of its group. All maps are index
tensors, so `unpack` is a gather: differentiable, and in the caller's row order. `pack` reads ids, masks and
lengths on the host: for tensors on a GPU that is one copy and the only wait for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from flash_attn.shared_prompt._tables import on_host
from flash_attn.shared_prompt.grouping import PromptGroups, group_rows, integer_ids, pad_rows, read_mask
from flash_attn.shared_prompt.layout import Boundary, SharedPromptLayout, move, outside_inference_mode

IGNORE_INDEX = -100
Rows = torch.Tensor | Sequence[Sequence[int] | torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """A packed micro-batch. T = layout.num_rows pack rows, n = response tokens, (B, W) = the caller's grid.

    - `input_ids` (1, T), `position_ids` (1, T) or (K, 1, T): what the model is called with, together with
      `layout`.
    - `labels` (n,): the response tokens in pack order, -100 where `loss_mask` is 0. `pred_index` (n,): the
      pack row whose output predicts each of them.
    - `packed_to_grid` (T,): flat index into the grid of the token that a pack row holds (of the group's first
      row where shared).
    - `grid_to_packed` (B, W): pack row of each of the caller's tokens, -1 where masked. `grid_to_response`
      (B, response width): index into `labels` of each response token, -1 where masked.
    - `rows`: per group the caller's rows. `row_lens`: per caller row (prompt, response) tokens, masked ones
      left out.
    - `row_labels` (T,): the token that each pack row must predict, -100 where none (`shift_labels`).
    - `list_lens`: where rows came as lists, per caller row (prompt, response) tokens, masked ones included.

    All indices are int64. With capacities all (T,) and (n,) tensors are (max_total,): ids, positions and
    indices 0 and labels -100 behind the batch's own.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    pred_index: torch.Tensor
    layout: SharedPromptLayout
    packed_to_grid: torch.Tensor
    grid_to_packed: torch.Tensor
    grid_to_response: torch.Tensor
    rows: tuple[tuple[int, ...], ...]
    row_lens: tuple[tuple[int, int], ...]
    row_labels: torch.Tensor
    list_lens: tuple[tuple[int, int], ...] | None

    @property
    def num_packed_tokens(self) -> int:
        """Tokens that the model processes."""
        return self.layout.total

    @property
    def num_replicated_tokens(self) -> int:
        """Tokens that it would process with every prompt replicated, padding left out."""
        return sum(prompt + response for prompt, response in self.row_lens)

    @property
    def token_ratio(self) -> float:
        """Replicated tokens per packed token: above 1 where sharing saves tokens."""
        return self.num_replicated_tokens / max(self.num_packed_tokens, 1)

    @property
    def shift_labels(self) -> torch.Tensor:
        """(1, T): the token that each pack row must predict, -100 where none: for fused LM heads. Only
        boundary "fork".

        With `loss_on_prompt` the prompt's tokens are labels too, each stored token once; weigh their loss
        with `layout.multiplicity` to count them once per response, as the replicated batch does.
        """
        if self.layout.boundary != "fork":
            raise ValueError(
                'shift_labels must be read with boundary "fork", got "shared", where a prompt\'s last row '
                "predicts many tokens: use labels and pred_index"
            )
        return self.row_labels[None]

    @outside_inference_mode
    def to(self, device: torch.device | str | int) -> PackedBatch:
        """The same batch with every tensor on `device`."""
        layout = self.layout.to(device)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: move(value, layout.device)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, layout=layout, **moved)


class _Columns(NamedTuple):
    """The prompts' or the responses' part of the grid, (B, width) each."""

    ids: torch.Tensor
    kept: torch.Tensor  # attended tokens
    exists: torch.Tensor  # all but a list's own padding


class _Tokens(NamedTuple):
    """The kept tokens of the grid, row by row: what is left of the caller's batch once masked positions are
    gone.
    """

    ids: torch.Tensor  # (num_tokens,)
    positions: torch.Tensor | None  # (num_tokens, K)
    grid_index: torch.Tensor  # (num_tokens,) flat index into the grid
    prompt_lens: torch.Tensor  # (B,)
    response_lens: torch.Tensor  # (B,)
    begin: torch.Tensor  # (B,) first token of each row
    grid_shape: torch.Size

    @property
    def row_lens(self) -> list[tuple[int, int]]:
        """(prompt, response) tokens of each row."""
        return list(zip(self.prompt_lens.tolist(), self.response_lens.tolist(), strict=True))

    def prompts(self) -> list[torch.Tensor]:
        """What makes a row's prompt its own: ids, and positions where the caller gave them."""
        facts = self.ids if self.positions is None else torch.cat([self.ids[:, None], self.positions], 1)
        spans = zip(self.begin.tolist(), self.prompt_lens.tolist(), strict=True)
        return [facts[begin : begin + length] for begin, length in spans]

    def lens_behind(self, groups: PromptGroups) -> list[list[int]]:
        """Of each group's rows the tokens behind those that it shares."""
        lens, grouped = self.row_lens, zip(groups.rows, groups.prefix_lens, strict=True)
        return [[sum(lens[row]) - prefix for row in rows] for rows, prefix in grouped]


def _to_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the CPU; those of a GPU travel as one int64 copy, so the host waits once."""
    on_gpu = {name: t for name, t in tensors.items() if t.device.type != "cpu"}
    if not on_gpu:
        return tensors
    flat = torch.cat([t.reshape(-1).to(torch.int64) for t in on_gpu.values()]).cpu()
    parts = flat.split([t.numel() for t in on_gpu.values()])
    return tensors | {n: p.reshape(t.shape) for (n, t), p in zip(on_gpu.items(), parts, strict=True)}


def _columns(
    name: str, rows: Rows, mask_name: str, mask: Rows | None, given: dict[str, torch.Tensor]
) -> _Columns:
    if isinstance(rows, torch.Tensor):
        ids, exists = given[name].long(), torch.ones(rows.shape, dtype=torch.bool)
    else:
        ids, exists = pad_rows(name, rows)
    kept = exists if mask is None else read_mask(mask_name, given.get(mask_name, mask), name, exists)
    negative = kept & (ids < 0)
    if negative.any():
        row, column = (int(i) for i in negative.nonzero()[0])
        raise ValueError(
            f"{name} must hold ids >= 0 where not masked, got {int(ids[row, column])} in row {row}"
        )
    return _Columns(ids, kept, exists)


def _positions(
    position_ids: Rows, given: dict[str, torch.Tensor], exists: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """The caller's position ids of kept tokens as (num_tokens, K), K = 1 for the usual 2-D ids."""
    shape = tuple(exists.shape)
    if isinstance(position_ids, torch.Tensor):
        positions = given["position_ids"]
        integer_ids("position_ids", position_ids)  # `given` may hold them as int64 already
        if positions.dim() not in (2, 3) or tuple(positions.shape[-2:]) != shape:
            raise ValueError(
                f"position_ids must be {shape} or (K, {shape[0]}, {shape[1]}), got {list(positions.shape)}"
            )
        kinds = positions if positions.dim() == 3 else positions[None]
        found = kinds.permute(1, 2, 0).long()[kept]
    else:
        flat, there = pad_rows("position_ids", position_ids)
        if there.sum(1).tolist() != exists.sum(1).tolist():
            raise ValueError(
                f"position_ids must have one id per token of each row {exists.sum(1).tolist()}, "
                f"got {there.sum(1).tolist()}"
            )
        found = flat.masked_select(there)[:, None]  # of the tokens that exist, as many in each row
        kept_of_existing = kept.masked_select(exists)
        if not kept_of_existing.all():
            found = found[kept_of_existing]
    negative = found < 0
    if negative.any():
        place = int(negative.any(1).nonzero()[0, 0])
        value, row = int(found[place].min()), int(kept.nonzero()[place, 0])
        raise ValueError(f"position_ids must be >= 0 where not masked, got {value} in row {row}")
    return found


def _kept_tokens(
    prompt: _Columns, response: _Columns, position_ids: Rows | None, given: dict[str, torch.Tensor]
) -> _Tokens:
    exists = torch.cat([prompt.exists, response.exists], 1)
    kept = torch.cat([prompt.kept, response.kept], 1)
    grid_index = kept.flatten().nonzero()[:, 0]
    lens = kept.sum(1)
    return _Tokens(
        ids=torch.cat([prompt.ids, response.ids], 1).flatten().index_select(0, grid_index),
        positions=None if position_ids is None else _positions(position_ids, given, exists, kept),
        grid_index=grid_index,
        prompt_lens=prompt.kept.sum(1),
        response_lens=response.kept.sum(1),
        begin=lens.cumsum(0) - lens,
        grid_shape=kept.shape,
    )


def _ranges(begin: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """begin[0], begin[0] + 1, ... (lens[0] of them), begin[1], ..."""
    offset = torch.repeat_interleave(begin - lens.cumsum(0) + lens, lens)
    return offset + torch.arange(offset.numel())


@outside_inference_mode
@on_host
def pack(
    prompts: Rows,
    responses: Rows,
    *,
    prompt_mask: Rows | None = None,
    response_mask: Rows | None = None,
    loss_mask: Rows | None = None,
    position_ids: Rows | None = None,
    keys: Sequence[Hashable] | None = None,
    longest_common_prefix: bool = False,
    boundary: Boundary = "fork",
    loss_on_prompt: bool = False,
    device: torch.device | str | int | None = None,
    max_segments: int | None = None,
    max_total: int | None = None,
) -> PackedBatch:
    """Packs rows so that prompts of equal content are stored once. See `PackedBatch` for the result.

    `prompts` and `responses` are integer tensors (B, prompt width) and (B, response width), padded anywhere
    as their masks say, or lists of B rows of ids. Masks (same shapes; 1 or True = attended) may have holes:
    masked tokens are removed, and `unpack` puts the fill value there. `loss_mask` (like `responses`): 0 for
    tokens that are attended but not trained on (tool output). Ids under the masks are ordinary tokens, pad
    and EOS ids included.

    `position_ids` (B, W) or (K, B, W), or lists of one id per token: the caller's, otherwise positions count
    the kept tokens of a row from 0. Rows share a prompt when its tokens, its position ids and `keys[i]` (LoRA
    adapter, images, pair, ...; tensors count by value) are equal; `keys=range(B)` shares nothing.
    `longest_common_prefix`: see `group_by_prompt`; the rest of a prompt then lies in its row's own segment
    and is not trained on. `boundary`: see `SharedPromptLayout`. `max_segments`, `max_total`: capacities of
    the layout. The result is on `device`, by default the device of `prompts`.
    """
    named = {
        "prompts": prompts,
        "prompt_mask": prompt_mask,
        "responses": responses,
        "response_mask": response_mask,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
    }
    _check_kinds(named)
    given = _to_host({name: value for name, value in named.items() if isinstance(value, torch.Tensor)})
    prompt = _columns("prompts", prompts, "prompt_mask", prompt_mask, given)
    response = _columns("responses", responses, "response_mask", response_mask, given)
    tokens = _kept_tokens(prompt, response, position_ids, given)
    groups = group_rows(tokens.prompts(), keys, longest_common_prefix, int(boundary == "fork"))
    layout = SharedPromptLayout.from_lengths(
        groups.prefix_lens, tokens.lens_behind(groups), None, boundary,
        max_segments=max_segments, max_total=max_total,
    )  # fmt: skip
    in_loss = None
    if loss_mask is not None:
        in_loss = read_mask("loss_mask", given.get("loss_mask", loss_mask), "responses", response.exists)
    packed = _assemble(tokens, groups, layout, prompt.ids.shape[1], in_loss, loss_on_prompt)
    if not isinstance(prompts, torch.Tensor):
        lens = zip(prompt.exists.sum(1).tolist(), response.exists.sum(1).tolist(), strict=True)
        packed = replace(packed, list_lens=tuple(lens))
    target = device if device is not None else getattr(prompts, "device", "cpu")
    return packed.to(target)


def _check_kinds(named: dict[str, Any]) -> None:
    """Tensors or lists throughout, with as many rows in each."""
    prompts, responses = named["prompts"], named["responses"]
    padded = isinstance(prompts, torch.Tensor)
    for name, value in named.items():
        if value is None and name not in ("prompts", "responses"):
            continue
        if (
            isinstance(value, torch.Tensor) != padded
            or isinstance(value, (str, bytes))
            or not hasattr(value, "__len__")
        ):
            kind = "a tensor" if padded else "a list of rows"
            raise TypeError(f"{name} must be {kind} like prompts, got {type(value).__name__}")
    if padded:
        for name in ("prompts", "responses"):
            if named[name].dim() != 2:
                raise ValueError(f"{name} must be (num_rows, width), got {list(named[name].shape)}")
            integer_ids(name, named[name])
    if len(prompts) != len(responses):
        raise ValueError(f"responses must have one row per prompt ({len(prompts)}), got {len(responses)}")


def _pack_rows(
    tokens: _Tokens, groups: PromptGroups, layout: SharedPromptLayout, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each kept token the pack row that holds it, and of each pack row the kept token that it holds: of
    shared rows that of their group's first row. `order`: the rows in the order of the pack.
    """
    group_of = torch.repeat_interleave(torch.tensor([len(rows) for rows in groups.rows], dtype=torch.int64))
    num_segments, num_groups = layout.num_segments, layout.num_groups
    q_begin = layout.segments_host[:num_segments, 0].long()
    is_prompt = torch.zeros(num_segments, dtype=torch.bool)
    is_prompt[torch.arange(num_groups) + torch.tensor([0, *map(len, groups.rows)])[:-1].cumsum(0)] = True
    context_lens = torch.tensor(groups.prefix_lens, dtype=torch.int64) - int(layout.boundary == "fork")

    group_of_row, segment_begin = torch.empty_like(order), torch.empty_like(order)
    group_of_row[order], segment_begin[order] = group_of, q_begin[~is_prompt]
    context_len, context_begin = context_lens[group_of_row], q_begin[is_prompt][group_of_row]
    own_lens = tokens.prompt_lens + tokens.response_lens - context_len
    # One stretch of a row's tokens lies in the shared prompt, one in the row's own segment.
    pack_row = _ranges(
        torch.stack([context_begin, segment_begin], 1).flatten(),
        torch.stack([context_len, own_lens], 1).flatten(),
    )
    first_rows = torch.tensor([rows[0] for rows in groups.rows], dtype=torch.int64)
    held_begin, held_lens = torch.empty_like(q_begin), torch.empty_like(q_begin)
    held_begin[is_prompt], held_lens[is_prompt] = tokens.begin[first_rows], context_lens
    held_begin[~is_prompt], held_lens[~is_prompt] = (tokens.begin + context_len)[order], own_lens[order]
    return pack_row, _ranges(held_begin, held_lens)


def _assemble(
    tokens: _Tokens,
    groups: PromptGroups,
    layout: SharedPromptLayout,
    prompt_width: int,
    in_loss: torch.Tensor | None,
    loss_on_prompt: bool,
) -> PackedBatch:
    """Every map between kept tokens, pack rows and the grid. A kept token is (row r, offset t); its index is
    begin[r] + t.
    """
    grid_shape = tokens.grid_shape
    order = torch.tensor([r for rows in groups.rows for r in rows], dtype=torch.int64)
    pack_row, holds = _pack_rows(tokens, groups, layout, order)
    response = _ranges((tokens.begin + tokens.prompt_lens)[order], tokens.response_lens[order])
    response_grid = torch.stack(
        [
            torch.repeat_interleave(order, tokens.response_lens[order]),
            tokens.grid_index[response] % max(grid_shape[1], 1) - prompt_width,
        ]
    )
    labels = tokens.ids[response]
    if in_loss is not None:
        labels = labels.where(in_loss[response_grid[0], response_grid[1]], IGNORE_INDEX)
    pred_index = pack_row[response - 1]
    row_labels = torch.full((layout.num_rows,), IGNORE_INDEX)
    if loss_on_prompt:
        predicted = _ranges(tokens.begin + 1, tokens.prompt_lens - 1)
        row_labels[pack_row[predicted - 1]] = tokens.ids[predicted]
    row_labels[pred_index] = labels

    grid_to_packed = torch.full((grid_shape.numel(),), -1)
    grid_to_packed[tokens.grid_index] = pack_row
    grid_to_response = torch.full((grid_shape[0], grid_shape[1] - prompt_width), -1)
    grid_to_response[response_grid[0], response_grid[1]] = torch.arange(labels.numel())
    spare = layout.num_rows - layout.total
    spare_labels = 0 if layout.capacities is None else layout.num_rows - labels.numel()

    def padded(x: torch.Tensor, size: int, value: int = 0) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, size), value=value)

    positions = layout.position_ids[None]
    if tokens.positions is not None:
        positions = padded(tokens.positions[holds].T, spare)
        positions = positions if len(positions) == 1 else positions[:, None]
    return PackedBatch(
        input_ids=padded(tokens.ids[holds], spare)[None],
        position_ids=positions,
        labels=padded(labels, spare_labels, IGNORE_INDEX),
        pred_index=padded(pred_index, spare_labels),
        layout=layout,
        packed_to_grid=padded(tokens.grid_index[holds], spare),
        grid_to_packed=grid_to_packed.view(grid_shape),
        grid_to_response=grid_to_response,
        rows=tuple(map(tuple, groups.rows)),
        row_lens=tuple(tokens.row_lens),
        row_labels=row_labels,
        list_lens=None,
    )
