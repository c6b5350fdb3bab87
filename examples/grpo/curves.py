"""Reward, loss and time of several runs on one figure, from the JSON lines that training wrote."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = {"replicated": "#888888", "shared": "#1f6fb2"}
WINDOW = 5  # steps of the running mean


@dataclass(frozen=True)
class Run:
    """One log: its settings, and its steps in order."""

    settings: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def variant(self) -> str:
        """Which trainer it was."""
        return "shared" if self.settings["shared"] else "replicated"

    def values(self, name: str) -> list[float]:
        """A metric at every step that has it; "phases/x" for the seconds of a phase."""
        if name.startswith("phases/"):
            return [s["phases"][name.removeprefix("phases/")] for s in self.steps]
        return [s[name] for s in self.steps if name in s]


def read(path: Path) -> Run:
    """Reads a log; a run that was stopped gives the steps it made."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines or "run" not in lines[0] or len(lines) == 1:
        raise SystemExit(f"{path} is not a log of this example with at least one step")
    return Run(lines[0]["run"], lines[1:])


def running_mean(values: list[float], window: int = WINDOW) -> list[float]:
    """Mean of the last `window` values at each step."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))]


def summary(runs: list[Run]) -> dict[str, dict[str, Any]]:
    """Per variant: mean reward of the first and the last ten steps of each seed, and seconds of a step."""
    found: dict[str, dict[str, Any]] = {}
    for variant in COLOURS:
        own = [run for run in runs if run.variant == variant]
        if not own:
            continue
        ends = [min(10, max(1, len(run.values("reward")) // 2)) for run in own]
        first = [sum(r.values("reward")[:n]) / n for r, n in zip(own, ends, strict=True)]
        last = [sum(r.values("reward")[-n:]) / n for r, n in zip(own, ends, strict=True)]
        updates = sorted(t for run in own for t in run.values("phases/policy update"))
        steps = sorted(t for run in own for t in run.values("seconds"))
        found[variant] = {
            "seeds": [run.settings["seed"] for run in own],
            "first_rewards": first,
            "last_rewards": last,
            "median_update_seconds": updates[len(updates) // 2],
            "median_step_seconds": steps[len(steps) // 2],
        }
    return found


def print_summary(runs: list[Run]) -> None:
    """The table of `summary`, and the learning and equivalence that it shows."""
    table = summary(runs)
    for variant, s in table.items():
        first, last = s["first_rewards"], s["last_rewards"]
        spread = max(last) - min(last)
        seconds = f"policy update {s['median_update_seconds']:.2f} s, step {s['median_step_seconds']:.2f} s"
        reward = (
            f"{sum(first) / len(first):.3f} -> {sum(last) / len(last):.3f} (spread over seeds {spread:.3f})"
        )
        print(f"{variant:>10}: seeds {s['seeds']}, reward {reward}, {seconds}")
    if len(table) == 2:
        ratio = table["replicated"]["median_update_seconds"] / table["shared"]["median_update_seconds"]
        print(f"policy update {ratio:.2f} times as fast when shared")


def draw(runs: list[Run], path: Path) -> None:
    """Thin lines are single seeds, thick ones the mean of a variant's seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    panels = [
        ("reward", f"mean reward ({WINDOW} steps)", "reward"),
        ("loss", "loss", "loss"),
        ("phases/policy update", "policy update", "seconds per step"),
    ]
    by_variant: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_variant[run.variant].append(run)
    for axis, (name, title, unit) in zip(axes, panels, strict=True):
        for variant, own in by_variant.items():
            lines = [run.values(name) for run in own]
            if name == "reward":
                lines = [running_mean(line) for line in lines]
            for line in lines:
                axis.plot(range(1, len(line) + 1), line, color=COLOURS[variant], alpha=0.35, linewidth=0.8)
            length = min(map(len, lines))
            mean = [sum(line[i] for line in lines) / len(lines) for i in range(length)]
            axis.plot(range(1, length + 1), mean, color=COLOURS[variant], linewidth=2, label=variant)
        axis.set_title(title)
        axis.set_xlabel("optimizer step")
        axis.set_ylabel(unit)
        axis.grid(alpha=0.3)
    axes[2].set_ylim(bottom=0)
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
