"""Mini-batch -> micro-batches of whole groups, as many on every data-parallel rank.

Static (`micro_batch_size_per_gpu` rows each): rows of a group stand side by side. Dynamic
(`max_token_len_per_gpu`): the planner fills micro-batches up to that many *packed* tokens. veRL's loss is a
sum over rows divided by totals of the whole mini-batch, so which rows meet in a micro-batch changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
import torch.distributed
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from flash_attn.integrations._verl_batch import HostRows, RowPack
from flash_attn.shared_prompt.cost_model import CostModel
from flash_attn.shared_prompt.planner import plan_micro_batches

PLAN_KEY = "shared_prompt_plan"


class StepPlan:
    """Rows of a mini-batch's micro-batches, which veRL's loop must ask for and run, all of them.

    Each is packed when its turn comes, while the device still works on the one before. The token counts are
    of the packs made so far.
    """

    def __init__(self, rows: list[list[int]], host: HostRows) -> None:
        self.rows, self._host = rows, host
        self.num_packed_tokens = self.num_replicated_tokens = 0
        self._waiting: list[list[int]] | None = None

    def next_pack(self) -> RowPack:
        """Of the next micro-batch. Raises RuntimeError unless the micro-batches are this plan's."""
        if not self._waiting:
            self._refuse_release()
        packed = self._host.pack(self._waiting.pop(0))  # type: ignore[union-attr]
        self.num_packed_tokens += packed.num_packed_tokens
        self.num_replicated_tokens += packed.num_replicated_tokens
        return packed

    def check_done(self) -> None:
        """Raises RuntimeError unless every micro-batch ran."""
        if self._waiting != []:
            self._refuse_release()

    def _refuse_release(self) -> NoReturn:
        left = len(self.rows if self._waiting is None else self._waiting)
        raise RuntimeError(
            f"this release of veRL did not run the shared-prompt plan of {len(self.rows)} micro-batches "
            f"({left} are left): the plug-in supports 0.9.1"
        )

    def attach(self, data: TensorDict) -> TensorDict:
        """A copy of `data` (same tensors) that `micro_batches` recognises."""
        planned = data.copy()
        # veRL puts outputs back into the rows' order by the index lists of dynamic batches only.
        tu.assign_non_tensor(planned, use_dynamic_bsz=True)
        tu.assign_non_tensor_data(planned, PLAN_KEY, self)
        return planned

    @staticmethod
    def of(data: TensorDict) -> StepPlan | None:
        """The plan attached to `data`."""
        return tu.get_non_tensor_data(data=data, key=PLAN_KEY, default=None)

    def micro_batches(self, data: TensorDict) -> tuple[list[TensorDict], list[list[int]]]:
        """What veRL's `prepare_micro_batches` returns: the batches, and the rows of each."""
        self._waiting = list(self.rows)
        bare = data.copy()
        del bare[PLAN_KEY]
        if self.rows == [list(range(len(bare)))]:  # all rows in their order: nothing to copy
            return [bare], self.rows
        return [tu.index_select_tensor_dict(bare, rows) for rows in self.rows], self.rows


class Limits(NamedTuple):
    """How large a micro-batch may be: rows, or packed tokens."""

    num_rows: int | None
    num_tokens: int | None

    @classmethod
    def of(cls, data: TensorDict, sp_size: int) -> Limits:
        if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            return cls(None, int(data["max_token_len_per_gpu"]) * sp_size)
        return cls(int(data["micro_batch_size_per_gpu"]), None)


def rows_of_micro_batches(host: HostRows, limits: Limits, cost_model: CostModel) -> list[list[int]]:
    """This rank's micro-batches, before ranks agree on their number.

    Raises ValueError where the rows do not divide into static micro-batches, or a row alone exceeds the
    tokens.
    """
    groups, lens = host.groups, host.lens
    if limits.num_rows is not None:
        if len(lens) % limits.num_rows:
            raise ValueError(
                f"micro_batch_size_per_gpu must divide the {len(lens)} rows of this rank, "
                f"got {limits.num_rows}"
            )
        # Groups that fill micro-batches exactly come first, so that others do not shift them.
        order = sorted(groups.rows, key=lambda rows: len(rows) % limits.num_rows != 0)  # type: ignore[operator]
        flat = [row for rows in order for row in rows]
        return [flat[i : i + limits.num_rows] for i in range(0, len(flat), limits.num_rows)]
    assert limits.num_tokens is not None
    plan = plan_micro_batches(
        lens, groups, max_tokens=limits.num_tokens, over_budget="split", cost_model=cost_model
    )
    if plan.over_budget:
        longest = max(sum(lens[row]) for row in plan.over_budget)
        raise ValueError(
            f"max_token_len_per_gpu times the sequence-parallel size must hold every row, got "
            f"{limits.num_tokens} for a row of {longest} tokens"
        )
    return [list(m.rows) for m in plan.ranks[0]]


def lengthen(micro_batches: list[list[int]], count: int, host: HostRows) -> list[list[int]]:
    """`count` micro-batches: those of most tokens are halved, between groups where there are several."""
    lens = host.lens
    result = [list(rows) for rows in micro_batches]
    while len(result) < count:
        largest = max(
            (rows for rows in result if len(rows) > 1), key=lambda rows: sum(sum(lens[r]) for r in rows)
        )
        result.remove(largest)
        result += _halves(largest, host)
    return result


def _halves(rows: list[int], host: HostRows) -> list[list[int]]:
    groups = host.grouped(rows)
    if len(groups) == 1:
        middle = len(rows) // 2
        return [rows[:middle], rows[middle:]]
    return [[rows[i] for group in part for i in group] for part in (groups[::2], groups[1::2])]


def agree(
    reason: str | None,
    error: ValueError | None,
    num_micro_batches: int,
    num_rows: int,
    group: torch.distributed.ProcessGroup | None,
) -> tuple[bool, int]:
    """(any rank refuses, most micro-batches of a rank). Every forward is a collective, so ranks must agree.

    Where one rank has an `error`, or too few rows for that many micro-batches, all raise ValueError: a rank
    that raised alone would leave the others waiting.
    """
    own = [reason is not None, error is not None, num_micro_batches, -num_rows]
    facts = torch.tensor([int(fact) for fact in own], device=get_device_name())
    torch.distributed.all_reduce(facts, op=torch.distributed.ReduceOp.MAX, group=group)
    refused, failed, count, fewest = facts.tolist()
    if failed:
        raise error or ValueError("another rank cannot split its rows into micro-batches: see its error")
    if not refused and count > -fewest:
        raise ValueError(
            f"ranks must have at least {count} rows each for {count} micro-batches, got {-fewest}"
        )
    return bool(refused), count
