"""Shared-prompt attention in transformers models: register the attention "dualkv", pass `dualkv_layout=` to
the model.

    register(); model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="dualkv")
    packed = pack(...); outputs = packed_forward(model, packed)

Also: `log_probs_of_batch` (what a policy loss needs), `require_supported` (before anything runs), `inject`
and `wrap` (for frameworks that drop kwargs or overwrite names). Without a layout "dualkv" is
FlashAttention: training, padding, generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from flash_attn.integrations._transformers_attention import dualkv_attention
from flash_attn.integrations._transformers_hooks import Injection, Wrapping, inject, wrap
from flash_attn.integrations._transformers_masks import dualkv_mask
from flash_attn.integrations._transformers_receipt import Receipt, receipt
from flash_attn.integrations._transformers_rope import check_rope
from flash_attn.integrations._transformers_support import require_supported, text_backbone, unwrap
from flash_attn.shared_prompt.layout import SharedPromptLayout

__all__ = [
    "TESTED_VERSIONS", "register", "unregister", "require_supported", "packed_forward", "multiplicity_mask",
    "receipt", "Receipt", "inject", "Injection", "wrap", "Wrapping", "text_backbone",
]  # fmt: skip

TESTED_VERSIONS = ("5.23.0",)
"""Releases of transformers that the test-suite ran on."""


class Packed(Protocol):
    """What `packed_forward` reads of a `flash_attn.shared_prompt` pack."""

    @property
    def input_ids(self) -> torch.Tensor: ...

    @property
    def position_ids(self) -> torch.Tensor: ...

    @property
    def layout(self) -> SharedPromptLayout: ...


def register(name: str = "dualkv") -> str:
    """Makes `attn_implementation=name` known to transformers: attention function and mask function. May be
    called again.

    The name must not contain "flash" (transformers would look for a package of that name) nor be taken by
    another function.
    """
    if not isinstance(name, str) or "flash" in name or "|" in name or name in ("", "eager"):
        raise ValueError(f'name must be a new name without "flash" and "|", got {name!r}')
    current = AttentionInterface._global_mapping.get(name, dualkv_attention)
    if current is not dualkv_attention:
        raise ValueError(f"name must be free, but {name!r} is already registered in transformers")
    AttentionInterface.register(name, dualkv_attention)
    AttentionMaskInterface.register(name, dualkv_mask)
    return name


def unregister(name: str = "dualkv") -> None:
    """Takes back `register`; models that still use the name then raise on their next forward."""
    if AttentionInterface._global_mapping.get(name) is dualkv_attention:
        del AttentionInterface._global_mapping[name]
        AttentionMaskInterface._global_mapping.pop(name, None)


def multiplicity_mask(layout: SharedPromptLayout) -> torch.Tensor:
    """(1, T) int64 attention_mask for MoE models: how often each row occurs in the replicated batch.

    transformers weighs the tokens of the auxiliary load-balancing loss by this mask, so that the loss of
    the pack equals that of the replicated batch. Attention itself only asks whether a row is zero.
    """
    return layout.multiplicity.unsqueeze(0)


def packed_forward(model: torch.nn.Module, packed: Packed, **kwargs: Any) -> Any:
    """One forward of a shared-prompt pack, refused before it runs where the model is not supported, and
    checked after it.

    `packed` has input_ids and position_ids (1, T) and a layout, as `flash_attn.shared_prompt.pack` gives
    them. Other arguments go to the model (inputs_embeds replaces input_ids); its outputs come back, e.g.
    logits (1, T, V). Works with the implementation "dualkv" and with wrapped ones. The auxiliary loss of
    MoE models (output_router_logits) is that of the replicated batch. Raises RuntimeError when an attention
    layer did not use the layout.
    """
    require_supported(model)
    layout = packed.layout
    config = unwrap(model).config
    check_rope(config.get_text_config(), layout)
    if kwargs.get("attention_mask") is not None:
        raise ValueError("attention_mask must not be given: the layout describes the pack")
    inputs: dict[str, Any] = (
        {} if kwargs.get("inputs_embeds") is not None else {"input_ids": packed.input_ids}
    )
    inputs.update(position_ids=packed.position_ids, use_cache=False, dualkv_layout=layout)
    router = kwargs.get("output_router_logits")
    if router is None:
        router = getattr(config.get_text_config(), "output_router_logits", False)
    if router:
        inputs.update(attention_mask=multiplicity_mask(layout), dualkv_aux_weighted=True)
    elif not _builds_no_mask(config):
        inputs["attention_mask"] = torch.ones_like(packed.input_ids)
    with receipt(model, layout):
        return model(**{**inputs, **kwargs})


def _builds_no_mask(config: Any) -> bool:
    """Whether the model's mask function is content without an attention_mask; sdpa's would be T x T for
    packed positions."""
    masks: Mapping[str, Any] = AttentionMaskInterface._global_mapping
    return masks.get(config.get_text_config()._attn_implementation) is dualkv_mask
