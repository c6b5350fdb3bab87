"""Which trainers, models and settings may run on packs, and the models' attention set to "dualkv"."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import trl

from flash_attn.integrations._sharing import IMPLEMENTATION
from flash_attn.integrations._transformers_support import unwrap
from flash_attn.integrations._trl_settings import SharedPromptSettings
from flash_attn.integrations.transformers import require_supported

LOG_PROBS = "_get_per_token_logps_and_entropies"
_ARGUMENTS = (
    "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
    "compute_aux_loss",
)  # fmt: skip


def check_trainer(trainer_class: type, mixin: type) -> None:
    """Raises RuntimeError unless the trainer behind `mixin` has the method that it overrides: in a TRL that
    computes log-probs otherwise nothing would be shared, and nobody would notice. Overrides that pass their
    arguments on, as `(self, *args, **kwargs)`, say nothing about TRL: the method behind them counts."""
    order = trainer_class.__mro__
    behind = order[order.index(mixin) + 1 :]
    methods = [inspect.signature(vars(cls)[LOG_PROBS]) for cls in behind if LOG_PROBS in vars(cls)]
    arguments = next((tuple(m.parameters) for m in methods if not _passes_on(m)), ())
    if arguments[: len(_ARGUMENTS)] != _ARGUMENTS:
        found = f"{LOG_PROBS}({', '.join(arguments)})" if arguments else f"no {LOG_PROBS}"
        raise RuntimeError(
            f"{trainer_class.__name__} needs a trainer like that of trl 1.16, with "
            f"{LOG_PROBS}({', '.join(_ARGUMENTS)}, ...); trl {trl.__version__} has {found}"
        )


def _passes_on(signature: inspect.Signature) -> bool:
    """Whether a method names some first arguments of TRL's, or none, and takes all others by **kwargs."""
    kinds = {p.kind for p in signature.parameters.values()}
    named = tuple(n for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD)
    return (
        inspect.Parameter.VAR_KEYWORD in kinds
        and inspect.Parameter.KEYWORD_ONLY not in kinds
        and len(named) < len(_ARGUMENTS)
        and named == _ARGUMENTS[: len(named)]
    )


def check_fused_forward(forward: Any, trainer: str) -> None:
    """Raises RuntimeError unless a model's forward is TRL's, which takes `fused_lm_head`, or wraps it."""
    wrapped = forward
    while wrapped is not None:  # accelerate's mixed precision stands around TRL's forward
        if "fused_lm_head" in inspect.signature(wrapped, follow_wrapped=False).parameters:
            return
        wrapped = getattr(wrapped, "__wrapped__", None)
    raise RuntimeError(
        f"{trainer} needs models like those of trl 1.16, whose trainer gives their forward an argument "
        f"fused_lm_head; that of trl {trl.__version__} does not"
    )


def trainer_refusal(trainer: Any, models: list[torch.nn.Module]) -> str | None:
    """Why this trainer cannot run on packs; None where it can."""
    if getattr(trainer, "_is_vlm", False):
        return "vision-language models take multimodal inputs"
    if getattr(trainer.args, "use_transformers_continuous_batching", False):
        return "use_transformers_continuous_batching generates with a paged attention of its own"
    if getattr(trainer.args, "torch_compile", False):
        return "torch_compile: every pack would be compiled anew, and compiled layers cannot be counted"
    return next((reason for reason in map(refusal, models) if reason is not None), None)


def refusal(model: torch.nn.Module) -> str | None:
    """Why this model cannot run on packs; None where it can."""
    peft_config = getattr(model, "active_peft_config", None)
    if getattr(peft_config, "is_prompt_learning", False):
        return f"{type(peft_config).__name__} adds virtual tokens in front of each row"
    try:
        require_supported(model, training=True)
    except NotImplementedError as error:
        return str(error)
    return None


def use_dualkv(model: torch.nn.Module) -> None:
    """Sets the model's attention to "dualkv" unless it is."""
    base: Any = unwrap(model)
    if base.config.get_text_config()._attn_implementation != IMPLEMENTATION:
        base.set_attn_implementation(IMPLEMENTATION)


def check_settings(settings: SharedPromptSettings, args: Any, num_processes: int) -> None:
    """Raises ValueError for settings that would fail in the middle of training."""
    checkpointing = getattr(args, "gradient_checkpointing_kwargs", None) or {}
    reentrant = args.gradient_checkpointing and checkpointing.get("use_reentrant", False)
    if settings.max_packed_tokens is not None and num_processes > 1 and reentrant:
        raise ValueError(
            f"max_packed_tokens={settings.max_packed_tokens} with {num_processes} processes must come with "
            'gradient_checkpointing_kwargs={"use_reentrant": False}: '
            "DDP takes one reentrant forward per backward"
        )
