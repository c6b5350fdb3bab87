"""What a veRL run must be set to for the plug-in to take effect, and what in its data cannot be shared.

A setting under which the plug-in would never do anything raises before any training. Data that it cannot
share (images, distillation, ...) goes to the parent engine, with the reason logged once and counted.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.model import extract_multi_modal_inputs

from flash_attn.integrations._sharing import IMPLEMENTATION, Account
from flash_attn.integrations.transformers import require_supported

MODULE = "flash_attn.integrations.verl"
logger = logging.getLogger(MODULE)


def names_plugin(external_lib: Any) -> bool:
    """Whether `model.external_lib` (a name, a list of names or None) names this plug-in."""
    return MODULE in ([external_lib] if isinstance(external_lib, str) else list(external_lib or ()))


def wants_sharing(model_config: Any, engine_config: Any) -> bool:
    """Whether this engine shall share prompts. Raises ValueError where the settings contradict each other."""
    attention = model_config.hf_config._attn_implementation
    if attention != IMPLEMENTATION:
        if names_plugin(model_config.external_lib):
            raise ValueError(
                f"model.external_lib={MODULE} must come with "
                f"model.override_config.attn_implementation={IMPLEMENTATION}, got {attention!r}: "
                "the plug-in would have no effect"
            )
        return False
    if not model_config.use_remove_padding:
        raise ValueError(
            "model.use_remove_padding must be True for shared prompts, got False: rows would be padded"
        )
    if getattr(engine_config, "strategy", None) not in ("fsdp", "fsdp2"):
        raise ValueError(
            f"actor.strategy must be fsdp or fsdp2 for shared prompts, got {engine_config.strategy!r}"
        )
    return True


def check_model(module: torch.nn.Module, *, training: bool) -> None:
    """Raises NotImplementedError with the reason where the model gives wrong results on packs."""
    try:
        require_supported(module, training=training)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{MODULE} is configured, but this model cannot share prompts: {error}. "
            "Leave out model.external_lib and attn_implementation to train it as before"
        ) from None


def refusal(data: TensorDict) -> str | None:
    """Why this batch cannot run on packs; None where it can."""

    def flag(name: str) -> bool:
        return bool(tu.get_non_tensor_data(data=data, key=name, default=False))

    if extract_multi_modal_inputs(data.get("multi_modal_inputs", [])):
        return "multimodal inputs"
    for name in ("distillation_use_topk", "distillation_only"):
        if flag(name):
            return f"distillation ({name})"
    if "routed_experts" in data or flag("enable_routing_replay"):
        return "replay of routed experts"
    if not tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True):
        return "use_remove_padding=False"
    for name in ("input_ids", "position_ids", "prompts", "responses"):
        value = data.get(name, None)
        if not isinstance(value, torch.Tensor) or not value.is_nested:
            return f"{name} is not a nested tensor of rows"
    if data["position_ids"].dim() != 2:
        return "position ids of several dimensions (multimodal)"
    prompt_lens, response_lens, lens = (
        data[name].offsets().diff().cpu() for name in ("prompts", "responses", "input_ids")
    )
    if not torch.equal(prompt_lens + response_lens, lens):
        return "input_ids are not each row's prompt and response"
    if len(prompt_lens) and int(prompt_lens.min()) == 0:
        return "a row has an empty prompt"
    return None


class EngineAccount(Account):
    """Counts of one engine's mini-batches and log-prob passes."""

    def _tell(self, text: str) -> None:
        logger.warning(text)
