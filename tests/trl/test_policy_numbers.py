"""Log-probs of one trainer's passes among themselves: ratios of 1 before the first update, bf16, no loss,
no gradient."""

from __future__ import annotations

import pytest
import torch
from tiny import arguments, make, model_path
from trl import GRPOConfig, GRPOTrainer

from flash_attn.integrations.trl import SharedPromptGRPOTrainer


def batch(num_groups: int = 2, num_responses: int = 4, prompt_len: int = 14, response_len: int = 7):
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(3, 60, (num_groups, prompt_len), generator=generator)
    responses = torch.randint(3, 60, (num_groups * num_responses, response_len), generator=generator)
    ids = torch.cat([prompts.repeat_interleave(num_responses, 0), responses], 1)
    mask = torch.ones_like(ids)
    mask[:num_responses, :3] = 0  # the first prompt is shorter
    for row in range(len(ids)):
        mask[row, prompt_len + 1 + row % response_len :] = 0
    order = torch.randperm(len(ids), generator=generator)
    return ids[order], mask[order], response_len


@pytest.mark.parametrize("bf16", [False, True])
def test_the_ratio_is_one_before_the_first_update(bf16, folder):
    """Old log-probs without gradient equal the policy's bit by bit in the same pack, and to rounding in
    others."""
    trainer = make(
        SharedPromptGRPOTrainer, arguments(folder / "out", GRPOConfig, bf16=bf16), model_path(folder)
    )
    call = (trainer.model, *batch())
    policy = trainer._get_per_token_logps_and_entropies(*call, compute_entropy=True)[0]
    with torch.no_grad():
        same = trainer._get_per_token_logps_and_entropies(*call)[0]
        split = trainer._get_per_token_logps_and_entropies(*call, batch_size=2)[0]
        parent = GRPOTrainer._get_per_token_logps_and_entropies(trainer, *call)[0]
    assert policy.requires_grad and trainer.sharing.num_forwards > 3
    assert torch.equal(policy.detach(), same)
    tolerance = 2e-2 if bf16 else 1e-5
    for other in (split, parent):
        assert (torch.exp(policy.detach() - other) - 1).abs().max() < tolerance


def test_no_loss_on_responses_means_no_gradient(folder):
    trainer = make(SharedPromptGRPOTrainer, arguments(folder / "out", GRPOConfig), model_path(folder))
    log_probs, entropy, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, *batch(), compute_entropy=True
    )
    (0 * log_probs.sum() + 0 * entropy.sum()).backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in trainer.model.parameters())


def test_gradients_of_the_entropy_flow(folder):
    trainer = make(SharedPromptGRPOTrainer, arguments(folder / "out", GRPOConfig), model_path(folder))
    gradients = []
    for method in (
        trainer._get_per_token_logps_and_entropies,
        lambda *a, **k: GRPOTrainer._get_per_token_logps_and_entropies(trainer, *a, **k),
    ):
        entropy = method(trainer.model, *batch(), compute_entropy=True)[1]
        trainer.model.zero_grad()
        entropy.sum().backward()
        gradients.append([p.grad.clone() for p in trainer.model.parameters()])
    scale = max(g.abs().max() for g in gradients[1])
    assert scale > 1e-2
    for ours, parents in zip(*gradients, strict=True):
        assert (ours - parents).abs().max() < 1e-5 * scale
