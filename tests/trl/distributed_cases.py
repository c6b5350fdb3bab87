"""What the two processes of `worker.py` run. Each case gives {"logs", "weights", "sharing"} of one side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compare import TRAINERS, run
from tiny import arguments, make, model_path

COMMON = {"ddp_backend": "gloo"}


def _result(trainer: Any, logs: list[dict[str, float]], weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in weights.items()}
    sharing = getattr(trainer, "sharing", None)
    counts = None
    if sharing is not None:
        names = ("num_shared_passes", "num_forwards", "num_packed_tokens", "num_replicated_tokens")
        counts = {**{name: getattr(sharing, name) for name in names}, "fallbacks": dict(sharing.fallbacks)}
    return {"logs": logs, "weights": full, "sharing": counts}


def ddp(side: str, folder: Path) -> dict[str, Any]:
    """Each process has a group of 4 per micro-batch."""
    return _result(*run(side, "grpo", folder, max_steps=6, **COMMON))


def split_group(side: str, folder: Path) -> dict[str, Any]:
    """Groups of 8, half of each on either process; old log-probs too."""
    return _result(*run(side, "grpo", folder, max_steps=3, num_generations=8, num_iterations=2, **COMMON))


def unequal_forwards(side: str, folder: Path) -> dict[str, Any]:
    """A small budget: one process needs more forwards than the other, in passes with gradient and without."""
    changes = {"per_device_train_batch_size": 8, "num_iterations": 2, "loss_type": "dapo"}
    settings = {"max_packed_tokens": 45}
    return _result(*run(side, "grpo", folder, max_steps=3, shared_prompt=settings, **changes, **COMMON))


def fsdp2(side: str, folder: Path) -> dict[str, Any]:
    """The trainer's log-prob method on a model sharded by FSDP2 over layers, forward and backward.

    Not a training run: accelerate does not offer FSDP on CPUs. Processes hold groups of other sizes.
    """
    from torch.distributed.fsdp import fully_shard

    parent, shared, config = TRAINERS["grpo"]
    trainer = make(
        parent if side == "parent" else shared,
        arguments(folder / "out", config, **COMMON),
        model_path(folder),
    )
    model = trainer.model
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    prompt = torch.randint(3, 60, (1, 20), generator=generator).repeat(6, 1)
    if rank == 1:
        prompt[3:] = torch.randint(3, 60, (20,), generator=generator)
    responses = torch.randint(3, 60, (6, 9), generator=generator)
    mask = torch.ones(6, 29, dtype=torch.int64)
    for row in range(6):
        mask[row, 20 + row :] = 0
    ids = torch.cat([prompt, responses], 1)
    with torch.no_grad():
        old, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 9, batch_size=2)
    log_probs, entropy, _ = trainer._get_per_token_logps_and_entropies(
        model, ids, mask, 9, compute_entropy=True
    )
    loss = (log_probs.exp() * torch.arange(1, 55).view(6, 9)).sum() + entropy.square().sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert any(type(g).__name__ == "DTensor" for g in gradients.values())
    logs = [
        {
            "loss": float(old.sum()),
            "grad_norm": float(loss.detach()),
            "entropy": float(entropy.detach().sum()),
        }
    ]
    return _result(trainer, logs, gradients)


CASES = {case.__name__: case for case in (ddp, split_group, unequal_forwards, fsdp2)}
