"""Table and plot of whole updates over several GPUs, as examples/long_context_sp.py wrote them (--json).
report.py puts them into this folder's README."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
Table = Callable[[list[tuple[str, ...]]], str]
NAMES = {"gemma-4-31b": "Gemma-4-31B", "llama-3.1-8b": "Llama-3.1-8B", "qwen3-8b": "Qwen3-8B"}
PHASES = ("old log-probs", "forward", "backward", "optimizer step")


def shape_of(row: dict[str, Any]) -> str:
    """Model, layers and optimizer; *: its first update is the one that was timed."""
    case = row["case"]
    name = f"{NAMES.get(case['shape'], case['shape'])}, {row['num_layers']} layers, {case['optimizer']}"
    return name + "*" * (case["steps"] == 1)


def peak(row: dict[str, Any]) -> float | None:
    """Most that a GPU had allocated in any phase, GiB."""
    peaks = [phase["peak_gib"] for phase in row["phases"].values() if phase["peak_gib"] is not None]
    return max(peaks, default=None)


def last_of_each(rows: Rows) -> Rows:
    """The latest row of each case, shortest prompts and fewest GPUs first."""
    found = {(*case_of(row), row["sp"], row["world"]): row for row in rows}
    return [found[key] for key in sorted(found)]


def case_of(row: dict[str, Any]) -> tuple[str, int]:
    """What is the same on any number of GPUs."""
    return shape_of(row), row["case"]["prompt_length"]


def efficiency(row: dict[str, Any], rows: Rows) -> float | None:
    """Time on the fewest GPUs that ran this case, times their number, over GPUs times time."""
    fewest = min((r for r in rows if case_of(r) == case_of(row)), key=lambda r: r["world"])
    if fewest is row:
        return None
    return fewest["update_seconds"] * fewest["world"] / (row["update_seconds"] * row["world"])


def text(rows: Rows, table: Table) -> str:
    """What was run, and a line a case."""
    cases = last_of_each(rows)
    machine, case = cases[0]["machine"], cases[0]["case"]
    lines: list[tuple[str, ...]] = [
        ("", "GPUs", *(f"{name}, s" for name in PHASES), "update, s", "peak GiB of a GPU", "efficiency")
    ]
    for row in cases:
        most, part = peak(row), efficiency(row, cases)
        phases = (row["phases"].get(name) for name in PHASES)
        lines.append((
            f"{shape_of(row)}, P={row['case']['prompt_length']:,}", str(row["world"]),
            *(f"{phase['seconds']:.2f}" if phase else "-" for phase in phases),
            f"{row['update_seconds']:.2f}", "-" if most is None else f"{most:.1f}",
            "" if part is None else f"{part:.0%}",
        ))  # fmt: skip
    lengths = f"N={case['num_responses']}, R={case['response_length']:,}, {case['dtype']}"
    commits = " and ".join(dict.fromkeys(str(row["commit"])[:12] for row in cases))
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}, commit {commits}"
    return f"""\
One GRPO update, {lengths}, gradient checkpointing;
{machine["device"]}, {versions}, {machine["date"]}.
A pack is spread over all GPUs, FSDP2 shards the weights; the slowest GPU's seconds. Efficiency: against the
fewest GPUs that ran the case. *: the first update after loading, nothing warmed up.

{table(lines)}"""


def draw(rows: Rows, path: Path) -> None:
    """Seconds of the phases of each case, and its peak memory."""
    from plotting import pyplot

    plt = pyplot()
    cases = last_of_each(rows)
    names = [f"{shape_of(r)}\nP={r['case']['prompt_length'] // 1024}K, {r['world']} GPUs" for r in cases]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 1.6 + 0.5 * len(cases)), layout="constrained", sharey=True
    )
    at, begin = range(len(cases)), [0.0] * len(cases)
    for name, color in zip(PHASES, ("#a9c6ec", "#5b8fd6", "#1f4e9c", "#9a9a9a"), strict=True):
        seconds = [row["phases"].get(name, {"seconds": 0.0})["seconds"] for row in cases]
        left.barh(at, seconds, height=0.6, left=begin, color=color, label=name)
        begin = [a + b for a, b in zip(begin, seconds, strict=True)]
    left.set_yticks(at, names, fontsize=9)
    left.set_ylim(-0.6, len(cases) - 0.4)
    left.invert_yaxis()
    left.set_xlabel("seconds of an update")
    figure.legend(loc="outside upper center", ncols=len(PHASES), frameon=False, fontsize=9)
    right.barh(at, [peak(row) or 0.0 for row in cases], height=0.6, color="#2a9d8f")
    right.set_xlabel("peak GiB of a GPU")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
