"""One GRPO update, done twice: a copy of the prompt with each response, and the prompt stored once.

Per response token t with ratio r = exp(log_prob - old_log_prob) and advantage A, T tokens in the batch:
    loss = -1/T sum_t min(r A, clip(r, 1 - eps, 1 + eps) A)
Both variants compute log-probs by the same chunked function, at response tokens only, one micro-batch at a
time; a micro-batch is one (prompt, response) row, exactly as long as it is (no padding, `is_causal`, no
mask), or one group packed as [prompt, response 1, ..., response N].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from flash_attn.integrations.transformers import log_probs_of_batch, register
from flash_attn.shared_prompt import log_probs, pack, unpack_responses

from .measure import Phases
from .sampling import attention

CLIP = 0.2
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Group:
    """One prompt, its responses (lists of token ids) and their rewards."""

    prompt: tuple[int, ...]
    responses: list[list[int]]
    rewards: list[float]

    def advantages(self) -> torch.Tensor:
        """(N,) rewards, standardised within the group; 0 where all are equal."""
        rewards = torch.tensor(self.rewards)
        return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)


@dataclass
class Update:
    """What one variant computed (old log-probs per micro-batch, loss, all gradients) and what it cost."""

    name: str
    num_tokens: int
    phases: Phases
    old_log_probs: list[torch.Tensor] = field(default_factory=list)
    loss: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroBatch:
    """A forward of `num_tokens` tokens that gives the log-probs of its responses, in the rollout's order."""

    num_tokens: int
    forward: Callable[[], torch.Tensor]
    advantages: torch.Tensor  # one per response token


def row_log_probs(model: Any, row: torch.Tensor, first: int, temperature: float) -> torch.Tensor:
    """(n,) fp32 log-probs of the tokens from `first` on of one row (1, L), in memory of a tile of logits."""
    hidden = model.get_decoder()(input_ids=row, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    return log_probs(
        hidden,
        row[0, first:],
        head.weight,
        head.bias,
        pred_index=torch.arange(first - 1, row.shape[1] - 1, device=row.device),
        temperature=temperature,
        softcap=getattr(model.config.get_text_config(), "final_logit_softcapping", None),
        compute_entropy=False,
    ).log_probs


def replicated_batches(model: Any, groups: Sequence[Group], temperature: float) -> Iterator[MicroBatch]:
    """One row per response: its prompt, then the response."""
    device = next(model.parameters()).device
    for group in groups:
        for response, advantage in zip(group.responses, group.advantages(), strict=True):
            row = torch.tensor([[*group.prompt, *response]], device=device)
            first = len(group.prompt)

            def forward(row: torch.Tensor = row, first: int = first) -> torch.Tensor:
                return row_log_probs(model, row, first, temperature)

            yield MicroBatch(row.numel(), forward, advantage.expand(len(response)).to(device))


def shared_batches(model: Any, groups: Sequence[Group], temperature: float) -> Iterator[MicroBatch]:
    """One pack per group: the prompt once, then its responses."""
    device = next(model.parameters()).device
    for group in groups:
        packed = pack([list(group.prompt)] * len(group.responses), group.responses, device=device)
        lengths = torch.tensor([len(r) for r in group.responses])

        def forward(packed: Any = packed) -> torch.Tensor:
            values = log_probs_of_batch(
                model, packed, temperature=temperature, compute_entropy=False
            ).log_probs
            return torch.cat(unpack_responses(values, packed))

        advantages = group.advantages().repeat_interleave(lengths).to(device)
        yield MicroBatch(packed.num_packed_tokens, forward, advantages)


VARIANTS: dict[str, tuple[str, Callable[..., Iterator[MicroBatch]]]] = {
    "replicated": ("sdpa", replicated_batches),
    "shared": ("dualkv", shared_batches),
}


def run_update(
    name: str, model: Any, groups: Sequence[Group], temperature: float, quiet: bool = False
) -> Update:
    """Old log-probs, policy forward and backward, optimizer step. The weights are put back afterwards."""
    register()
    implementation, batches = VARIANTS[name]
    device = next(model.parameters()).device
    micro_batches = list(batches(model, groups, temperature))
    update = Update(name, sum(m.num_tokens for m in micro_batches), Phases(device))
    num_response_tokens = sum(len(r) for g in groups for r in g.responses)
    model.zero_grad(set_to_none=True)

    def progress(phase: str) -> Any:
        return tqdm(micro_batches, desc=f"{name:>10}: {phase}", unit="batch", disable=quiet)

    with attention(model, implementation):
        with update.phases.measure("old log-probs"), torch.no_grad():
            update.old_log_probs = [m.forward() for m in progress("old log-probs")]
        with update.phases.measure("forward + backward"):
            steps = zip(progress("forward + backward"), update.old_log_probs, strict=True)
            losses = [backward(batch, old, num_response_tokens) for batch, old in steps]
    update.loss = float(torch.stack(losses).sum())
    step_optimizer(model, update.phases)
    update.gradients = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return update


def policy_loss(
    log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """GRPO's clipped objective of some response tokens (n,), a part of the mean over `num_tokens`."""
    ratio = torch.exp(log_probs - old)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum() / num_tokens


def backward(batch: MicroBatch, old: torch.Tensor, num_response_tokens: int) -> torch.Tensor:
    """Adds the micro-batch's gradients to the parameters' and returns its part of the loss."""
    loss = policy_loss(batch.forward(), old, batch.advantages, num_response_tokens)
    loss.backward()
    return loss.detach()


def step_optimizer(model: torch.nn.Module, phases: Phases) -> None:
    """One AdamW step, measured, then undone: both variants start from the same weights."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    saved = [p.detach().clone() for p in parameters]
    with phases.measure("optimizer step"):
        torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True).step()
    with torch.no_grad():
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.copy_(value)
