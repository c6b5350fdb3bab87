"""Shared prompts in TRL: the same trainers, with each prompt stored, projected and attended once.

    from flash_attn.integrations.trl import SharedPromptGRPOTrainer as GRPOTrainer

`SharedPromptGRPOTrainer`, `SharedPromptRLOOTrainer` and `SharedPromptDPOTrainer` take their parents'
arguments, and `shared_prompt=SharedPromptSettings(...)`. Loss, gradients and metrics are the parents' up to
rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trl import DPOTrainer, GRPOTrainer, RLOOTrainer

from flash_attn.integrations._trl_dpo import SharedPairsMixin
from flash_attn.integrations._trl_policy import SharedPromptMixin
from flash_attn.integrations._trl_settings import SharedPromptSettings, SharedPromptWarning, SharingStats
from flash_attn.integrations._trl_shuffle import GroupShuffleMixin
from flash_attn.integrations._trl_tree import install_tree_attention

__all__ = [
    "SharedPromptGRPOTrainer", "SharedPromptRLOOTrainer", "SharedPromptDPOTrainer", "SharedPromptMixin",
    "SharedPairsMixin", "SharedPromptAsyncGRPOTrainer", "install_tree_attention", "GroupShuffleMixin",
    "SharedPromptSettings", "SharedPromptWarning", "SharingStats",
]  # fmt: skip

if TYPE_CHECKING:
    from flash_attn.integrations._trl_async import SharedPromptAsyncGRPOTrainer


class SharedPromptGRPOTrainer(SharedPromptMixin, GRPOTrainer):
    """`trl.GRPOTrainer` with shared prompts."""


class SharedPromptRLOOTrainer(SharedPromptMixin, RLOOTrainer):
    """`trl.RLOOTrainer` with shared prompts."""


class SharedPromptDPOTrainer(SharedPairsMixin, DPOTrainer):
    """`trl.DPOTrainer` with shared prompts."""


def __getattr__(name: str) -> Any:
    # TRL's experimental trainers warn when they are imported, so that is left to those who use them.
    if name != "SharedPromptAsyncGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flash_attn.integrations._trl_async import SharedPromptAsyncGRPOTrainer

    return SharedPromptAsyncGRPOTrainer
