"""Real critics of veRL, both engines, and what they do in a step."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from tiny import PLUGIN, model_path, nested, response_values, update
from transformers import AutoModelForTokenClassification
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    CriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import value_loss

from flash_attn.integrations import verl as plugin


def load(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    """In place of veRL's `load_valuehead_model`, which asks for flash_attention_2: transformers refuses that
    without a GPU."""
    torch.manual_seed(7)  # the value head's weights
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
    )


def make_critic(folder: Any, attention: str, vendor: str | None = None, **engine: Any) -> TrainingWorker:
    """veRL's worker with a value head: the plug-in's engine, or of vendor "none", which is veRL's own."""
    shares = attention == "dualkv"
    config = TrainingWorkerConfig(
        model_type="value_model",
        model_config=HFModelConfig(
            path=model_path(folder), load_tokenizer=False, external_lib=PLUGIN if shares else None,
            override_config={"attn_implementation": attention}, enable_gradient_checkpointing=True,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", use_torch_compile=False, dtype="float32",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            **{
                "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4, "infer_micro_batch_size_per_gpu": 4,
                **engine,
            },
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-2, total_training_steps=10, weight_decay=0.0, override_optimizer_config={"eps": 1e-4}
        ),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    os.environ.update({"VERL_ENGINE_VENDOR": vendor} if vendor else {})
    try:
        worker = TrainingWorker(config)
    finally:
        os.environ.pop("VERL_ENGINE_VENDOR", None)
    assert isinstance(worker.engine, plugin.SharedPromptCritic) == (vendor is None)
    worker.reset()
    critic = CriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=4)
    worker.set_loss_fn(partial(value_loss, config=critic))
    return worker


def step(
    worker: TrainingWorker, batch: TensorDict, *, ranks: int = 1, seed: int = 0
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Values of the responses, then an update towards random returns: the values, and its metrics."""
    data = batch.copy()
    tu.assign_non_tensor(data, compute_loss=False)
    out = worker.infer_batch(data)
    generator = torch.Generator().manual_seed(seed)
    batch["returns"] = nested([torch.randn(len(r), generator=generator) for r in batch["responses"]])
    # What the loss clips by: not the values found, which not every process of sequence parallelism gets.
    batch["values"] = nested([r / 2 for r in batch["returns"].unbind()])
    metrics = update(worker, batch, ranks=ranks)
    return (None if out is None else response_values(out["values"], batch).values()), metrics
