"""Real DPO trainers with shared prompts against their parent: six optimizer steps, every metric and weight
equal."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import VOCAB, Steps, arguments, model_path, tokenizer
from trl import DPOConfig, DPOTrainer
from two_processes import parameter_error

from flash_attn.integrations.trl import SharedPromptDPOTrainer, SharedPromptWarning

BASE = {"num_generations": None, "max_completion_length": None, "temperature": None, "beta": 0.1}
# Logged, and no clock: the parent's numbers and ours must agree in all of them.
TIMES = ("runtime", "per_second", "step_time", "shared_prompt")

# Pairs that are equal once cut, and reference log-probs from the unshared pass before the first step: margins
# that are 0 but for rounding, of which the accuracy counts those above 0.
TIED = ("truncated", "precomputed")


def pairs(num_pairs: int = 8, system: int = 0) -> Dataset:
    """Prompts of other lengths; responses that begin alike, are empty but for their end, or differ at
    once."""
    generator = torch.Generator().manual_seed(5)

    def words(n: int) -> list[str]:
        return [f"w{i}" for i in torch.randint(VOCAB, (n,), generator=generator).tolist()]

    shared = words(system)
    rows = []
    for i in range(num_pairs):
        start = words(i % 3)
        rows.append({
            "prompt": " ".join([*shared, f"w{i}", *words(4 + 5 * (i % 4))]) + " ",
            "chosen": " ".join([*start, *words(1 + i)]),
            "rejected": " ".join([*start, *words(7 - i % 4)]),
        })  # fmt: skip
    return Dataset.from_list(rows)


def run(cls: type, folder, *, kind: str = "qwen3", dataset=None, options=None, **changes):
    steps = Steps()
    args = arguments(folder / "out" / cls.__name__, DPOConfig, **{**BASE, **changes})
    trainer = cls(
        model=model_path(folder, kind), args=args, train_dataset=dataset or pairs(),
        processing_class=tokenizer(), callbacks=[steps], **(options or {}),
    )  # fmt: skip
    trainer.train()
    return trainer, steps.logs, {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


CASES = {
    "sigmoid": {},
    "ipo": {"loss_type": ["ipo"], "gradient_checkpointing": True},
    "sft-mix": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.5},
    "weighting": {"use_weighting": True, "f_divergence_type": "js_divergence"},
    "truncated": {"max_length": 12},
    "peft": {"options": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}},
    "moe": {"kind": "qwen3_moe", "router_aux_loss_coef": 0.1},
    "precomputed": {"precompute_ref_log_probs": True},
    "system-prompt": {"dataset": pairs(system=20)},
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_parents(case, folder):
    _, parent_logs, parent_weights = run(DPOTrainer, folder, **copy.deepcopy(CASES[case]))
    trainer, logs, weights = run(SharedPromptDPOTrainer, folder, **copy.deepcopy(CASES[case]))
    assert trainer.sharing.num_fallbacks == 0, trainer.sharing.fallbacks
    assert 0 < trainer.sharing.num_packed_tokens < trainer.sharing.num_replicated_tokens
    assert len(logs) == len(parent_logs) == 6
    worst = 0.0
    for a, b in zip(parent_logs, logs, strict=True):
        names = [n for n in a if not any(t in n for t in TIMES)]
        if case in TIED:
            names.remove("rewards/accuracies")
        assert {"loss", "grad_norm", "entropy", "logps/chosen", "rewards/margins", "logits/chosen"} <= set(
            names
        )
        for name in names:
            error = abs(a[name] - b[name]) / max(1, abs(a[name]))
            assert error <= 1e-5, f"{name}: {a[name]} {b[name]}"
            worst = max(worst, error)
    error = parameter_error(parent_weights, weights)
    assert error <= 1e-4
    tokens = f"{trainer.sharing.num_packed_tokens} of {trainer.sharing.num_replicated_tokens}"
    print(f"dpo {case}: metrics {worst:.1e}, parameters {error:.1e}, tokens {tokens}")


def test_bf16_training_is_shared_and_near_the_parents(folder):
    """accelerate puts its autocast around the reference model's forward before ours, and around the policy's
    after it."""
    _, parent_logs, _ = run(DPOTrainer, folder, bf16=True, max_steps=1)
    trainer, logs, _ = run(SharedPromptDPOTrainer, folder, bf16=True, max_steps=1)
    # Two micro-batches, policy and reference.
    assert trainer.sharing.num_shared_passes == 4 and trainer.sharing.num_fallbacks == 0
    assert 0 < trainer.sharing.num_packed_tokens < trainer.sharing.num_replicated_tokens
    for name in ("loss", "grad_norm", "entropy", "logps/chosen", "logps/rejected", "rewards/margins"):
        a, b = parent_logs[0][name], logs[0][name]
        assert abs(a - b) <= torch.finfo(torch.bfloat16).eps * max(1, abs(a)), f"{name}: {a} {b}"


def test_pairs_share_a_system_prompt(folder):
    """One prefix for all four rows of a micro-batch where that stores fewer tokens."""
    alone, _, _ = run(SharedPromptDPOTrainer, folder, max_steps=1, dataset=pairs())
    system, _, _ = run(SharedPromptDPOTrainer, folder, max_steps=1, dataset=pairs(system=40))
    saved = [t.sharing.num_replicated_tokens - t.sharing.num_packed_tokens for t in (alone, system)]
    # Four pairs of one micro-batch: 7 of 8 copies of the 40 tokens, in policy and reference passes.
    assert saved[1] - saved[0] > 2 * 6 * 30


def test_rows_that_cannot_be_shared_fall_back_with_a_reason(folder):
    trainer, _, _ = run(SharedPromptDPOTrainer, folder, max_steps=1)
    model = trainer.model
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    labels = ids.clone()
    labels[:, :4] = -100
    before = trainer.sharing.num_fallbacks
    with pytest.warns(SharedPromptWarning, match="no two rows of this batch begin alike"):
        ours = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    assert ours.log_probs.shape == (2, 7)
    with pytest.warns(SharedPromptWarning, match="a row has an empty prompt"):
        model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
    with pytest.warns(SharedPromptWarning, match="the model is called with position_ids"):
        model(
            input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, position_ids=mask.cumsum(1)
        )
    assert trainer.sharing.num_fallbacks == before + 3


def test_rows_without_labels_keep_their_gradients(folder):
    trainer, _, _ = run(SharedPromptDPOTrainer, folder, max_steps=1)
    trainer.model.zero_grad()
    ids = torch.full((2, 8), 9)
    labels = torch.full_like(ids, -100)
    out = trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
    assert (out.log_probs == 0).all() and trainer.sharing.num_fallbacks == 0
    out.log_probs.sum().backward()
    assert all((p.grad == 0).all() for p in trainer.model.parameters())


def test_a_refused_model_trains_as_with_the_parent(folder):
    _, parent_logs, parent_weights = run(DPOTrainer, folder, kind="qwen3_next", max_steps=2)
    with pytest.warns(SharedPromptWarning, match="layer type 'linear_attention' is not supported"):
        trainer, logs, weights = run(SharedPromptDPOTrainer, folder, kind="qwen3_next", max_steps=2)
    assert trainer.sharing.num_shared_passes == 0 and trainer.sharing.num_fallbacks == 2 * 2 * 2
    assert [e["loss"] for e in logs] == [e["loss"] for e in parent_logs]
    assert parameter_error(parent_weights, weights) == 0
