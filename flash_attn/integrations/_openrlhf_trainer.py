"""OpenRLHF's actor trainer: micro-batches of whole groups, and what was shared in its metrics.

OpenRLHF shuffles single rows over its micro-batches, which takes the responses of a prompt apart. Here whole
groups are shuffled. Dynamic batches (cut by length) and ring attention keep OpenRLHF's order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from flash_attn.integrations._openrlhf_actor import account
from flash_attn.integrations._sharing import INSTALLED, METRIC


class GroupSampler(torch.utils.data.Sampler[int]):
    """Indices of a replay buffer in random order, rows of one prompt side by side."""

    def __init__(self, replay_buffer: Any) -> None:
        self.replay_buffer = replay_buffer

    def __len__(self) -> int:
        return len(self.replay_buffer)

    def __iter__(self) -> Iterator[int]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for index in torch.randperm(len(self)).tolist():
            groups.setdefault(_prompt(self.replay_buffer[index]), []).append(index)
        for rows in groups.values():  # in the order of their first rows, which is random
            yield from rows


def _prompt(item: Any) -> tuple[int, ...]:
    """Tokens of an experience before its first action."""
    ids, kept = item.sequences, item.attention_mask.bool()
    action = item.action_mask.bool().nonzero()
    end = len(ids) - len(item.action_mask) + int(action[0]) if len(action) else len(ids)
    return tuple(ids[:end][kept[:end]].tolist())


def install(module: ModuleType) -> None:
    """Patches openrlhf.trainer.ray.ppo_actor, once per process."""
    original_loader: Any = module.DataLoader
    if hasattr(original_loader, INSTALLED):
        return

    def data_loader(dataset: Any, *args: Any, shuffle: bool = False, **kwargs: Any) -> Any:
        if not shuffle:
            return original_loader(dataset, *args, shuffle=False, **kwargs)
        return original_loader(dataset, *args, sampler=GroupSampler(dataset), **kwargs)

    setattr(data_loader, INSTALLED, True)
    module.DataLoader = data_loader  # type: ignore[attr-defined]
    trainer: Any = module.ActorPPOTrainer
    original_step = trainer.training_step

    @functools.wraps(original_step)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts = account(self.actor)
        counts.take()  # log-probs of the rollout
        status = original_step(self, *args, **kwargs)
        for name, value in counts.take().items():
            status["metrics"][f"{METRIC}/{name}"] = value
            status["weights"][f"{METRIC}/{name}"] = None  # of this process, not averaged over processes
        return status

    trainer.training_step = training_step
