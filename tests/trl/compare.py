"""Runs of a shared-prompt trainer beside its parent with the same group shuffle, and what must be equal."""

from __future__ import annotations

from typing import Any

from tiny import arguments, model_path, train
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from flash_attn.integrations.trl import (
    GroupShuffleMixin,
    SharedPromptGRPOTrainer,
    SharedPromptRLOOTrainer,
    SharedPromptSettings,
)


class GroupedGRPOTrainer(GroupShuffleMixin, GRPOTrainer):
    """The parent's log-probs; micro-batches of the same rows as the shared trainer's."""


class GroupedRLOOTrainer(GroupShuffleMixin, RLOOTrainer):
    """As above."""


TRAINERS = {
    "grpo": (GroupedGRPOTrainer, SharedPromptGRPOTrainer, GRPOConfig),
    "rloo": (GroupedRLOOTrainer, SharedPromptRLOOTrainer, RLOOConfig),
}
METRICS = ("loss", "grad_norm", "kl", "entropy", "reward", "aux_loss", "policy_loss")


def run(
    side: str,
    family: str,
    folder,
    *,
    kind: str = "qwen3",
    options: dict[str, Any] | None = None,
    **changes: Any,
):
    """`side`: "parent" or "shared". (trainer, logs, parameters)."""
    parent, shared, config = TRAINERS[family]
    settings = changes.pop("shared_prompt", None)
    out = folder / "out" / side
    extra = dict((options() if callable(options) else options) or {})
    if side == "shared" and settings is not None:
        extra["shared_prompt"] = SharedPromptSettings(**settings)
    trainer_class = parent if side == "parent" else shared
    return train(trainer_class, arguments(out, config, **changes), model_path(folder, kind), **extra)


def assert_same_logs(
    parent: list[dict[str, float]], shared: list[dict[str, float]], tolerance: float = 1e-5
) -> None:
    assert len(parent) == len(shared) > 0
    for step, (a, b) in enumerate(zip(parent, shared, strict=True)):
        for name in METRICS:
            assert (name in a) == (name in b)
            if name in a:
                difference = abs(a[name] - b[name])
                assert difference <= tolerance * max(1, abs(a[name])), (
                    f"step {step}: {name} {a[name]} {b[name]}"
                )
    assert any(a["grad_norm"] > 1e-3 for a in parent), "nothing was trained"


def assert_shared(trainer: Any, logs: list[dict[str, float]]) -> None:
    """Every log-prob pass ran packed, with fewer tokens than the rows have, and the metrics say so."""
    assert trainer.sharing.num_shared_passes > 0
    assert trainer.sharing.num_fallbacks == 0, trainer.sharing.fallbacks
    assert 0 < trainer.sharing.num_packed_tokens < trainer.sharing.num_replicated_tokens
    for entry in logs:
        assert entry["shared_prompt/fallbacks"] == 0
        assert 0 < entry["shared_prompt/packed_tokens"] < entry["shared_prompt/replicated_tokens"]
