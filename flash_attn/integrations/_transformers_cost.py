"""Cost model of a transformers model, counted from its parameters and attention shapes."""

from __future__ import annotations

import torch

from flash_attn.integrations._transformers_support import text_backbone
from flash_attn.shared_prompt.cost_model import CostModel


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
