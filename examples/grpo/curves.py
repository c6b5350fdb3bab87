"""Reward, loss and time of several runs on one figure, from the JSON lines that training wrote."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = {"replicated": "#888888", "shared": "#1f4e9c"}
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


def write_json(runs: list[Run], path: Path) -> None:
    """All runs in one file, a step a line, with what machine they ran on."""
    lines = []
    for run in runs:
        settings = json.dumps({k: v for k, v in run.settings.items() if k != "machine"})
        steps = ",\n  ".join(json.dumps(step) for step in run.steps)
        lines.append(f'{{"settings": {settings}, "steps": [\n  {steps}]}}')
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = json.dumps(runs[0].settings["machine"])
    path.write_text(f'{{"machine": {machine},\n"runs": [\n' + ",\n".join(lines) + "]}\n")


def from_json(data: dict[str, Any]) -> list[Run]:
    """The runs of `write_json`."""
    return [Run({**r["settings"], "machine": data["machine"]}, r["steps"]) for r in data["runs"]]


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


def agreement(runs: list[Run], name: str) -> dict[str, float] | None:
    """How far shared runs lie from the replicated ones, in running means of a metric over the steps of all.

    - `same_seed`: mean distance of the two runs of a seed, which saw the same prompts.
    - `other_seed`: mean distance of two replicated runs of different seeds.
    - `inside`: share of steps at which the mean of the shared runs lies between the lowest and the highest
      replicated run.

    None unless both variants ran with the same two or more seeds.
    """
    curves: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for run in runs:
        curves[run.variant][run.settings["seed"]] = running_mean(run.values(name))
    shared, replicated = curves["shared"], curves["replicated"]
    if len(shared) < 2 or shared.keys() != replicated.keys():
        return None
    length = min(len(curve) for own in (shared, replicated) for curve in own.values())
    steps = range(min(WINDOW, length) - 1, length)  # means of fewer steps are left out

    def distance(a: list[float], b: list[float]) -> float:
        return sum(abs(a[i] - b[i]) for i in steps) / len(steps)

    pairs = list(itertools.combinations(replicated.values(), 2))
    means = [sum(curve[i] for curve in shared.values()) / len(shared) for i in steps]
    lowest = [min(curve[i] for curve in replicated.values()) for i in steps]
    highest = [max(curve[i] for curve in replicated.values()) for i in steps]
    inside = [a <= x <= b for a, x, b in zip(lowest, means, highest, strict=True)]
    return {
        "same_seed": sum(distance(shared[s], replicated[s]) for s in shared) / len(shared),
        "other_seed": sum(distance(a, b) for a, b in pairs) / len(pairs),
        "inside": sum(inside) / len(inside),
    }


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
    for name in ("reward", "loss", "grad_norm"):
        found = agreement(runs, name)
        if found is not None:
            print(
                f"{name}: shared and replicated runs of a seed differ by {found['same_seed']:.4f}, "
                f"replicated runs of two seeds by {found['other_seed']:.4f}; "
                f"shared mean inside the replicated runs at {found['inside']:.0%} of steps"
            )


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
    # The first step compiles and warms up: it would flatten all others.
    later = [seconds for run in runs for seconds in run.values("phases/policy update")[1:]]
    axes[2].set_ylim(0, 1.1 * max(later) if later else None)
    axes[0].legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
