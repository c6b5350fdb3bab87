"""Texts and plots of error_growth.py, break_even.py and the GPU tests; report.py puts them into documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from plotting import pyplot

Rows = list[dict[str, Any]]
Table = Callable[[list[tuple[str, ...]]], str]


def _machine(first: dict[str, Any]) -> str:
    software = f"CUDA {first['cuda']}, torch {first['torch']}"
    return f"{first['gpu']}, {software}, {first['date']}, commit {first['commit'][:12]}"


def _axis(row: dict[str, Any]) -> int:
    case = row["case"]
    return case["N"] if row["axis"] == "N" else case["H"] // case["Hk"]


def error_growth(rows: Rows, markdown_table: Table) -> str:
    """Relative rms error of the prompt's dK and dV, a line a provider, over N and over the GQA ratio."""
    case = rows[0]["case"]
    sizes = f"P={case['P']}, R={case['R']}, d={case['d']}, {case['dtype']}"
    parts = [
        f"""\
{_machine(rows[0])}; {sizes}; relative rms error of
the prompt's dK / dV against fp64, in 1e-3. Ours sums in fp32 over all responses and query heads."""
    ]
    for axis, title in (("N", "responses"), ("ratio", "query heads of a key head (N=8)")):
        chosen = [row for row in rows if row["axis"] == axis]
        points = sorted({_axis(row) for row in chosen})
        lines: list[tuple[str, ...]] = [(title, *map(str, points))]
        for name in dict.fromkeys(row["provider"] for row in chosen):
            found = {_axis(row): row for row in chosen if row["provider"] == name and "dk" in row}
            values = [found.get(point) for point in points]
            lines.append(
                (name, *(f"{1e3 * v['dk']:.2f} / {1e3 * v['dv']:.2f}" if v else "-" for v in values))
            )
        parts.append(markdown_table(lines))
    return "\n\n".join(parts)


def draw_error_growth(rows: Rows, path: Path) -> None:
    """dK's error over the number of responses and over the GQA ratio."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    labels = (("N", "responses on one prompt"), ("ratio", "query heads of a key head"))
    for axis, (kind, label) in zip(axes, labels, strict=True):
        for name in dict.fromkeys(row["provider"] for row in rows):
            chosen = [r for r in rows if r["axis"] == kind and r["provider"] == name and "dk" in r]
            points = sorted((_axis(row), row["dk"]) for row in chosen)
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xlabel(label)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("relative rms error of dK, prompt rows")
    axes[0].legend(fontsize=7, frameon=False, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _cells(rows: Rows) -> tuple[list[int], list[float], dict[tuple[int, float], float | None]]:
    found = {(row["case"]["N"], row["case"]["P"] / row["case"]["R"]): row.get("speedup") for row in rows}
    return sorted({n for n, _ in found}), sorted({ratio for _, ratio in found}), found


def break_even(rows: Rows, markdown_table: Table) -> str:
    """The map as a table: replicated time / shared time."""
    case = rows[0]["case"]
    counts, ratios, found = _cells(rows)
    lines: list[tuple[str, ...]] = [("N", *(f"P/R = {ratio:g}" for ratio in ratios))]
    for count in counts:
        values = [found.get((count, ratio)) for ratio in ratios]
        lines.append((str(count), *("-" if v is None else f"{v:.2f}" for v in values)))
    sizes = f"R={case['R']}, H={case['H']}, Hk={case['Hk']}, d={case['d']}, {case['dtype']}"
    return f"""\
Forward and backward of attention, replicated time / shared time on the same kernels ({rows[0]["provider"]});
{_machine(rows[0])}; {sizes}.
Below 1 sharing does not pay.

{markdown_table(lines)}"""


def draw_break_even(rows: Rows, path: Path) -> None:
    """A map: N upwards, P / R to the right; the speed-up in each cell."""
    plt = pyplot()
    from matplotlib.colors import TwoSlopeNorm

    counts, ratios, found = _cells(rows)
    values = [[found.get((count, ratio)) or float("nan") for ratio in ratios] for count in counts]
    top = max(2.0, *(v for line in values for v in line if v == v))
    figure, axis = plt.subplots(figsize=(1.5 + 0.75 * len(ratios), 1 + 0.5 * len(counts)))
    axis.imshow(values, origin="lower", aspect="auto", cmap="RdYlGn", norm=TwoSlopeNorm(1.0, 0.5, top))
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            axis.text(x, y, f"{value:.2g}", ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
    axis.set_yticks(range(len(counts)), [str(count) for count in counts])
    axis.set_xlabel("prompt length / response length")
    axis.set_ylabel("responses")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def gpu_tests(report: dict[str, Any], markdown_table: Table) -> str:
    """`make test-gpu`: outcomes by file."""
    outcomes = ("passed", "failed", "skipped", "died", "not run")
    lines: list[tuple[str, ...]] = [("", *outcomes)]
    for name, counts in [*report["files"].items(), ("all", report["total"])]:
        failed = counts.get("failed", 0) + counts.get("error", 0)
        numbers = {**counts, "failed": failed}
        lines.append((f"`{name}`" if name != "all" else name, *(str(numbers.get(o, 0)) for o in outcomes)))
    failures = "".join(f"\n- `{name}`" for name in report["failures"])
    what = report["kernels"] if report.get("kernels") else f"backend {report.get('backend', 'unknown')}"
    seconds = f"; {report['seconds']:.0f} s" if "seconds" in report else ""
    note = f" {report['note']}" if report.get("note") else ""
    return f"""\
{report["gpu"]}, CUDA {report["cuda"]}, torch {report["torch"]}, Python {report["python"]}, commit
{report["commit"][:12]}; {what}{seconds}.{note}

{markdown_table(lines)}{chr(10) + chr(10) + "Not passed:" + chr(10) + failures if failures else ""}"""
