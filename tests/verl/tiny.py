"""A tiny model on disk, batches as veRL's driver hands them to workers, and real workers to run them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import tiny_models
import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from flash_attn.integrations import verl as plugin

BASE = {**tiny_models.BASE, "tie_word_embeddings": True}
KINDS: dict[str, dict[str, Any]] = {
    **tiny_models.KINDS,
    "one_key_head": {"model_type": "qwen3", "num_key_value_heads": 1},
    "sinks": {
        "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "longrope": {
        "model_type": "phi3", "head_dim": 8, "max_position_embeddings": 64,
        "original_max_position_embeddings": 26,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
    },
}  # fmt: skip
PLUGIN = "flash_attn.integrations.verl"


def model_path(folder: Path, kind: str = "qwen3") -> str:
    """The folder of a saved model, made on first use with fixed weights."""
    return tiny_models.saved(folder, kind, {**BASE, **KINDS[kind]})


def make_worker(
    path: str,
    attention: str = "dualkv",
    *,
    model: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    actor: dict[str, Any] | None = None,
    lr: float = 1e-2,
) -> TrainingWorker:
    """veRL's worker on FSDP2 and CPU, float32: the plug-in's engine for "dualkv", else veRL's own.

    Keyword arguments change veRL's settings of these names.
    """
    is_plugin = attention == "dualkv"
    model_config = HFModelConfig(
        path=path, load_tokenizer=False, external_lib=PLUGIN if is_plugin else None,
        **{
            "override_config": {"attn_implementation": attention}, "enable_gradient_checkpointing": False,
            **(model or {}),
        },
    )  # fmt: skip
    engine_config = FSDPEngineConfig(
        **{
            "strategy": "fsdp2", "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4,
            "infer_micro_batch_size_per_gpu": 4, "use_torch_compile": False, "dtype": "float32",
            "mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            **(engine or {}),
        }
    )  # fmt: skip
    # Adam divides by |gradient| + epsilon: with 1e-8 a gradient that is 0 but for rounding would move its
    # weight by the whole learning rate, in a random direction.
    optimizer = FSDPOptimizerConfig(
        lr=lr, total_training_steps=10, weight_decay=0.0, override_optimizer_config={"eps": 1e-4}
    )
    config = TrainingWorkerConfig(
        model_type="language_model", model_config=model_config, engine_config=engine_config,
        optimizer_config=optimizer, checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    os.environ.update({} if is_plugin else {"VERL_ENGINE_VENDOR": "none"})
    torch.manual_seed(5)  # LoRA's weights
    try:
        worker = TrainingWorker(config)
    finally:
        os.environ.pop("VERL_ENGINE_VENDOR", None)
    assert isinstance(worker.engine, plugin.SharedPromptEngine) == is_plugin
    worker.reset()
    actor_config = ActorConfig(
        strategy="fsdp2", rollout_n=4, ppo_micro_batch_size_per_gpu=4,
        **{"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, **(actor or {})},
    )  # fmt: skip
    worker.set_loss_fn(partial(ppo_loss, config=actor_config))
    return worker


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    """Rows of different lengths, as veRL keeps them."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def make_batch(
    lens: list[tuple[int, list[int]]], *, seed: int = 0, shuffle: bool = False, temperature: Any = 1.0
) -> TensorDict:
    """Rows of groups (prompt length, response lengths), with all that `ppo_loss` reads but old log-probs."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> torch.Tensor:
        return torch.randint(3, BASE["vocab_size"], (n,), generator=generator)

    pairs = [(prompt, ids(r)) for p, responses in lens for prompt in [ids(p)] for r in responses]
    if shuffle:
        pairs = [pairs[i] for i in torch.randperm(len(pairs), generator=generator).tolist()]
    masks = [(torch.rand(len(r), generator=generator) > 0.1).long() for _, r in pairs]  # tool tokens: 0
    batch = TensorDict(
        {
            "prompts": nested([p for p, _ in pairs]),
            "responses": nested([r for _, r in pairs]),
            "input_ids": nested([torch.cat(pair) for pair in pairs]),
            "position_ids": nested([torch.arange(len(p) + len(r)) for p, r in pairs]),
            "response_mask": nested(masks),
            "loss_mask": nested(masks),
            "advantages": nested(
                [torch.randn((), generator=generator).expand(len(r)).clone() for _, r in pairs]
            ),
        },
        batch_size=[len(pairs)],
    )
    if isinstance(temperature, torch.Tensor):
        batch["temperature"] = temperature
    else:
        tu.assign_non_tensor(batch, temperature=temperature)
    return batch


def response_values(values: torch.Tensor, batch: TensorDict) -> torch.Tensor:
    """Log-probs or entropies of prompt and response as those of the response, as veRL's driver cuts them."""
    from verl.workers.utils.padding import response_from_nested

    return response_from_nested(values, batch["response_mask"])


def log_probs(worker: TrainingWorker, batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """Old or reference log-probs and entropies, nested (B, R); None on processes that return nothing."""
    data = batch.copy()
    tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
    out = worker.infer_batch(data)
    return tuple(response_values(out[name], batch) for name in ("log_probs", "entropy"))


def update(
    worker: TrainingWorker, batch: TensorDict, *, num_mini_batches: int = 2, ranks: int = 1, **settings: Any
) -> dict[str, list[float]]:
    """One actor update: its metrics, a value per mini-batch."""
    data = batch.copy()
    rows = len(batch) * ranks // num_mini_batches
    tu.assign_non_tensor(
        data, **{
            "calculate_entropy": True, "global_batch_size": rows, "mini_batch_size": rows, "epochs": 1,
            "seed": 0, "dataloader_kwargs": {"shuffle": False}, **settings,
        }
    )  # fmt: skip
    out = worker.train_mini_batch(data)
    return None if out is None else tu.get(out, "metrics")


def parameters(worker: TrainingWorker) -> dict[str, torch.Tensor]:
    """Whole parameters, by name."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in worker.engine.module.named_parameters()
    }
