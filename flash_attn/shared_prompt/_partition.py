"""Which rows of a pack each rank of a sequence-parallel group holds.

`contiguous`: equal runs of rows, in pack order; attention exchanges heads for rows, so that their place does
not matter. `balanced`: where queries stay put, every rank gets an early and a late part of each prompt and of
its responses' rows, so that all see about as many keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flash_attn.shared_prompt.layout import SharedPromptLayout


class Part(NamedTuple):
    """Rows [begin, end) of segment `segment`, counted from its first row."""

    segment: int
    begin: int
    end: int


class GroupParts(NamedTuple):
    """What one rank holds of one group, in the order in which it holds it."""

    prompt: tuple[Part, ...]
    responses: tuple[Part, ...]


def contiguous(num_rows: int, num_ranks: int) -> list[torch.Tensor]:
    """Pack rows of each rank: ceil(num_rows / num_ranks) a rank; the last ranks may hold fewer or none."""
    size = -(-num_rows // num_ranks)
    return [
        torch.arange(min(rank * size, num_rows), min((rank + 1) * size, num_rows))
        for rank in range(num_ranks)
    ]


def groups_of(layout: SharedPromptLayout) -> list[range]:
    """Segments of each group, the prompt's first."""
    groups, first = [], 0
    for lens in layout.response_lens:
        groups.append(range(first, first + 1 + len(lens)))
        first += 1 + len(lens)
    return groups


def balanced(layout: SharedPromptLayout, num_ranks: int) -> list[list[GroupParts]]:
    """Parts of each rank, group by group. Rank i has chunks i and 2 num_ranks - 1 - i of 2 num_ranks of every
    prompt, and of its responses' rows: with position p seeing p + 1 keys, an early and a late chunk together
    cost the same on every rank.
    """
    table = layout.segments_host.tolist()
    ranks: list[list[GroupParts]] = [[] for _ in range(num_ranks)]
    for g, segments in enumerate(groups_of(layout)):
        lengths = [(s, table[s][1] - table[s][0]) for s in segments]
        prompts, responses = _pairs(lengths[:1], num_ranks), _pairs(lengths[1:], num_ranks)
        for rank in range(num_ranks):
            # Groups take turns with the rank that gets the odd row.
            ranks[rank].append(GroupParts(prompts[rank], responses[(rank + g) % num_ranks]))
    return ranks


def _pairs(segments: list[tuple[int, int]], num_ranks: int) -> list[tuple[Part, ...]]:
    """Of each rank an early and a late chunk of the segments' rows, one behind the other."""
    total, num_chunks = sum(length for _, length in segments), 2 * num_ranks
    cuts = [total * i // num_chunks for i in range(num_chunks + 1)]
    shares = []
    for rank in range(num_ranks):
        late = num_chunks - 1 - rank
        if late == rank + 1:  # the two middle chunks are one
            shares.append(_parts(segments, cuts[rank], cuts[late + 1]))
        else:
            early = _parts(segments, cuts[rank], cuts[rank + 1])
            shares.append(early + _parts(segments, cuts[late], cuts[late + 1]))
    return shares


def _parts(segments: list[tuple[int, int]], begin: int, end: int) -> tuple[Part, ...]:
    """Rows [begin, end) of the segments, one behind the other."""
    parts, row = [], 0
    for segment, length in segments:
        low, high = max(begin - row, 0), min(end - row, length)
        if low < high:
            parts.append(Part(segment, low, high))
        row += length
    return tuple(parts)


def rows_of(parts: list[GroupParts], layout: SharedPromptLayout) -> torch.Tensor:
    """Pack rows of one rank's parts, in their order."""
    first_row = layout.segments_host[:, 0].tolist()
    ranges = [
        torch.arange(first_row[part.segment] + part.begin, first_row[part.segment] + part.end)
        for group in parts
        for part in (*group.prompt, *group.responses)
    ]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *ranges])
