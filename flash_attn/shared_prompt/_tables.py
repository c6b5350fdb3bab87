"""The tensors of a `SharedPromptLayout` from its lengths, on the CPU: segments, positions and index maps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])


def on_host(function: _Function) -> _Function:
    """`function`, whose new tensors are on the CPU whatever torch.set_default_device says."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.get_default_device().type == "cpu":  # without a mode every torch call is faster
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def _segment_rows(
    prompt_lens: tuple[int, ...], response_lens: tuple[tuple[int, ...], ...], fork: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The segment table, and of each segment (group, first position, multiplicity, response length or -1)."""
    table: list[tuple[int, ...]] = []
    facts: list[tuple[int, ...]] = []
    row = 0
    for g, (prompt_len, lens) in enumerate(zip(prompt_lens, response_lens, strict=True)):
        context = (row, row + prompt_len - fork)
        table.append((*context, *context, context[1], context[1]))
        facts.append((g, 0, len(lens), -1))
        row = context[1]
        for response_len in lens:
            end = row + fork + response_len
            table.append((row, end, *context, row, end))
            facts.append((g, prompt_len - fork, 1, response_len))
            row = end
    return table, facts


def _pad(x: torch.Tensor, size: int, value: int = 0) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, size - x.numel()), value=value)


@on_host
def build_tables(
    prompt_lens: tuple[int, ...],
    response_lens: tuple[tuple[int, ...], ...],
    boundary: str,
    capacities: tuple[int, int] | None,
) -> dict[str, torch.Tensor]:
    """Every tensor of the layout, on the CPU, padded to (max_segments, max_total) where these are given."""
    fork = int(boundary == "fork")
    table, facts = _segment_rows(prompt_lens, response_lens, fork)
    segments = torch.tensor(table, dtype=torch.int64).reshape(-1, 6)
    facts_table = torch.tensor(facts, dtype=torch.int64).reshape(-1, 4)
    group, first_position, multiplicity, response_len = facts_table.unbind(1)
    q_begin, q_len = segments[:, 0], segments[:, 1] - segments[:, 0]
    segment_of_row = torch.repeat_interleave(q_len)
    rows = torch.arange(segment_of_row.numel())
    total = rows.numel()

    is_response = response_len >= 0
    lens = response_len[is_response]
    cu_responses = _pad(lens.cumsum(0).flip(0), lens.numel() + 1).flip(0)
    response_of_token = torch.repeat_interleave(lens)
    offset = torch.arange(response_of_token.numel()) - cu_responses[response_of_token]
    response_index = q_begin[is_response][response_of_token] + fork + offset
    # With the shared boundary the last row of the prompt predicts the first token of each of its responses.
    prompt_last = segments[is_response, 3][response_of_token] - 1
    pred_index = response_index - 1 if fork else torch.where(offset == 0, prompt_last, response_index - 1)

    num_segments, num_rows, num_tokens, num_responses = len(table), total, offset.numel(), lens.numel()
    if capacities is not None:
        num_segments, num_rows = capacities
        num_tokens, num_responses = num_rows, num_segments
    segments = torch.cat([segments, torch.full((num_segments - len(table), 6), total)]).int()
    return {
        "segments": segments,
        "cu_seqlens": _pad(segments[:, 0], num_segments + 1, total),
        "position_ids": _pad(first_position[segment_of_row] + rows - q_begin[segment_of_row], num_rows),
        "multiplicity": _pad(multiplicity[segment_of_row], num_rows),
        "group_of_segment": _pad(group, num_segments, max(len(prompt_lens) - 1, 0)),
        "pred_index": _pad(pred_index, num_tokens),
        "response_index": _pad(response_index, num_tokens),
        "cu_responses": _pad(cu_responses, num_responses + 1, offset.numel()),
    }
