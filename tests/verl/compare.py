"""The same updates by veRL's own engine and by the plug-in's, and what must be equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny import log_probs, make_batch, make_worker, model_path, parameters, update
from two_processes import parameter_error

METRICS = ("loss", "grad_norm", "actor/pg_loss", "actor/entropy_loss", "kl_loss")
LENS = [(20, [5, 9, 1, 7]), (13, [8, 3, 6, 12]), (1, [4, 5, 2, 3]), (31, [2, 2, 15, 1])]
OTHER = [(17, [11, 3, 4, 9]), (26, [1, 1, 2, 3]), (9, [7, 7, 7, 7]), (12, [10, 2, 14, 6])]


class Run(NamedTuple):
    """Of one side: log-probs and entropies before each step, metrics of each mini-batch, final parameters."""

    log_probs: list[torch.Tensor]
    entropies: list[torch.Tensor]
    metrics: list[dict[str, list[float]]]
    parameters: dict[str, torch.Tensor]
    sharing: Any


def run(
    attention: str,
    folder: Path,
    *,
    kind: str = "qwen3",
    num_steps: int = 3,
    lens: Any = (LENS, OTHER, LENS),
    batch: dict[str, Any] | None = None,
    num_mini_batches: int = 2,
    settings: dict[str, Any] | None = None,
    **worker: Any,
) -> Run:
    """`num_steps` steps of veRL: old and reference log-probs, then an update of two mini-batches."""
    one = make_worker(model_path(folder, kind), attention, **worker)
    found: list[list[Any]] = [[], [], []]
    for step in range(num_steps):
        data = make_batch(lens[step], seed=step, **(batch or {}))
        old, entropies = log_probs(one, data)
        data["old_log_probs"] = old
        # The reference is the model before this step, moved a little so that KL has a gradient.
        data["ref_log_prob"] = torch.nested.nested_tensor_from_jagged(old.values() * 0.9, old.offsets())
        metrics = update(one, data, num_mini_batches=num_mini_batches, **(settings or {}))
        for values, value in zip(found, (old.values(), entropies.values(), metrics), strict=True):
            values.append(value)
    return Run(*found, parameters(one), getattr(one.engine, "sharing", None))


def assert_same(plain: Run, shared: Run, tolerance: float = 2e-5) -> None:
    """Everything that an update reads, returns and changes. Values grow apart over the steps: the tolerance
    is for the last one."""
    for a, b in zip(plain.log_probs + plain.entropies, shared.log_probs + shared.entropies, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for step, (a, b) in enumerate(zip(plain.metrics, shared.metrics, strict=True)):
        for name in METRICS:
            assert (name in a) == (name in b)
            if name in a:
                torch.testing.assert_close(
                    torch.tensor(a[name]), torch.tensor(b[name]), rtol=tolerance, atol=tolerance,
                    msg=lambda text, n=name, s=step: f"step {s}, {n}: {text}",
                )  # fmt: skip
    assert_same_parameters(plain.parameters, shared.parameters)
    assert all(g > 1e-2 for m in plain.metrics for g in m["grad_norm"]), "nothing was trained"


def assert_same_parameters(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert parameter_error(a, b) <= 1e-4


def assert_shared(shared: Run) -> None:
    """Every mini-batch and log-prob pass ran packed, with fewer tokens, and the metrics say so."""
    account = shared.sharing
    assert account.num_shared_passes > 0 and not account.fallbacks
    assert 0 < account.num_packed_tokens < account.num_replicated_tokens
    for metrics in shared.metrics:
        assert metrics["shared_prompt/fallbacks"] == [0.0] * len(metrics["loss"])
        packed, replicated = (
            sum(metrics[f"shared_prompt/{name}_tokens"]) for name in ("packed", "replicated")
        )
        assert 0 < packed < replicated
