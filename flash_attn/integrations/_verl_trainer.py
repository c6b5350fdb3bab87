"""veRL's driver: whole groups per rank and mini-batch, and proof that the workers share prompts.

`PPOTrainer._balance_batch` deals single rows to ranks by length, which takes groups apart. The rows that it
returns are dealt anew, groups whole wherever they fit, by the cost of their packs. Each mini-batch keeps its
number of rows on every rank, nothing is dropped or repeated, and veRL's loss divides by the mini-batch's
totals over all ranks, so the mini-batch's gradient is the same for any partition of its rows.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

from verl.utils.seqlen_balancing import log_seqlen_unbalance

from flash_attn.integrations._sharing import IMPLEMENTATION, INSTALLED
from flash_attn.integrations._verl_settings import MODULE, logger, names_plugin
from flash_attn.shared_prompt.cost_model import CostModel, GroupLens

# The driver has no model: veRL's own weights of a 7B model, 24576 per token beside length squared (two per
# pair of query and key).
COST_MODEL = CostModel(24576.0, 0.0, 2.0, 2.0, unit="veRL's workload")


class Row(NamedTuple):
    """A row of the driver's batch: rows of one `group` share their prompt."""

    group: str
    prompt_len: int
    response_len: int


def rows_of(batch: Any) -> list[Row]:
    """From the keys `{uid}_{session}_{index}` and tags of a KVBatchMeta. Raises ValueError for other keys."""
    rows = []
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        parts = key.rsplit("_", 2)
        if len(parts) != 3:
            raise ValueError(f"keys must be uid_session_index, got {key!r}")
        rows.append(Row(parts[0], tag["prompt_len"], tag["response_len"]))
    return rows


def packed_cost(rows: Sequence[Row]) -> float:
    """Of rows of one group. Those with prompts of other lengths (later turns of an agent) do not share."""
    by_prompt: dict[int, list[int]] = {}
    for row in rows:
        by_prompt.setdefault(row.prompt_len, []).append(row.response_len)
    return COST_MODEL.cost([GroupLens(p, tuple(lens)) for p, lens in by_prompt.items()], shared=True)


def deal(rows: Sequence[Row], members: Sequence[int], num_bins: int) -> list[list[int]]:
    """`members` (indices into `rows`) in `num_bins` lists of equal length, groups whole wherever they fit.

    Costliest group first, each to the cheapest bin with room for all of it. Where none has room the group
    fills the emptiest bin and goes on in the next. Rows of a group stand side by side. Deterministic.
    """
    if len(members) % num_bins:
        raise ValueError(f"members must divide into {num_bins} bins, got {len(members)}")
    room = [len(members) // num_bins] * num_bins
    load = [0.0] * num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    groups: dict[str, list[int]] = {}
    for i in members:
        groups.setdefault(rows[i].group, []).append(i)
    waiting = [(-packed_cost([rows[i] for i in own]), own[0], own) for own in groups.values()]
    heapq.heapify(waiting)
    while waiting:
        _, _, own = heapq.heappop(waiting)
        fitting = [b for b in range(num_bins) if room[b] >= len(own)]
        if fitting:
            target, part, rest = min(fitting, key=lambda b: (load[b], b)), own, []
        else:
            target = max(range(num_bins), key=lambda b: (room[b], -load[b], -b))
            part, rest = own[: room[target]], own[room[target] :]
        bins[target] += part
        room[target] -= len(part)
        load[target] += packed_cost([rows[i] for i in part])
        if rest:
            heapq.heappush(waiting, (-packed_cost([rows[i] for i in rest]), rest[0], rest))
    return bins


def partition(rows: Sequence[Row], *, num_ranks: int, mini_batch_size: int) -> list[list[int]]:
    """The rows of each rank, mini-batch by mini-batch.

    `mini_batch_size` counts rows over all ranks; where it does not divide the batch this is one mini-batch
    (veRL then makes no update of it). Groups stay in the order of `rows` over mini-batches.
    """
    order: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        order.setdefault(row.group, []).append(i)
    grouped = [i for own in order.values() for i in own]
    if mini_batch_size < 1 or len(rows) % mini_batch_size or mini_batch_size % num_ranks:
        mini_batch_size = len(rows)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for begin in range(0, len(rows), mini_batch_size):
        for rank, part in enumerate(deal(rows, grouped[begin : begin + mini_batch_size], num_ranks)):
            ranks[rank] += part
    return ranks


def check_trainer(config: Any) -> bool:
    """Whether this run uses the plug-in. Raises ValueError for settings under which it would do nothing."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    if not names_plugin(model.get("external_lib", None)):
        return False
    attention = (model.get("override_config", None) or {}).get("attn_implementation", None)
    if attention != IMPLEMENTATION:
        raise ValueError(
            f"actor_rollout_ref.model.external_lib={MODULE} must come with "
            f"+actor_rollout_ref.model.override_config.attn_implementation={IMPLEMENTATION}, "
            f"got {attention!r}"
        )
    if actor.strategy not in ("fsdp", "fsdp2"):
        raise ValueError(
            "actor_rollout_ref.actor.strategy must be fsdp or fsdp2 for shared prompts, "
            f"got {actor.strategy!r}"
        )
    if actor.get("shuffle", False):
        logger.warning("actor.shuffle=True takes the rows of a prompt apart: little or nothing is shared")
    return True


def install(trainer_class: Any) -> None:
    """Lets veRL's `PPOTrainer` deal whole groups, and stop where no worker shares. Calling it again does
    nothing."""
    if hasattr(trainer_class._balance_batch, INSTALLED):
        return
    balance_batch, update_actor = trainer_class._balance_batch, trainer_class._update_actor

    @functools.wraps(balance_batch)
    def balance(
        self: Any, batch: Any, metrics: Any, logging_prefix: str = "global_seqlen", **kwargs: Any
    ) -> Any:
        place = {key: i for i, key in enumerate(batch.keys)}
        batch = balance_batch(self, batch, metrics, logging_prefix, **kwargs)
        if not check_trainer(self.config):
            return batch
        # veRL has sorted by length: back to the order of the data, padding rows last.
        batch.reorder(sorted(range(len(batch)), key=lambda i: (place.get(batch.keys[i], len(place)), i)))
        actor = self.config.actor_rollout_ref.actor
        ranks = partition(
            rows_of(batch),
            num_ranks=max(self.actor_rollout_wg._dispatch_info["actor"]) + 1,
            mini_batch_size=actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n,
        )
        lens = [tag["seq_len"] for tag in batch.tags]
        metrics.update(log_seqlen_unbalance(seqlen_list=lens, partitions=ranks, prefix=logging_prefix))
        batch.reorder([i for own in ranks for i in own])
        return batch

    @functools.wraps(update_actor)
    def update(self: Any, batch: Any, metrics: Any) -> Any:
        batch = update_actor(self, batch, metrics)
        if check_trainer(self.config) and "actor/shared_prompt/packed_tokens" not in metrics:
            raise RuntimeError(
                f"{MODULE} is configured, but the workers' engines are not its own: their metrics lack "
                "actor/shared_prompt/packed_tokens. Is VERL_ENGINE_VENDOR or another plug-in in the way?"
            )
        return batch

    setattr(balance, INSTALLED, True)
    trainer_class._balance_batch, trainer_class._update_actor = balance, update
