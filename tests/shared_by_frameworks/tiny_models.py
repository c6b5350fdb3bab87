"""For tests/trl and tests/verl: tiny models on disk, with fixed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"attention_dropout": 0.0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    # Linear attention mixes rows: refused.
    "qwen3_next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention",
        "full_attention"],
    },
}  # fmt: skip


def saved(folder: Path, kind: str, values: dict[str, Any], tokenizer: Any = None) -> str:
    """The folder of a saved model of type `kind` (or values["model_type"]), made on first use."""
    path = folder / kind
    if not path.exists():
        values = dict(values)
        config = AutoConfig.for_model(values.pop("model_type", kind), **values)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            AutoModelForCausalLM.from_config(config).save_pretrained(path)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
    return str(path)
