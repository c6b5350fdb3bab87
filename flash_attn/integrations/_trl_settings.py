"""What a user may set about sharing in TRL's trainers, and the account of what was shared."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from flash_attn.integrations._sharing import Account
from flash_attn.shared_prompt.cost_model import CostModel


class SharedPromptWarning(UserWarning):
    """A trainer runs its parent's unshared path, or otherwise not as asked for; the text names the reason."""


@dataclass(frozen=True)
class SharedPromptSettings:
    """Options of the shared-prompt trainers (argument `shared_prompt`).

    - `max_packed_tokens`: packed tokens of one forward of the policy pass, at most; groups above it are
      split. The loss is that of the whole batch all the same: this bounds the workspace of a forward and,
      with gradient checkpointing, of the recomputation. None: one forward. Passes without gradient (old and
      reference log-probs) always run in micro-batches of as many tokens as the parent's.
    - `cost_model`: decides whether sharing pays; None counts FLOPs. `trainer.calibrate()` measures one.
    """

    max_packed_tokens: int | None = None
    cost_model: CostModel | None = None

    def __post_init__(self) -> None:
        if self.max_packed_tokens is not None and self.max_packed_tokens < 1:
            raise ValueError(f"max_packed_tokens must be at least 1, got {self.max_packed_tokens}")


def settings_of(shared_prompt: SharedPromptSettings | None) -> SharedPromptSettings:
    """The trainers' argument `shared_prompt`, checked; None: the defaults."""
    if shared_prompt is None:
        return SharedPromptSettings()
    if not isinstance(shared_prompt, SharedPromptSettings):
        raise TypeError(f"shared_prompt must be SharedPromptSettings(...) or None, got {shared_prompt!r}")
    return shared_prompt


class SharingStats(Account):
    """Counts of log-prob passes. `num_forwards`: of the passes that ran packed, each in one pack or more."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0

    def _tell(self, text: str) -> None:
        warnings.warn(text, SharedPromptWarning, stacklevel=5)
