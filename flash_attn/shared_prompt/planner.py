"""Rows -> micro-batches of whole groups within a budget of packed tokens, balanced over ranks; and whether
to share.

Groups go to ranks by longest processing time first (the costliest to the least loaded rank), then within a
rank into as few micro-batches as first-fit-decreasing finds. Every rank gets the same number of
micro-batches, costliest first, because each one is a collective under FSDP; a rank with less work gets
empty ones. Deterministic: ties go to the lower index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from flash_attn.shared_prompt.cost_model import CostModel, GroupLens, num_tokens
from flash_attn.shared_prompt.grouping import PromptGroups
from flash_attn.shared_prompt.layout import whole_number

OverBudget = Literal["raise", "split", "alone"]

# Without a cost model sharing pays wherever it saves tokens, and groups weigh as much as they have tokens.
TOKENS_ONLY = CostModel(token=1.0, label=0.0, pair_shared=0.0, pair_replicated=0.0, unit="tokens")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward. `groups`: the caller's rows of each group. `shared`: packed (True) or one row each
    (False).

    `num_tokens` pass through the model; `cost` is the cost model's forward and backward. Without groups it
    is a placeholder: the rank joins the collectives and its loss must count 0.
    """

    groups: tuple[tuple[int, ...], ...]
    shared: bool
    num_tokens: int
    cost: float

    @property
    def rows(self) -> tuple[int, ...]:
        """The caller's rows, group by group."""
        return tuple(row for group in self.groups for row in group)


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """`ranks[r]`: the micro-batches of rank r, as many on every rank. `over_budget`: rows that exceed the
    budget alone."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    over_budget: tuple[int, ...]

    @property
    def num_micro_batches(self) -> int:
        """Of each rank."""
        return len(self.ranks[0])

    @property
    def rank_costs(self) -> tuple[float, ...]:
        """The sum of each rank's micro-batches."""
        return tuple(sum(m.cost for m in micro_batches) for micro_batches in self.ranks)

    @property
    def imbalance(self) -> float:
        """Cost of the slowest rank over the mean; 1 is perfect."""
        mean = sum(self.rank_costs) / len(self.ranks)
        return max(self.rank_costs) / mean if mean else 1.0


@dataclass(frozen=True, slots=True)
class _Item:
    """A group, or a part of one, that is never taken apart again."""

    rows: tuple[int, ...]
    lens: GroupLens
    index: int  # of the caller's group
    tokens: int
    cost: float


def plan_micro_batches(
    row_lens: Sequence[tuple[int, int]],
    groups: PromptGroups | Sequence[Sequence[int]],
    *,
    max_tokens: int,
    num_ranks: int = 1,
    cost_model: CostModel | None = None,
    equal_groups: bool = False,
    over_budget: OverBudget = "raise",
) -> MicroBatchPlan:
    """Distributes the rows of a step over ranks and micro-batches.

    - `row_lens[i]`: (prompt, response) tokens of row i. `groups`: rows that share their prompt, each row in
      exactly one; `PromptGroups` (from `group_by_prompt`) also says how many tokens they share, by default
      the whole prompt, which must then have one length in a group.
    - `max_tokens`: packed tokens of a micro-batch, at most.
    - `equal_groups`: every rank gets as many groups (their number must be a multiple of `num_ranks`), for
      trainers that need equal batches. Otherwise ranks get equal cost.
    - `over_budget`, for a group above `max_tokens`: "raise"; "split" it into parts that fit, each with its
      own copy of the prompt (a single row that is too long stands alone above the budget and is listed); or
      leave the group "alone".

    Where `cost_model` says that sharing does not pay, the micro-batch's rows become micro-batches with
    `shared=False`. Bound: the slowest rank costs at most mean + the costliest group before placeholders and
    unshared micro-batches. Raises ValueError naming the group or row.
    """
    if not (max_tokens >= 1 and num_ranks >= 1):  # NaN too
        raise ValueError(
            f"max_tokens and num_ranks must be at least 1, got max_tokens={max_tokens}, num_ranks={num_ranks}"
        )
    if over_budget not in get_args(OverBudget):
        raise ValueError(f'over_budget must be "raise", "split" or "alone", got {over_budget!r}')
    model = cost_model or TOKENS_ONLY
    items: list[_Item] = []
    long_rows: list[int] = []
    for index, (rows, lens) in enumerate(_lengths(row_lens, groups)):
        for part in _parts(rows, lens, index, max_tokens, over_budget, model):
            items.append(part)
            if len(part.rows) == 1 and part.tokens > max_tokens:
                long_rows.append(part.rows[0])
    by_rank = _deal(items, num_ranks) if equal_groups else _longest_first(items, num_ranks)
    ranks = [_micro_batches(own, max_tokens, model) for own in by_rank]
    count = max(map(len, ranks))
    padded = [_lengthen(own, by_index, count, model) for own, by_index in zip(ranks, by_rank, strict=True)]
    return MicroBatchPlan(tuple(padded), tuple(sorted(long_rows)))


