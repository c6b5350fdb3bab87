"""May this model run on shared-prompt packs? Decided before any forward, from its layer types and its
modules.

A pack is right only if rows mix in attention and nowhere else, and if every layer asks the attention
interface. The list of allowed layer types is closed: what is not known to be right is refused by name.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import weakref
from typing import Any

import torch

from flash_attn.integrations._transformers_passing import lost_argument
from flash_attn.integrations._transformers_rope import length_dependent_rope

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Older spellings of layer_types, and attributes by which configurations without layer_types say that layers
# mix rows otherwise: recurrences, convolutions, chunks, biases by distance.
_LAYER_TYPE_NAMES = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
_OTHER_MIXING = (
    "attention_chunk_size", "conv_L_cache", "conv_kernel", "ssm_cfg", "state_size", "mamba_d_state",
    "linear_conv_kernel_dim", "attn_layer_period", "alibi", "use_logn_attn", "use_dynamic_ntk",
    "reorder_and_upcast_attn", "index_topk",
)  # fmt: skip
_OTHER_MIXING_CLASSES = re.compile(
    r"Mamba|SSM|ShortConv|GatedDelta|LinearAttention|LightningAttention|Rwkv|RWKV|Retention|Recurrent|Indexer|[ms]LSTM"
)
_DROPOUT_NAMES = (
    "attention_dropout",
    "attn_pdrop",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attention_dropout_prob",
)
_checked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def unwrap(model: Any) -> Any:
    """The transformers model inside DDP, DeepSpeed, torch.compile and PEFT wrappers."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif (
            isinstance(model, torch.nn.parallel.DistributedDataParallel)
            or hasattr(model, "_fsdp_wrapped_module")
            or hasattr(type(model), "zero_optimization_stage")
        ):
            model = model.module
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def text_backbone(model: torch.nn.Module) -> Any:
    """The module that turns token ids into hidden states, without the LM head."""
    base = unwrap(model)
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    return unwrap(decoder if decoder is not None else getattr(base, "base_model", base))


_attention_names: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()


def attention_modules(backbone: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """(name, module) of the modules whose forward asks the attention interface, in order."""
    return [(name, module) for name, module in backbone.named_modules() if _asks_interface(type(module))]


def remembered_attention_modules(backbone: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """`attention_modules` without a walk over all modules, where those found before still stand there."""
    found = []
    try:
        for name in _attention_names.get(backbone, ()):
            module: Any = backbone
            for part in name.split("."):
                module = module._modules[part]
            found.append((name, module))
    except KeyError:
        found = []
    if not found or not all(_asks_interface(type(module)) for _, module in found):
        found = attention_modules(backbone)
        _attention_names[backbone] = tuple(name for name, _ in found)
    return found


def _asks_interface(cls: Any) -> bool:
    return _asks(cls, cls.forward)  # which other packages replace


@functools.cache
def _asks(cls: Any, forward: Any) -> bool:
    if not any("Attention" in base.__name__ or "Attn" in base.__name__ for base in cls.__mro__):
        return False
    try:
        return "attention_interface(" in inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return False


def require_supported(config_or_model: Any, *, training: bool | None = None) -> None:
    """Raises NotImplementedError, naming the reason, unless the model gives right results on shared-prompt
    packs.

    Takes a transformers model, bare or wrapped, or a configuration (of which an empty model is then built,
    without memory for weights). `training` (default: the model's own mode; True for a configuration)
    refuses attention dropout above 0. Rotary embeddings that depend on length (dynamic, LongRoPE) pass here
    and are checked with each pack's lengths.
    """
    if isinstance(config_or_model, torch.nn.Module):
        model = unwrap(config_or_model)
        config = getattr(model, "config", None)
        training = config_or_model.training if training is None else training
    else:
        model, config = None, config_or_model
        training = True if training is None else training
    if config is None or not hasattr(config, "get_text_config"):
        raise TypeError(
            f"config_or_model must be a transformers model or config, got {type(config_or_model).__name__}"
        )
    if training:
        _refuse_dropout(config)
        if model is not None:
            _refuse_lost_gradients(model)
    if model is not None and model in _checked:
        return
    _check_config(config)
    if model is None:
        model = _skeleton(config)
        _check_modules(model)
    else:
        _check_modules(model)
        _checked.add(model)


def _refuse_dropout(config: Any) -> None:
    text = config.get_text_config()
    for name in _DROPOUT_NAMES:
        if getattr(text, name, 0.0):
            raise NotImplementedError(
                f"{name}={getattr(text, name)}: attention dropout is not supported in training, set it to 0"
            )


def _refuse_lost_gradients(model: Any) -> None:
    """Layers that reuse the keys of an earlier one (Gemma-4) get them without history from reentrant
    checkpointing."""
    if not getattr(model.config.get_text_config(), "num_kv_shared_layers", 0):
        return
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        is_reentrant = getattr(function, "keywords", {}).get("use_reentrant")
        if getattr(module, "gradient_checkpointing", False) and is_reentrant:
            raise NotImplementedError(
                f"{type(model).__name__}: reentrant gradient checkpointing loses gradients of shared keys "
                "and values (with any attention), use use_reentrant=False"
            )


def _check_config(config: Any) -> None:
    kind = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"{kind}: encoder-decoder models are not supported")
    text = config.get_text_config()
    bidirectional = getattr(text, "use_bidirectional_attention", None) not in (None, False, "vision")
    if getattr(text, "is_causal", True) is False or bidirectional:
        raise NotImplementedError(f"{kind}: only causal attention is supported on shared-prompt packs")
    for name in _LAYER_TYPE_NAMES:
        layer_types = getattr(text, name, None)
        unknown = sorted(set(layer_types or ()) - SUPPORTED_LAYER_TYPES)
        if unknown:
            raise NotImplementedError(
                f"{kind}: layer type {unknown[0]!r} is not supported on shared-prompt packs, only "
                + " and ".join(sorted(SUPPORTED_LAYER_TYPES))
            )
    for name in _OTHER_MIXING:
        if getattr(text, name, None) and not (
            name == "attention_chunk_size" and getattr(text, "layer_types", None)
        ):
            raise NotImplementedError(
                f"{kind}: {name}={getattr(text, name)!r} is not supported: rows would mix outside attention"
            )
    if not getattr(text, "num_attention_heads", 0):
        raise NotImplementedError(f"{kind}: has no attention heads")
    length_dependent_rope(text)


def _skeleton(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def _check_modules(model: Any) -> None:
    backbone = text_backbone(model)
    kind = type(model).__name__
    for name, module in backbone.named_modules():
        other = next(
            (c.__name__ for c in type(module).__mro__ if _OTHER_MIXING_CLASSES.search(c.__name__)), None
        )
        if other or isinstance(module, (torch.nn.Conv1d, torch.nn.RNNBase)):
            raise NotImplementedError(
                f"{kind}: module {name} ({other or type(module).__name__}) mixes rows outside attention"
            )
    attention = attention_modules(backbone)
    for name, module in attention:
        if not getattr(module, "is_causal", True):
            raise NotImplementedError(f"{kind}: only causal attention is supported, {name} is not causal")
    num_attention = len(attention)
    num_layers = model.config.get_text_config().num_hidden_layers
    if num_attention != num_layers:
        raise NotImplementedError(
            f"{kind}: {num_layers} layers, but {num_attention} modules that use the attention interface"
        )
    for name, _ in attention:
        reason = lost_argument(backbone, name)
        if reason is not None:
            raise NotImplementedError(f"{kind}: {reason}")
