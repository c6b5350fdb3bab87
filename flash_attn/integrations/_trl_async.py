"""TRL's experimental AsyncGRPO trainer on this package's tree attention."""

from __future__ import annotations

from typing import Any

from trl.experimental.async_grpo import AsyncGRPOTrainer

from flash_attn.integrations._trl_tree import install_tree_attention


class SharedPromptAsyncGRPOTrainer(AsyncGRPOTrainer):
    """`AsyncGRPOTrainer`, whose trie packing no longer copies K/V per branch and needs no
    FlashAttention-3."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # registers TRL's own attention
        install_tree_attention()
