"""The auxiliary load-balancing loss of a pass that runs in several packs, as of one.

Per layer it is a product of two means over all tokens, so that the mean of the packs' own losses is another
number: the routers' logits of all packs are put together, and each row counts as often as the replicated
batch has it. Called by _trl_policy.py.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from flash_attn.integrations._transformers_forward import multiplicity_mask
from flash_attn.integrations._transformers_support import text_backbone
from flash_attn.shared_prompt import PackedBatch


class RouterLogits:
    """Keeps what a model's routers say in the forwards of a `with` block, one for each pack."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._backbone = text_backbone(model)
        self._logits: list[tuple[torch.Tensor, ...]] = []  # of each forward, layer by layer

    def __enter__(self) -> RouterLogits:
        self._handle = self._backbone.register_forward_hook(self._keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.remove()

    def _keep(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._logits.append(output.router_logits)

    def aux_loss(self, packs: list[PackedBatch]) -> torch.Tensor:
        """Of all rows of the packs that ran, in their order."""
        layers = tuple(torch.cat(layer) for layer in zip(*self._logits, strict=True))
        mask = torch.cat([multiplicity_mask(packed.layout) for packed in packs], 1)
        top_k = self._backbone.config.get_text_config().num_experts_per_tok
        return load_balancing_loss_func(layers, layers[0].shape[-1], top_k, mask)
