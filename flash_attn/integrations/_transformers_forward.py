"""Running a transformers model on a shared-prompt pack: its outputs, or the log-probs that a policy loss
needs.

The layout goes down as the kwarg `dualkv_layout`; the receipt proves that every attention layer used it.
Log-probs come from the backbone's hidden states and the LM head in tiles, so logits of the whole pack never
exist.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, NamedTuple

import torch

from flash_attn.integrations._transformers_receipt import receipt
from flash_attn.integrations._transformers_rope import check_rope
from flash_attn.integrations._transformers_support import require_supported, text_backbone, unwrap
from flash_attn.shared_prompt import PackedBatch, SharedPromptLayout, log_probs, ulysses


def multiplicity_mask(layout: SharedPromptLayout) -> torch.Tensor:
    """(1, T) int64 attention_mask for MoE models: how often each row occurs in the replicated batch.

    transformers weighs the tokens of the auxiliary load-balancing loss by this mask, so that the loss of
    the pack equals that of the replicated batch. Attention itself only asks whether a row is zero.
    """
    return layout.multiplicity.unsqueeze(0)


def packed_forward(model: torch.nn.Module, packed: PackedBatch | ulysses.ShardedBatch, **kwargs: Any) -> Any:
    """One forward of a shared-prompt pack, refused before it runs where the model is not supported, and
    checked after it.

    `packed` has input_ids and position_ids (1, T) and a layout, as `flash_attn.shared_prompt.pack` gives
    them. Other arguments go to the model (inputs_embeds replaces input_ids); its outputs come back, e.g.
    logits (1, T, V). Works with the implementation "dualkv" and with wrapped ones. The auxiliary loss of
    MoE models (output_router_logits) is that of the replicated batch. Raises RuntimeError when an attention
    layer did not use the layout, TypeError and ValueError for a `packed` that is none or empty. A
    `ShardedBatch` (`ulysses.shard`) runs this rank's rows: call it on every rank of the group.
    """
    _check_packed(packed)
    require_supported(model)
    layout = packed.layout
    config = unwrap(model).config
    check_rope(config.get_text_config(), layout)
    if kwargs.get("attention_mask") is not None:
        raise ValueError("attention_mask must not be given: the layout describes the pack")
    if kwargs.get("labels") is not None and layout.sp_group is not None:
        raise ValueError(
            "labels must not be given with a ShardedBatch: the model's loss would average over this rank's "
            "labels; use log_probs_of_batch"
        )
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise ValueError(
            "labels must come with shift_labels=packed.shift_labels: a model that shifts them itself would "
            "let the last row of a segment predict the first token of the next, got labels alone"
        )
    inputs: dict[str, Any] = (
        {} if kwargs.get("inputs_embeds") is not None else {"input_ids": packed.input_ids}
    )
    inputs.update(position_ids=packed.position_ids, use_cache=False, dualkv_layout=layout)
    router = kwargs.get("output_router_logits")
    if router is None:
        router = getattr(config.get_text_config(), "output_router_logits", False)
    if router:
        inputs.update(attention_mask=multiplicity_mask(layout), dualkv_aux_weighted=True)
    with receipt(model, layout):
        return model(**{**inputs, **kwargs})


def _check_packed(packed: Any) -> None:
    if not isinstance(packed, (PackedBatch, ulysses.ShardedBatch)):
        raise TypeError(
            f"packed must be a PackedBatch (flash_attn.shared_prompt.pack), got {type(packed).__name__}"
        )
    if not packed.input_ids.numel():
        raise ValueError(f"packed must have at least one token, got input_ids {list(packed.input_ids.shape)}")


class BatchLogProbs(NamedTuple):
    """(n,) per response token in the order of `packed.labels`; `aux_loss` is a scalar, or None for models
    without one."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    aux_loss: torch.Tensor | None