def _lengths(
    row_lens: Sequence[tuple[int, int]], groups: PromptGroups | Sequence[Sequence[int]]
) -> list[tuple[tuple[int, ...], GroupLens]]:
    """Of each group its rows, the tokens they share, and the tokens of each behind those."""
    all_rows = groups.rows if isinstance(groups, PromptGroups) else [list(rows) for rows in groups]
    if sorted(row for rows in all_rows for row in rows) != list(range(len(row_lens))) or not all(all_rows):
        raise ValueError(f"groups must hold each of the {len(row_lens)} rows exactly once, got {all_rows}")
    lens = [_row_lens(row, pair) for row, pair in enumerate(row_lens)]
    given = groups.prefix_lens if isinstance(groups, PromptGroups) else None
    prefixes = [lens[rows[0]][0] for rows in all_rows] if given is None else given
    result = []
    for rows, prefix in zip(all_rows, prefixes, strict=True):
        for row in rows:
            least = max(prefix, 1)
            if lens[row][0] < least or lens[row][1] < 0:
                raise ValueError(
                    f"row_lens[{row}] must be (at least {least} prompt tokens, at least 0), got {lens[row]}"
                )
            if given is None and lens[row][0] != prefix:
                raise ValueError(
                    f"row_lens[{row}] must have the {prefix} prompt tokens of its group's first row, got "
                    f"{lens[row][0]} (PromptGroups say how many tokens rows of different prompts share)"
                )
        result.append((tuple(rows), GroupLens(prefix, tuple(sum(lens[row]) - prefix for row in rows))))
    return result


def _row_lens(row: int, pair: Sequence[int]) -> tuple[int, int]:
    prompt_len, response_len = (whole_number(f"row_lens[{row}][{i}]", n) for i, n in enumerate(pair))
    return prompt_len, response_len


def _item(rows: Sequence[int], lens: GroupLens, index: int, model: CostModel) -> _Item:
    tokens = num_tokens(lens, shared=True, fork=model.fork)
    return _Item(tuple(rows), lens, index, tokens, model.cost([lens], shared=True) - model.call_shared)


def _parts(
    rows: tuple[int, ...],
    lens: GroupLens,
    index: int,
    max_tokens: int,
    over_budget: OverBudget,
    model: CostModel,
) -> list[_Item]:
    """The group itself where it fits, else what `over_budget` makes of it."""
    whole = _item(rows, lens, index, model)
    if whole.tokens <= max_tokens or over_budget == "alone":
        return [whole]
    if over_budget == "raise":
        longest = max(lens.response_lens)
        raise ValueError(
            f"groups[{index}] must fit into max_tokens={max_tokens}, got {whole.tokens} tokens: "
            f"prompt {lens.prompt_len}, {len(rows)} rows of up to {longest} tokens behind it "
            '(over_budget="split" takes it apart)'
        )
    parts: list[list[int]] = []  # first fit, longest rows first: few copies of the prompt
    used: list[int] = []
    own = {row: n + model.fork for row, n in zip(rows, lens.response_lens, strict=True)}
    for row in sorted(rows, key=lambda r: (-own[r], r)):
        fits = (i for i, tokens in enumerate(used) if tokens + own[row] <= max_tokens)
        target = next(fits, None)
        if target is None:
            parts.append([row])
            used.append(lens.prompt_len - model.fork + own[row])
        else:
            parts[target].append(row)
            used[target] += own[row]
    length_of = dict(zip(rows, lens.response_lens, strict=True))
    return [
        _item(sorted(p), GroupLens(lens.prompt_len, tuple(length_of[r] for r in sorted(p))), index, model)
        for p in parts
    ]


def _order(item: _Item) -> tuple[float, int, int]:
    """Costliest first; ties by the caller's order."""
    return -item.cost, item.index, item.rows[0]


