"""Cost models for TRL's trainers: counted from the model's shapes, or measured on the trainer's own passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from flash_attn.integrations.transformers import text_backbone
from flash_attn.shared_prompt.cost_model import CostModel, GroupLens, calibrate


def flop_cost_model(model: torch.nn.Module) -> CostModel:
    """FLOPs of forward and backward from the model's parameters and attention shapes.

    Parameters of all experts count: for mixture-of-experts models tokens weigh too much beside attention,
    which changes the balance of micro-batches but never the verdict, as sharing saves both.
    """
    backbone = text_backbone(model)
    config = backbone.config.get_text_config()
    embeddings = backbone.get_input_embeddings()
    num_embedding = sum(p.numel() for p in embeddings.parameters())
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return CostModel.from_flops(
        num_layer_parameters=sum(p.numel() for p in backbone.parameters()) - num_embedding,
        num_head_parameters=config.vocab_size * config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        windows=layer_windows(config),
    )


def layer_windows(config: object) -> tuple[int | None, ...]:
    """The sliding window of each layer, None for full attention."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if window is None or (layer_types is None and not getattr(config, "use_sliding_window", True)):
        return (None,)
    if layer_types is None:
        return (window,)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def calibrate_passes(trainer: Any, max_tokens: int, max_seconds: float) -> CostModel:
    """`calibrate` on a trainer's own shared and replicated log-prob passes, forward and backward."""
    from flash_attn.integrations._trl_batch import HostRows, SharedStep
    from flash_attn.integrations._trl_policy import SharedPromptMixin, _Pass

    model, device = trainer.model, trainer.accelerator.device
    config = text_backbone(model).config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    parent = super(SharedPromptMixin, trainer)

    def run(groups: Sequence[GroupLens], shared: bool) -> None:
        prompt_width = max(g.prompt_len for g in groups)
        width = prompt_width + max(max(g.response_lens) for g in groups)
        ids, mask = [], []
        for group in groups:
            prompt = torch.randint(config.vocab_size, (prompt_width,), generator=generator)
            for response_len in group.response_lens:
                response = torch.randint(config.vocab_size, (width - prompt_width,), generator=generator)
                column = torch.arange(width)
                ids.append(torch.cat([prompt, response]))
                mask.append((column >= prompt_width - group.prompt_len) & (column < prompt_width + response_len))
        input_ids, attention_mask = torch.stack(ids).to(device), torch.stack(mask).long().to(device)
        call = _Pass(model, input_ids, attention_mask, width - prompt_width, None, True, False)
        if shared:
            host = HostRows.of(input_ids, attention_mask, width - prompt_width)
            step = SharedStep.of(
                host, max_tokens=input_ids.numel(), batch_size=len(ids), cost_model=trainer._cost_model
            )
            log_probs = trainer._shared_pass(call, step, len(step.packs))[0]
        else:
            log_probs = parent._get_per_token_logps_and_entropies(*call)[0]
        log_probs.sum().backward()
        model.zero_grad(set_to_none=True)

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        model.train()
        found = calibrate(
            run, max_tokens=max_tokens, max_seconds=max_seconds, device=device, windows=layer_windows(config)
        )
    return CostModel.from_dict(broadcast_object_list([found.as_dict()])[0])
