"""What TRL's, veRL's and OpenRLHF's adapters shared and what not: counts, and each reason told once."""

from __future__ import annotations

from collections import Counter

IMPLEMENTATION = "dualkv"  # of attention, by the name that `transformers.register` gives it
METRIC = "shared_prompt"  # prefix of the metrics packed_tokens, replicated_tokens and fallbacks
INSTALLED = "_flash_attn_shared_prompt"  # attribute of functions put in place of a framework's


class Account:
    """Counts over the life of a trainer, engine or actor, on this process. `fallbacks`: passes that ran
    unshared, by reason; the other counts are of passes that ran packed."""

    def __init__(self) -> None:
        self.num_shared_passes = 0
        self.num_packed_tokens = 0
        self.num_replicated_tokens = 0
        self.fallbacks: Counter[str] = Counter()
        self._told: set[str] = set()

    @property
    def num_fallbacks(self) -> int:
        """Over all reasons."""
        return self.fallbacks.total()

    def count_shared(self, num_packed_tokens: int, num_replicated_tokens: int) -> None:
        """Counts one pass that ran packed."""
        self.num_shared_passes += 1
        self.num_packed_tokens += num_packed_tokens
        self.num_replicated_tokens += num_replicated_tokens

    def count_fallback(self, reason: str, what_runs: str) -> None:
        """Counts one pass that ran unshared, in `what_runs`; tells the first of each reason."""
        self.fallbacks[reason] += 1
        self.tell_once(f"{what_runs} runs without shared prompts: {reason}", key=reason)

    def tell_once(self, text: str, *, key: str | None = None) -> None:
        """Tells the user, once per text (or key)."""
        if (key or text) not in self._told:
            self._told.add(key or text)
            self._tell(text)

    def _tell(self, text: str) -> None:
        """By the framework's own way: a warning, a line of the log."""
        raise NotImplementedError
