"""Configurations with the shapes of known models, filled with random weights: what a run costs, not what it
says.

Sizes are those of the published models: hidden and intermediate size, layers, heads, vocabulary.
"""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "qwen3-8b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "tie_word_embeddings": False,
    },
    # Five layers with a window of 1024 and head dim 256 for each full one with head dim 512 and 4 key heads.
    "gemma-4-31b": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
        "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
        "sliding_window": 1024, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262144,
    },
    "tiny-llama": {
        "model_type": "llama", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    },
    "tiny-gemma-4": {
        "model_type": "gemma4_text", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
        "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "sliding_window": 16, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0,
    },
}  # fmt: skip


def config_of(name: str, num_layers: int | None, max_length: int) -> Any:
    """The transformers configuration of one shape, with fewer layers where asked for."""
    from transformers import AutoConfig

    values = dict(SHAPES[name])
    if num_layers is not None:
        values["num_hidden_layers"] = num_layers
    values["max_position_embeddings"] = max(values.get("max_position_embeddings", 0), max_length)
    return AutoConfig.for_model(values.pop("model_type"), pad_token_id=0, **values)
