"""Shared-prompt attention in transformers models: attention "dualkv", with `dualkv_layout=` as a model kwarg.

    register(); model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="dualkv")
    packed = pack(...); outputs = packed_forward(model, packed)

Also: `log_probs_of_batch` (what a policy loss needs), `require_supported` (before anything runs), `inject`
and `wrap` (for frameworks that drop kwargs or overwrite names). Without a layout "dualkv" is
FlashAttention: training, padding, generation.

Attention dropout is refused. Dropout elsewhere (hidden states, LoRA) draws one mask for a stored prompt,
which its responses share: the same expectation as separate copies, another variance.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from flash_attn.integrations._transformers_attention import dualkv_attention
from flash_attn.integrations._transformers_forward import (
    BatchLogProbs,
    log_probs_of_batch,
    multiplicity_mask,
    packed_forward,
)
from flash_attn.integrations._transformers_hooks import Injection, Wrapping, inject, wrap
from flash_attn.integrations._transformers_masks import dualkv_mask
from flash_attn.integrations._transformers_receipt import Receipt, receipt
from flash_attn.integrations._transformers_support import require_supported, text_backbone

__all__ = [
    "TESTED_VERSIONS", "register", "unregister", "require_supported", "packed_forward", "log_probs_of_batch",
    "BatchLogProbs", "multiplicity_mask",
    "receipt", "Receipt", "inject", "Injection", "wrap", "Wrapping", "text_backbone",
]  # fmt: skip

TESTED_VERSIONS = ("5.10.4", "5.17.0", "5.23.0")
"""Releases of transformers that the test-suite ran on."""


def register(name: str = "dualkv") -> str:
    """Makes `attn_implementation=name` known to transformers, attention and masks. May be called again.

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
