"""Real GRPO and RLOO trainers with shared prompts against their parents: six optimizer steps, everything
equal.

Both sides generate, score, shuffle and step for themselves; the parent only gets the same group shuffle.
"""

from __future__ import annotations

import copy

import pytest
import torch
from compare import METRICS, TRAINERS, assert_same_logs, assert_shared, run
from peft import LoraConfig
from trl import GRPOTrainer
from two_processes import parameter_error

MOE = {"kind": "qwen3_moe", "router_aux_loss_coef": 0.1}
ENTROPY = {"top_entropy_quantile": 0.5, "entropy_coef": 0.01}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
NON_REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


def lora():
    return {"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])}


# What differs from the base: 8 rows a step in two micro-batches of one group of 4, KL 0.05, temperature 0.9.
CASES = {
    "grpo": ("grpo", {"loss_type": "grpo"}),
    "dapo": (
        "grpo",
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0, "mask_truncated_completions": True},
    ),
    "dr_grpo": ("grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "bnpo": ("grpo", {"loss_type": "bnpo", **REENTRANT}),
    "cispo": ("grpo", {"loss_type": "cispo", "epsilon_high": 5.0}),
    "sequence-level": ("grpo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "rloo": ("rloo", {}),
    "rloo-iterations": ("rloo", {"num_iterations": 2, "steps_per_generation": 4, **NON_REENTRANT}),
    # Old log-probs from an earlier policy; each generation batch serves several optimizer steps.
    "iterations": ("grpo", {"num_iterations": 2}),
    "steps-per-generation": ("grpo", {"steps_per_generation": 4}),
    "two-groups": ("grpo", {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}),
    "partial-groups": ("grpo", {"num_generations": 8}),
    "cut-groups": ("grpo", {"per_device_train_batch_size": 6, "num_generations": 4}),
    "entropy": ("grpo", ENTROPY),
    "temperature": ("grpo", {"temperature": 0.3, "cast_lm_head_to_fp32": True}),
    "reentrant": ("grpo", REENTRANT),
    "non-reentrant": ("grpo", NON_REENTRANT),
    "peft": ("grpo", {"options": lora}),
    "peft-reentrant": ("grpo", {"options": lora, **REENTRANT}),
    "moe": ("grpo", MOE),
    "micro-batches": ("grpo", {"per_device_train_batch_size": 8, "shared_prompt": {"max_packed_tokens": 40}}),
    "moe-micro-batches": (
        "grpo",
        {**MOE, "per_device_train_batch_size": 8, "shared_prompt": {"max_packed_tokens": 40}},
    ),
    "dualkv": ("grpo", {"kind": "llama", "model_init_kwargs": {"attn_implementation": "dualkv"}}),
    "padded-to-8": ("grpo", {"pad_to_multiple_of": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_parents(case, folder, monkeypatch):
    family, changes = CASES[case]
    if "top_entropy_quantile" in changes:
        # First tokens of one group tie in entropy. Rounding would decide on which side of a threshold at
        # their value they fall, so both sides choose by entropies that tie exactly.
        choose = GRPOTrainer.get_high_entropy_mask
        monkeypatch.setattr(
            GRPOTrainer,
            "get_high_entropy_mask",
            lambda self, entropies, mask, threshold: choose(
                self, entropies.round(decimals=3), mask, threshold
            ),
        )
    _, parent_logs, parent_weights = run("parent", family, folder, **copy.deepcopy(changes))
    trainer, shared_logs, shared_weights = run("shared", family, folder, **copy.deepcopy(changes))
    assert len(shared_logs) == 6
    assert_shared(trainer, shared_logs)
    assert_same_logs(parent_logs, shared_logs)
    error = parameter_error(parent_weights, shared_weights)
    assert error <= 1e-4
    worst = max(
        abs(a[m] - b[m]) / max(1, abs(a[m]))
        for a, b in zip(parent_logs, shared_logs, strict=True)
        for m in METRICS
        if m in a
    )
    tokens = f"{trainer.sharing.num_packed_tokens} of {trainer.sharing.num_replicated_tokens}"
    print(f"{case}: metrics {worst:.1e}, parameters {error:.1e}, tokens {tokens}")
    if "router_aux_loss_coef" in changes:
        assert all("aux_loss" in entry and entry["aux_loss"] > 0 for entry in shared_logs)
    if "shared_prompt" in changes:
        assert trainer.sharing.num_forwards > trainer.sharing.num_shared_passes


def test_every_pass_of_a_step_is_shared(folder):
    """The override is called for policy, reference and old log-probs: counted, so that it cannot be
    bypassed."""
    trainer, _, _ = run("shared", "grpo", folder, num_iterations=2, max_steps=2)
    # Two optimizer steps of two micro-batches on one generation: four policy passes, one old, one reference.
    assert trainer.sharing.num_shared_passes == 4 + 2
    trainer, logs, _ = run("parent", "grpo", folder, max_steps=1)
    assert not any(name.startswith("shared_prompt/") for name in logs[0])


@pytest.mark.parametrize("family", ["grpo", "rloo"])
def test_bf16_passes_are_shared_and_near_the_parents(family, folder):
    """accelerate's autocast stands around the forwards of policy and reference model."""
    trainer, logs, _ = run("shared", family, folder, bf16=True, max_steps=1)
    assert_shared(trainer, logs)
    parent = TRAINERS[family][0]
    ids = torch.randint(3, 60, (4, 15), generator=torch.Generator().manual_seed(0))
    ids[:, :10] = ids[0, :10]
    num_passes = trainer.sharing.num_shared_passes
    for model in (trainer.model, trainer.ref_model):
        call = (model, ids, torch.ones_like(ids), 5)
        ours, theirs = (
            cls._get_per_token_logps_and_entropies(trainer, *call)[0] for cls in (type(trainer), parent)
        )
        assert ours.dtype == theirs.dtype == torch.float32
        eps = torch.finfo(torch.bfloat16).eps
        assert (ours - theirs).abs().max() <= 4 * eps * theirs.abs().max()
    assert trainer.sharing.num_shared_passes == num_passes + 2


def test_parity_notices_a_wrong_log_prob(folder, monkeypatch):
    """Moving one response token's log-prob to its neighbour must break the comparison."""
    from flash_attn.integrations._trl_batch import SharedStep

    right = SharedStep.in_rows
    monkeypatch.setattr(SharedStep, "in_rows", lambda self, values: right(self, values).roll(1, dims=1))
    _, parent_logs, _ = run("parent", "grpo", folder, max_steps=2)
    _, shared_logs, _ = run("shared", "grpo", folder, max_steps=2)
    with pytest.raises(AssertionError):
        assert_same_logs(parent_logs, shared_logs)


def test_evaluation_is_shared_too(folder):
    from tiny import prompts

    results = {}
    for side in ("parent", "shared"):
        trainer, _, _ = run(
            side, "grpo", folder, max_steps=1, per_device_eval_batch_size=8,
            options={"eval_dataset": prompts(4)},
        )  # fmt: skip
        torch.manual_seed(0)
        results[side] = trainer.evaluate()
    for name in ("eval_loss", "eval_kl", "eval_entropy"):
        assert results["shared"][name] == pytest.approx(results["parent"][name], abs=1e-5)
    assert results["shared"]["eval_shared_prompt/fallbacks"] == 0


def test_resuming_from_a_checkpoint_continues_the_same_run(folder, tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    _, whole, weights = run("shared", "grpo", tmp_path, **changes)
    trainer, resumed, resumed_weights = run(
        "shared",
        "grpo",
        tmp_path,
        options={"resume": str(tmp_path / "out" / "shared" / "checkpoint-3")},
        **changes,
    )
    assert len(resumed) == 3
    assert_shared(trainer, resumed)
    assert_same_logs(whole[3:], resumed)
    assert parameter_error(weights, resumed_weights) <= 1e-5
