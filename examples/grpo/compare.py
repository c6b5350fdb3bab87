"""Are two updates the same? Log-probs, loss and every parameter's gradient, each against its tolerance.

Both variants round differently (other sums, other order), so equality is up to rounding of the dtype. A wrong
mask, position or gradient shows at 1e-1 and more.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from .update import Group, Update


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted differences: absolute for log-probs and loss, relative for gradients, of one parameter
    and of all together."""

    log_prob: float
    loss: float
    gradient: float
    gradient_total: float


TOLERANCES = {
    torch.float64: Tolerance(1e-5, 1e-6, 1e-5, 1e-5),  # transformers' rotary and norms run in float32
    torch.float32: Tolerance(1e-3, 1e-4, 1e-3, 1e-3),
    torch.bfloat16: Tolerance(0.5, 2e-2, 0.5, 0.2),  # a parameter's gradient is summed in its dtype
    torch.float16: Tolerance(0.1, 5e-3, 0.1, 5e-2),
}


@dataclass(frozen=True)
class Differences:
    """Shared against replicated; `gradient`: the largest ||a - b|| / ||b|| of a parameter, `gradient_of`."""

    log_prob: float
    loss: float
    gradient: float
    gradient_of: str
    gradient_total: float
    gradient_norm: float
    num_parameters: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def compare(replicated: Update, shared: Update) -> Differences:
    """Differences of the shared update from the replicated one."""
    names = replicated.gradients.keys()
    if names != shared.gradients.keys():
        raise ValueError(
            f"gradients must be of the same parameters, got {sorted(names ^ shared.gradients.keys())}"
        )
    norms = {n: replicated.gradients[n].double().norm().item() for n in names}
    errors = {
        n: (shared.gradients[n].double() - replicated.gradients[n].double()).norm().item() for n in names
    }
    total = sum(v**2 for v in norms.values()) ** 0.5
    # Parameters without a gradient of their own (a key bias, say) hold only rounding: seen against the whole.
    relative = {n: errors[n] / max(norms[n], 1e-5 * total, 1e-30) for n in names}
    worst = max(relative, key=lambda n: relative[n])
    log_probs = torch.cat(shared.old_log_probs) - torch.cat(replicated.old_log_probs)
    return Differences(
        log_prob=log_probs.abs().max().item(),
        loss=abs(shared.loss - replicated.loss),
        gradient=relative[worst],
        gradient_of=worst,
        gradient_total=sum(v**2 for v in errors.values()) ** 0.5 / max(total, 1e-30),
        gradient_norm=total,
        num_parameters=len(norms),
    )


def reward_problems(groups: list[Group]) -> list[str]:
    """Why these rewards teach nothing: known before any update."""
    unequal = sum(len(set(g.rewards)) > 1 for g in groups)
    if 2 * unequal >= len(groups):
        return []
    return [
        f"only {unequal} of {len(groups)} groups have unequal rewards, so the update would teach nothing: "
        "try more --num-responses, more --max-new-tokens, another --task or --seed"
    ]


def problems(groups: list[Group], differences: Differences, tolerance: Tolerance) -> list[str]:
    """Why this run proves nothing, or proves a fault. Empty: all is well."""
    found = reward_problems(groups)
    if not differences.gradient_norm > 0:
        found.append(f"the gradient norm must be above 0, got {differences.gradient_norm}")
    for what in ("log_prob", "loss", "gradient", "gradient_total"):
        value, limit = getattr(differences, what), getattr(tolerance, what)
        if not value <= limit:
            found.append(f"{what} of shared and replicated differ by {value:.2e}, more than {limit:.0e}")
    return found
