"""A critic of veRL with shared prompts against veRL's own: equal values, loss, gradient and parameters."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from compare import LENS, OTHER, assert_same_parameters
from tiny import PLUGIN, make_batch, model_path, nested, parameters, response_values, update
from transformers import AutoModelForTokenClassification
from verl.trainer.config import CheckpointConfig
from verl.utils import model as verl_models
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


@pytest.fixture(autouse=True)
def loaded_on_a_cpu(monkeypatch):
    """veRL loads critics with flash_attention_2, which transformers refuses without a GPU."""

    def load(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
        torch.manual_seed(7)  # the value head's weights
        return AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
        )

    monkeypatch.setattr(verl_models, "load_valuehead_model", load)


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


def train(worker: TrainingWorker) -> list[torch.Tensor]:
    """Two steps: values of the responses, then an update; everything that it reads and returns."""
    found = []
    for step, lens in enumerate((LENS, OTHER)):
        batch = make_batch(lens, seed=step, shuffle=step == 1)
        data = batch.copy()
        tu.assign_non_tensor(data, compute_loss=False)
        batch["values"] = response_values(worker.infer_batch(data)["values"], batch)
        generator = torch.Generator().manual_seed(step)
        batch["returns"] = nested([torch.randn(len(r), generator=generator) for r in batch["responses"]])
        metrics = update(worker, batch)
        found += [batch["values"].values(), *(torch.tensor(metrics[name]) for name in ("loss", "grad_norm"))]
        assert metrics.get("shared_prompt/fallbacks", [0.0, 0.0]) == [0.0, 0.0]
    return found


DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 86, "infer_max_token_len_per_gpu": 86}


@pytest.mark.parametrize("engine", [{}, DYNAMIC, {"pad_to_length": True, "pad_to_length_bucket": 32}])
def test_critics_equal_those_of_the_plain_engine(engine, folder):
    workers = [make_critic(folder, "sdpa", "none"), make_critic(folder, "dualkv", **engine)]
    plain, shared = map(train, workers)
    for a, b in zip(plain, shared, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    assert_same_parameters(*map(parameters, workers))
    assert all(float(norm.min()) > 1e-2 for norm in plain[2::3]), "nothing was trained"
    account = workers[1].engine.sharing
    assert account.num_shared_passes == 6 and not account.fallbacks
    assert account.num_packed_tokens < 0.7 * account.num_replicated_tokens


def test_critics_without_the_attention_are_verls(folder):
    """The module is loaded for the actor; a critic whose model does not ask for it runs as before."""
    worker = make_critic(folder, "sdpa")
    batch = make_batch(LENS)
    tu.assign_non_tensor(batch, compute_loss=False)
    assert "shared_prompt/fallbacks" not in worker.infer_batch(batch).keys()  # noqa: SIM118