def log_probs_of_batch(
    model: torch.nn.Module,
    packed: PackedBatch | ulysses.ShardedBatch,
    *,
    temperature: float | torch.Tensor = 1.0,
    compute_entropy: bool = True,
    **kwargs: Any,
) -> BatchLogProbs:
    """Log-probability and entropy of every response token (first ones included) under a causal language
    model.

    `flash_attn.shared_prompt.unpack_responses` brings them into the caller's rows. Tokens outside the
    pack's loss mask give 0. `kwargs` go to the model. Tied, biased, scaled and softcapped LM heads are
    handled; the first call on a model compares one row with the model's own logits, and raises
    NotImplementedError where they differ or the head is not a plain linear.

    Of a `ShardedBatch` every rank gets all log-probs, in the order of `packed.packed.labels`; gradients of
    the parameters are then this rank's parts of a sum over the group.
    """
    _check_packed(packed)
    if "logits_to_keep" in kwargs:
        raise ValueError(
            "logits_to_keep must not be given: log_probs_of_batch returns the log-probs of every response "
            f"token and keeps no logits, got {kwargs['logits_to_keep']!r}"
        )
    hidden: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
        hidden.append(output[0])

    head = _Head.of(model)
    hook = text_backbone(model).register_forward_hook(keep)
    try:
        # A tensor, because models may cut their last layers to an integer's rows; one row, to compare.
        first_row = torch.zeros(1, dtype=torch.int64, device=packed.input_ids.device)
        outputs = packed_forward(model, packed, logits_to_keep=first_row, **kwargs)
    finally:
        hook.remove()
    if unwrap(model) not in _compared:
        head.compare(hidden[0], outputs.logits)
        _compared.add(unwrap(model))
    compute: Any = ulysses.log_probs if isinstance(packed, ulysses.ShardedBatch) else log_probs
    found = compute(
        head.scaled(hidden[0]), packed, head.weight, head.bias, temperature=temperature, softcap=head.softcap,
        compute_entropy=compute_entropy,
    )  # fmt: skip
    return BatchLogProbs(found.log_probs, found.entropy, getattr(outputs, "aux_loss", None))


_compared: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class _Head(NamedTuple):
    """logits = softcap(scale * hidden W^T + b)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, model: torch.nn.Module) -> _Head:
        base: Any = unwrap(model)
        linear = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
        if not isinstance(linear, torch.nn.Linear) or hasattr(linear, "base_layer"):
            raise NotImplementedError(
                f"the LM head must be a plain torch.nn.Linear, got {type(linear).__name__}: "
                "use packed_forward and the model's logits"
            )
        if hasattr(linear.weight, "full_tensor"):
            raise NotImplementedError(
                "the LM head is sharded (DTensor), log_probs_of_batch needs a whole one: use packed_forward"
            )
        if "logits_to_keep" not in inspect.signature(base.forward).parameters:
            raise NotImplementedError(f"{type(base).__name__}.forward does not take logits_to_keep")
        config = base.config.get_text_config()
        multiply, divide, also = (
            getattr(config, name, None) or 1.0
            for name in ("logit_scale", "logits_scaling", "lm_head_multiplier")
        )
        scale = multiply * also / divide
        return cls(linear.weight, linear.bias, scale, getattr(config, "final_logit_softcapping", None))

    def scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.scale == 1.0 else hidden * self.scale

    def compare(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Raises unless this head gives the model's own logits of the pack's first row."""
        with torch.no_grad():
            row = self.scaled(hidden[0, :1].to(self.weight.dtype))
            own = torch.nn.functional.linear(row, self.weight, self.bias).double()
            if self.softcap is not None:
                own = self.softcap * torch.tanh(own / self.softcap)
            model_logits = logits[0, :1].double()
            difference = float((own - model_logits).abs().max() / model_logits.abs().max())
        dtypes = {torch.float32, logits.dtype, hidden.dtype, self.weight.dtype}
        if torch.is_autocast_enabled(hidden.device.type):
            dtypes.add(torch.get_autocast_dtype(hidden.device.type))
        if not difference <= 16 * max(torch.finfo(dtype).eps for dtype in dtypes):
            raise NotImplementedError(
                f"the LM head does more than a linear layer, scale {self.scale} and softcap {self.softcap}: "
                f"logits differ by {difference:.1e}; use packed_forward and the model's logits"
            )
