"""A critic of veRL with shared prompts against veRL's own: equal values, loss, gradient and parameters."""

from __future__ import annotations

import pytest
import torch
from compare import LENS, OTHER, assert_same_parameters
from critics import load, make_critic, step
from tiny import make_batch, parameters
from verl.utils import model as verl_models
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker


@pytest.fixture(autouse=True)
def loaded_on_a_cpu(monkeypatch):
    monkeypatch.setattr(verl_models, "load_valuehead_model", load)


def train(worker: TrainingWorker) -> list[torch.Tensor]:
    """Two steps: everything that they return."""
    found = []
    for seed, lens in enumerate((LENS, OTHER)):
        values, metrics = step(worker, make_batch(lens, seed=seed, shuffle=seed == 1), seed=seed)
        found += [values, *(torch.tensor(metrics[name]) for name in ("loss", "grad_norm"))]
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