def _longest_first(items: list[_Item], num_ranks: int) -> list[list[_Item]]:
    """The costliest item left goes to the least loaded rank: at most mean + (1 - 1 / ranks) costliest
    item."""
    ranks: list[list[_Item]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for item in sorted(items, key=_order):
        rank = min(range(num_ranks), key=lambda r: (load[r], r))
        ranks[rank].append(item)
        load[rank] += item.cost
    return ranks


def _deal(items: list[_Item], num_ranks: int) -> list[list[_Item]]:
    """Rounds of one item per rank, the costliest of a round to the least loaded: loads differ by one item
    at most."""
    if len(items) % num_ranks:
        raise ValueError(
            f"groups must be a multiple of num_ranks={num_ranks} for equal_groups, got {len(items)} "
            "(parts of split groups count)"
        )
    ranks: list[list[_Item]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    ordered = sorted(items, key=_order)
    for begin in range(0, len(ordered), num_ranks):
        by_load = sorted(range(num_ranks), key=lambda r: (load[r], r))
        for rank, item in zip(by_load, ordered[begin : begin + num_ranks], strict=True):
            ranks[rank].append(item)
            load[rank] += item.cost
    return ranks


def _micro_batches(items: list[_Item], max_tokens: int, model: CostModel) -> list[MicroBatch]:
    """First fit decreasing by tokens; micro-batches that sharing does not pay for are taken apart into
    rows."""
    bins: list[list[_Item]] = []
    used: list[int] = []
    for item in sorted(items, key=lambda i: (-i.tokens, *_order(i))):
        target = next((b for b, tokens in enumerate(used) if tokens + item.tokens <= max_tokens), None)
        if target is None:
            bins.append([item])
            used.append(item.tokens)
        else:
            bins[target].append(item)
            used[target] += item.tokens
    shared, apart = [], []
    for own in bins:
        rows = _one_by_one(own, model)
        calls = len(_fill(rows, max_tokens))
        if any(len(i.rows) > 1 for i in own) and not model.pays([i.lens for i in own], num_calls=calls):
            apart += rows
        else:
            shared.append(_micro_batch(own, True, model))
    unshared = [_micro_batch(own, False, model) for own in _fill(apart, max_tokens)]
    return shared + unshared


def _one_by_one(items: list[_Item], model: CostModel) -> list[_Item]:
    """Each row as an item of its own."""
    return [
        _item((row,), GroupLens(item.lens.prompt_len, (length,)), item.index, model)
        for item in items
        for row, length in zip(item.rows, item.lens.response_lens, strict=True)
    ]


def _fill(rows: list[_Item], max_tokens: int) -> list[list[_Item]]:
    """Rows in order, as many as fit into each micro-batch."""
    filled: list[list[_Item]] = []
    used = 0
    for row in rows:
        if not filled or used + row.tokens > max_tokens:
            filled.append([])
            used = 0
        filled[-1].append(row)
        used += row.tokens
    return filled


def _micro_batch(items: list[_Item], shared: bool, model: CostModel) -> MicroBatch:
    lens = [item.lens for item in items]
    tokens = sum(num_tokens(g, shared=shared, fork=model.fork) for g in lens)
    return MicroBatch(
        tuple(item.rows for item in items), shared, tokens, model.cost(lens, shared=shared) if lens else 0.0
    )


def _lengthen(
    micro_batches: list[MicroBatch], items: list[_Item], count: int, model: CostModel
) -> tuple[MicroBatch, ...]:
    """`count` micro-batches, costliest first: those of several groups are halved before placeholders are
    added."""
    lens_of = {item.rows: item.lens for item in items} | {i.rows: i.lens for i in _one_by_one(items, model)}
    result = list(micro_batches)
    while len(result) < count:
        splittable = [m for m in result if len(m.groups) > 1]
        if not splittable:
            result.append(MicroBatch((), True, 0, 0.0))
            continue
        largest = max(splittable, key=lambda m: (m.cost, -m.rows[0]))
        result.remove(largest)
        for groups in (largest.groups[::2], largest.groups[1::2]):
            lens = [lens_of[g] for g in groups]
            tokens = sum(num_tokens(g, shared=largest.shared, fork=model.fork) for g in lens)
            result.append(MicroBatch(groups, largest.shared, tokens, model.cost(lens, shared=largest.shared)))
    return tuple(sorted(result, key=lambda m: (-m.cost, m.rows[:1])))
