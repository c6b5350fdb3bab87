"""A layout whose rows are spread over the ranks of a process group, as attention and adapters see it.

It stands in for the pack's own layout in a model's forward: the model sees `num_rows` rows of one rank,
attention (flash_attn_shared_prompt_func) finds the group and does the exchange. Made by `ulysses.shard`.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from flash_attn.shared_prompt import _partition
from flash_attn.shared_prompt._context_keys import ContextKeys, context_keys
from flash_attn.shared_prompt.layout import SharedPromptLayout, move

Method = Literal["ulysses", "context"]
_OF_THE_WHOLE = frozenset(
    ("segments", "segments_host", "cu_seqlens", "group_of_segment", "pred_index", "response_index",
     "cu_responses", "max_seqlen_q", "max_seqlen_k")
)  # fmt: skip


# What the rows of one rank have in common with the whole pack.
_COPIED = ("prompt_lens", "response_lens", "boundary", "num_groups", "num_responses", "num_response_tokens",
           "num_segments")  # fmt: skip


class ShardedLayout(SharedPromptLayout):
    """The rows of `whole`, a pack's layout, that this rank of `sp_group` holds.

    - `num_rows` = `total`: rows a rank, the same on all; `num_own_rows` of them are rows of the pack, the
      others, behind them, padding (position 0, multiplicity 0).
    - `rows` (num_rows,) int64: the pack row that each holds, 0 where `is_padding`.
    - `position_ids`, `multiplicity` (num_rows,): as in `whole`, of these rows.
    - `row_counts`: pack rows of each rank. `place` (whole.num_rows,) int64, on the CPU: rank * num_rows +
      local row of each row of the pack.
    - `method`: "ulysses" (heads are exchanged for rows) or "context" (keys travel, queries stay put).

    Segments and index maps are the whole pack's: `layout.whole.segments`.
    """

    __slots__ = (
        "context", "is_padding", "method", "num_chunks", "num_own_rows", "place", "rank", "row_counts",
        "rows", "sp_group", "whole",
    )  # fmt: skip
    _tensor_names = ("rows", "is_padding", "position_ids", "multiplicity")

    whole: SharedPromptLayout
    sp_group: dist.ProcessGroup
    method: Method
    num_chunks: int
    rank: int
    rows: torch.Tensor
    is_padding: torch.Tensor
    num_own_rows: int
    row_counts: tuple[int, ...]
    place: torch.Tensor
    context: ContextKeys | None

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_WHOLE:
            raise AttributeError(
                f"{name} of a sequence-parallel layout is the whole pack's: layout.whole.{name}"
            )
        raise AttributeError(f"ShardedLayout has no attribute {name!r}")

    def to(self, device: torch.device | str | int, *, non_blocking: bool = True) -> ShardedLayout:
        """This layout with its tensors on `device`: itself when already there."""
        whole = self.whole.to(device)
        return self if whole is self.whole else _moved(self, whole)

    def copy_(self, other: SharedPromptLayout) -> SharedPromptLayout:
        """Not supported: which rows a rank holds depends on the lengths."""
        raise NotImplementedError("copy_ is not supported on a sequence-parallel layout: shard the new one")

    def plan(self, **arguments: Any) -> list[torch.Tensor]:
        """Of this rank's call of the attention op (see `SharedPromptLayout.plan`)."""
        if self.context is None:
            return self.whole.plan(**arguments)
        return self.context.plan(self.num_rows, **arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a sequence-parallel layout cannot be pickled (its process group cannot): "
                        "pickle layout.whole")  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"ShardedLayout(rank {self.rank} of {self.sp_group.size()}, {self.num_own_rows} of "
            f"{self.whole.total} rows, method={self.method!r}, whole={self.whole!r})"
        )


def _moved(layout: ShardedLayout, whole: SharedPromptLayout) -> ShardedLayout:
    moved = object.__new__(ShardedLayout)
    names = (*_COPIED, "sp_group", "method", "num_chunks", "rank", "num_own_rows", "row_counts", "place",
             "num_rows", "total", "capacities")  # fmt: skip
    moved._set(**{name: getattr(layout, name) for name in names})
    moved._set(**{name: move(getattr(layout, name), whole.device) for name in ShardedLayout._tensor_names})
    context = None if layout.context is None else layout.context.to(whole.device)
    moved._set(whole=whole, device=whole.device, context=context, _plans={})
    return moved


def check_arguments(layout: Any, group: Any, method: str, num_chunks: int) -> None:
    """Raises unless `layout` can be spread over `group` by `method`."""
    if not isinstance(layout, SharedPromptLayout):
        raise TypeError(f"layout must be a SharedPromptLayout, got {type(layout).__name__}")
    if layout.sp_group is not None:
        raise ValueError("layout must be a whole pack's, got one that is already spread over a group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group must be a process group that this rank is a member of (torch.distributed.new_group, "
            f"mesh.get_group()), got {type(group).__name__}"
        )
    if method not in get_args(Method):
        raise ValueError(f'method must be "ulysses" or "context", got {method!r}')
    if isinstance(num_chunks, bool) or not isinstance(num_chunks, int):
        raise TypeError(f"num_chunks must be a Python int, got {type(num_chunks).__name__}")
    if num_chunks < 1:
        raise ValueError(f"num_chunks must be at least 1, got {num_chunks}")
    if layout.total == 0:
        raise ValueError("layout must have at least one row, got an empty pack")
    if method == "context" and layout.capacities is not None:
        raise NotImplementedError(
            'method "context" does not support layouts with capacities: rows of a rank depend on the lengths'
        )


def shard_layout(
    layout: SharedPromptLayout, group: dist.ProcessGroup, method: Method = "ulysses", num_chunks: int = 1
) -> ShardedLayout:
    """The rows of `layout` that this rank of `group` holds; no communication. See `ShardedLayout`."""
    check_arguments(layout, group, method, num_chunks)
    num_ranks, rank = group.size(), group.rank()
    if method == "ulysses":
        rows = _partition.contiguous(layout.num_rows, num_ranks)
        parts = None
    else:
        parts = _partition.balanced(layout, num_ranks)
        rows = [_partition.rows_of(p, layout) for p in parts]
    num_rows = max(r.numel() for r in rows)
    place = torch.empty(layout.num_rows, dtype=torch.int64)
    for w, own in enumerate(rows):
        place[own] = w * num_rows + torch.arange(own.numel())
    mine = torch.nn.functional.pad(rows[rank], (0, num_rows - rows[rank].numel()))
    is_padding = torch.arange(num_rows) >= rows[rank].numel()
    sharded = object.__new__(ShardedLayout)
    sharded._set(**{name: getattr(layout, name) for name in _COPIED})
    index = move(mine, layout.device)
    padding = move(is_padding, layout.device)
    context = None
    if parts is not None:
        context = context_keys(layout, parts, place, num_rows, rank).to(layout.device)
    sharded._set(
        whole=layout, sp_group=group, method=method, num_chunks=num_chunks, rank=rank, rows=index,
        is_padding=padding, num_own_rows=rows[rank].numel(), row_counts=tuple(r.numel() for r in rows),
        place=place, num_rows=num_rows, total=num_rows, capacities=None, device=layout.device,
        position_ids=layout.position_ids[index].masked_fill(padding, 0),
        multiplicity=layout.multiplicity[index].masked_fill(padding, 0), context=context, _plans={},
    )  # fmt: skip
    return sharded
