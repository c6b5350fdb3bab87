"""Whole-model policy updates of verl_updates.py as shares of the GPU's peak, for report.py.

Executed: FLOPs that run (a checkpointed layer's second forward too) over seconds. Nominal: FLOPs of the
replicated batch over the same seconds, as published figures of prompt sharing count them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from plotting import COLORS, REPLICATED, pyplot
from verl_report import OWN, SHARED, TORCH, name_of

Rows = list[dict[str, Any]]
Table = Callable[[list[tuple[str, ...]]], str]
PEAK_TFLOPS = {"NVIDIA H200": 989.0, "NVIDIA H100": 989.0}  # dense bf16


def updates_of(rows: Rows) -> Rows:
    """Policy updates of one GPU: models as measured, by micro-batches, shared first."""
    found = [row for row in rows if row["pass"] == "policy_update" and row["dp"] == row["sp"] == 1]
    models = list(dict.fromkeys(row["model"] for row in found))
    ways = [SHARED, OWN, TORCH]
    return sorted(
        found,
        key=lambda row: (
            models.index(row["model"]),
            row["num_micro_batches"],
            row["micro_batch"],
            ways.index(row["provider"]),
        ),
    )


def peak_of(row: dict[str, Any]) -> float | None:
    return next((value for name, value in PEAK_TFLOPS.items() if row["gpu"].startswith(name)), None)


def executed(row: dict[str, Any]) -> float:
    """TFLOP/s."""
    return row["flops"] / row["seconds"] / 1e12


def nominal(row: dict[str, Any]) -> float:
    """TFLOP/s of the replicated batch's work."""
    return executed(row) * (row["flop_ratio"] if row["provider"] == SHARED else 1.0)


def text(rows: Rows, table: Table) -> str:
    """Seconds, work, rate and both shares of the peak, a line an update."""
    updates = updates_of(rows)
    first = updates[0]
    peak = peak_of(first)
    lines: list[tuple[str, ...]] = [
        ("model, micro-batch, way", "s", "PFLOPs executed", "TFLOP/s", "of peak", "nominal")
    ]
    for row in updates:
        name, work = f"{name_of(row)}: {row['provider']}", f"{row['flops'] / 1e15:.2f}"
        if "seconds" not in row:
            lines.append((name, "OOM", work, "-", "-", "-"))
            continue
        shares = ("-" if peak is None else f"{rate(row) / peak:.0%}" for rate in (executed, nominal))
        lines.append((name, f"{row['seconds']:.2f}", work, f"{executed(row):.0f}", *shares))
    return f"""\
{first["gpu"]}, torch {first["torch"]}, {first["date"]}: policy updates of veRL's worker (the README has
all passes), one prompt of {first["prompt_len"]:,} tokens a micro-batch, gradient checkpointing, whose second
forward counts as executed. "of peak": FLOPs that run, of {peak or 0:.0f} TFLOP/s. "nominal": the replicated
batch's FLOPs over the same time, as published figures of prompt sharing count them: it shows the saving, not
how busy the GPU is.

{table(lines)}"""


def draw(rows: Rows, path: Path) -> None:
    """Executed TFLOP/s of each way where both ran; on the shared bar a mark at its nominal TFLOP/s."""
    plt = pyplot()
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for row in updates_of(rows):
        if "seconds" in row:
            cells.setdefault(name_of(row), {})[row["provider"]] = row
    cells = {name: cell for name, cell in cells.items() if SHARED in cell and len(cell) > 1}
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.62 * len(cells)), layout="constrained")
    styles = {
        SHARED: (COLORS["ours"], "shared, executed"),
        OWN: (REPLICATED, "replicated, this package's kernels"),
        TORCH: (COLORS["fa2-replicated"], "replicated, torch's FlashAttention-2"),
    }
    for place, (way, (color, label)) in enumerate(styles.items()):
        points = [(y + (place - 1) * 0.27, cell[way]) for y, cell in enumerate(cells.values()) if way in cell]
        axis.barh([y for y, _ in points], [executed(r) for _, r in points], 0.25, color=color, label=label)
        if way == SHARED:
            marks = ([nominal(row) for _, row in points], [y for y, _ in points])
            axis.plot(*marks, "|", color="black", markersize=11, label="shared, nominal")
    peak = peak_of(rows[0])
    if peak:
        axis.axvline(peak, color="gray", linewidth=1, linestyle="--")
        axis.text(peak, -0.62, " peak", va="bottom", fontsize=8, color="gray")
    axis.set_yticks(range(len(cells)), [name.replace(", ", ",\n", 1) for name in cells], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("TFLOP/s of a policy update")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)
