"""Texts and plots of error_growth.py, break_even.py, cpu_attention.py; report.py puts them into documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from plotting import COLORS, pyplot

Rows = list[dict[str, Any]]
Table = Callable[[list[tuple[str, ...]]], str]


def machine_of(first: dict[str, Any]) -> str:
    """Where a row was measured."""
    software = f"CUDA {first['cuda']}, torch {first['torch']}"
    return f"{first['gpu']}, {software}, {first['date']}, commit {first['commit'][:12]}"


def _axis(row: dict[str, Any]) -> int:
    case = row["case"]
    return case["N"] if row["axis"] == "N" else case["H"] // case["Hk"]


def error_growth(rows: Rows, markdown_table: Table) -> str:
    """Relative rms error of the prompt's dK and dV, a line a provider, over N and over the GQA ratio."""
    case = rows[0]["case"]
    sizes = f"P={case['P']}, R={case['R']}, d={case['d']}, {case['dtype']}"
    apart = {row["provider"]: row["commit"][:12] for row in rows if row["commit"] != rows[0]["commit"]}
    others = "".join(f"\nBeside library {commit}, in another run: {name}." for name, commit in apart.items())
    parts = [
        f"""\
{machine_of(rows[0])};
{sizes}; relative rms error of the prompt's dK / dV against fp64, in 1e-3. Ours sums in fp32 over all
responses and query heads.{others}"""
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
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    labels = (("N", "responses on one prompt"), ("ratio", "query heads of a key head"))
    names = list(dict.fromkeys(row["provider"] for row in rows))
    for axis, (kind, label) in zip(axes, labels, strict=True):
        ticks = sorted({_axis(row) for row in rows if row["axis"] == kind})
        for index, name in enumerate(names):
            chosen = [r for r in rows if r["axis"] == kind and r["provider"] == name and "dk" in r]
            points = sorted((_axis(row), 1e3 * row["dk"]) for row in chosen)
            style = dict(color=COLORS.get(name), marker="osv^D"[index % 5], markersize=9 - index % 5)
            style |= dict(fillstyle="none" if index % 2 else "full", linewidth=1.2, zorder=2 + 0.1 * index)
            if points:
                axis.plot(*zip(*points, strict=True), label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, list(map(str, ticks)))
        axis.set_xlabel(label)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative rms error of the prompt's dK, 1e-3")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=7, frameon=False, loc="outside right center")
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
    graphs = "Calls are replayed as CUDA graphs; c" if all(row.get("graph") for row in rows) else "C"
    return f"""\
Forward and backward of attention, replicated time / shared time on the same kernels ({rows[0]["provider"]});
{machine_of(rows[0])}; {sizes}.
{graphs}opying the prompt is not timed. Below 1 sharing does not pay.

{markdown_table(lines)}"""


def draw_break_even(rows: Rows, path: Path) -> None:
    """A map: N upwards, P / R to the right; the speed-up in each cell."""
    plt = pyplot()
    from matplotlib.colors import LogNorm

    counts, ratios, found = _cells(rows)
    values = [[found.get((count, ratio)) or float("nan") for ratio in ratios] for count in counts]
    span = max([2.0, *(max(v, 1 / v) for line in values for v in line if v == v)])
    size = (1.5 + 0.75 * len(ratios), 1.4 + 0.5 * len(counts))
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    axis.imshow(values, origin="lower", aspect="auto", cmap="RdBu", norm=LogNorm(1 / span, span), alpha=0.8)
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            color = "white" if value > span**0.7 else "black"
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
    axis.set_xticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
    axis.set_yticks(range(len(counts)), [str(count) for count in counts])
    axis.set_xlabel("prompt length / response length")
    axis.set_ylabel("responses")
    axis.set_title("attention, replicated time / shared time (red: sharing does not pay)", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def cpu_attention(report: dict[str, Any], markdown_table: Table) -> str:
    """`benchmarks/cpu_attention.py`: time beside SDPA; with a prompt, beside SDPA on replicated rows."""
    machine = report["machine"]
    head = ("", "dtype", "heads", "forward ms", "backward ms", "SDPA forward", "SDPA backward", "SDPA / ours")
    lines: list[tuple[str, ...]] = [head]
    for row in report["rows"]:
        if "fwd_ms" in row:
            names = ("fwd_ms", "bwd_ms", "sdpa_fwd_ms", "sdpa_bwd_ms")
            heads = f"{row['num_heads']}/{row['num_heads_k']} x {row['head_dim']}"
            times = (f"{row[name]:.0f}" for name in names)
            lines.append((row["name"], row["dtype"], heads, *times, f"{row['speedup']:.2f}"))
    memory = next((row for row in report["rows"] if "extra_gib" in row), None)
    grown = "" if memory is None else (
        f"\n\nA step at {memory['name'].removeprefix('memory: ')} raises the process's peak by "
        f"{memory['extra_gib']:.2f} GiB; its tensors and\ngradients are {memory['tensors_gib']:.2f}."
    )  # fmt: skip
    return f"""\
{machine["num_threads"]} threads of {machine["cpu"]}, torch {machine["torch"]}, {machine["date"]}, commit
{machine["commit"][:12]}. `F.scaled_dot_product_attention` (is_causal) gets the same rows; where there is a
prompt, each response with its copy of it; with a window or softcap, for which it has no option, it computes
plain causal attention. Below 1 it is faster than ours.

{markdown_table(lines)}{grown}"""
