"""Cost models for TRL's trainers, measured on the trainer's own passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accelerate.utils import broadcast_object_list

from flash_attn.integrations._transformers_cost import layer_windows
from flash_attn.integrations._transformers_support import text_backbone
from flash_attn.shared_prompt.cost_model import CostModel, GroupLens, calibrate

Pass = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def calibrate_passes(
    model: torch.nn.Module,
    device: torch.device,
    *,
    shared: Pass,
    replicated: Pass,
    max_tokens: int,
    max_seconds: float,
) -> CostModel:
    """`calibrate` on two log-prob passes of a model, forward and backward, on random tokens.

    A pass takes ids and mask (B, W) and the responses' columns, and returns log-probs. Gradients are cleared
    afterwards; the random numbers of training are left alone. Process 0's result counts for all.
    """
    config = text_backbone(model).config.get_text_config()
    generator = torch.Generator().manual_seed(0)

    def run(groups: Sequence[GroupLens], is_shared: bool) -> None:
        ids, mask, response_width = _random_rows(groups, config.vocab_size, generator)
        log_probs = (shared if is_shared else replicated)(ids.to(device), mask.to(device), response_width)
        log_probs.sum().backward()
        model.zero_grad(set_to_none=True)

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model.train()
        found = calibrate(
            run, max_tokens=max_tokens, max_seconds=max_seconds, device=device, windows=layer_windows(config)
        )
    return CostModel.from_dict(broadcast_object_list([found.as_dict()])[0])


def _random_rows(
    groups: Sequence[GroupLens], vocab_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(ids, mask, columns of responses) as a trainer has them: prompts padded left, responses right."""
    prompt_width = max(g.prompt_len for g in groups)
    response_width = max(max(g.response_lens) for g in groups)
    column = torch.arange(prompt_width + response_width)
    ids, mask = [], []
    for group in groups:
        prompt = torch.randint(vocab_size, (prompt_width,), generator=generator)
        for response_len in group.response_lens:
            response = torch.randint(vocab_size, (response_width,), generator=generator)
            ids.append(torch.cat([prompt, response]))
            mask.append((column >= prompt_width - group.prompt_len) & (column < prompt_width + response_len))
    return torch.stack(ids), torch.stack(mask).long(), response_width
