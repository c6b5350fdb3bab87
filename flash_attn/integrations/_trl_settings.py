"""What a user may set about sharing in TRL's trainers, and the account of what was shared and what was
not."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field

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


@dataclass
class SharingStats:
    """Counts over a trainer's life, on this process. `fallbacks`: log-prob passes that ran unshared, by
    reason."""

    num_shared_passes: int = 0
    num_forwards: int = 0
    num_packed_tokens: int = 0
    num_replicated_tokens: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    _warned: set[str] = field(default_factory=set, repr=False)

    @property
    def num_fallbacks(self) -> int:
        """Over all reasons."""
        return sum(self.fallbacks.values())

    def count_pass(self, num_forwards: int, num_packed_tokens: int, num_replicated_tokens: int) -> None:
        """Counts one shared pass."""
        self.num_shared_passes += 1
        self.num_forwards += num_forwards
        self.num_packed_tokens += num_packed_tokens
        self.num_replicated_tokens += num_replicated_tokens

    def warn_once(self, text: str, *, key: str | None = None) -> None:
        """One SharedPromptWarning per text (or key)."""
        if (key or text) not in self._warned:
            self._warned.add(key or text)
            warnings.warn(text, SharedPromptWarning, stacklevel=4)

    def count_fallback(self, reason: str, trainer: str) -> None:
        """Counts one unshared pass and warns the first time this reason occurs."""
        self.fallbacks[reason] += 1
        self.warn_once(f"{trainer} runs without shared prompts: {reason}", key=reason)
