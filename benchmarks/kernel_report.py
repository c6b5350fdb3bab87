"""The kernels' tables and plot, from the rows that run.py writes. report.py puts them into the README."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def case_name(row: dict[str, Any]) -> str:
    c = row["case"]
    if "N" not in c:
        return f"B={c['B']}, S={c['S']}, {'causal' if c['causal'] else 'full'}, d={c['d']}"
    groups = f", {c['groups']} groups" if c["groups"] != 1 else ""
    groups += f", window {c['window_left'] + 1}" if "window_left" in c else ""
    groups += f", Hk={c['Hk']}" if c["Hk"] != 8 else ""
    return f"N={c['N']}, P={c['P']}, R={c['R']}, d={c['d']}{groups}" + (", graph" if row.get("graph") else "")


def merged(rows: Rows) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """case -> provider -> pass -> row, in the order of the file."""
    out: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for row in rows:
        out.setdefault(case_name(row), {}).setdefault(row["provider"], {})[row["pass"]] = row
    return out


def cells(row: dict[str, Any] | None) -> tuple[str, str]:
    if row is None or row.get("time_ms") is None:
        return "-", "-"
    return f"{row['time_ms']:.3g}" if row["time_ms"] < 1 else f"{row['time_ms']:.1f}", f"{row['tflops']:.0f}"


def table(rows: Rows, markdown_table: Callable[[list[tuple[str, ...]]], str]) -> str:
    head = ("", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "peak GiB")
    parts = []
    for case, providers in merged(rows).items():
        lines: list[tuple[str, ...]] = [(case, *head[1:])]
        total = {
            name: sum(p[d]["time_ms"] for d in ("fwd", "bwd"))
            for name, p in providers.items()
            if all(p.get(d, {}).get("time_ms") for d in ("fwd", "bwd"))
        }
        for name in sorted(total, key=lambda n: total[n]):
            passes = providers[name]
            peak = passes["bwd"].get("peak_gib")
            memory = "-" if peak is None else f"{peak:.1f}"
            lines.append((name, *cells(passes["fwd"]), *cells(passes["bwd"]), memory))
        for name, passes in providers.items():
            if name not in total:
                lines.append((name, *cells(passes.get("fwd")), *cells(passes.get("bwd")), "-"))
        parts.append(markdown_table(lines))
    return "\n\n".join(parts)


def text(rows: Rows, markdown_table: Callable[[list[tuple[str, ...]]], str]) -> str:
    first = rows[0]
    c = next((r["case"] for r in rows if "N" in r["case"]), first["case"])
    software = f"driver {first['driver']}, CUDA {first['cuda']}, torch {first['torch']}"
    return f"""\
{first["gpu"]}, {software}, {first["date"]}; H={c["H"]}, Hk={c["Hk"]}, {c["dtype"]}, causal. All providers are
interleaved in one process; medians. TFLOP/s count every visible (query, key) pair once and prompts once:
forward 4 H d (P²/2 + N (P R + R²/2)), backward 2.5 times that. A dense bf16 matrix product of 8192³ ran at
{first["matmul_tflops"]} TFLOP/s in the same run.

{table(rows, markdown_table)}"""


def draw(rows: Rows, path: Path) -> None:
    """Forward and backward TFLOP/s of every provider, one group of bars a case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = {k: v for k, v in merged(rows).items() if k.startswith("N=") and not k.endswith("graph")}
    names = list(dict.fromkeys(name for providers in cases.values() for name in providers))
    figure, axes = plt.subplots(2, 1, figsize=(1.5 + 2.2 * len(cases), 6), sharex=True)
    width = 0.8 / max(len(names), 1)
    for axis, direction, title in zip(axes, ("fwd", "bwd"), ("forward", "backward"), strict=True):
        for index, name in enumerate(names):
            heights = [p.get(name, {}).get(direction, {}).get("tflops") or 0 for p in cases.values()]
            places = [i + (index - (len(names) - 1) / 2) * width for i in range(len(cases))]
            axis.bar(places, heights, width, label=name)
        axis.set_ylabel(f"{title} TFLOP/s")
        axis.set_xticks(range(len(cases)), list(cases), fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=7, ncols=4, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
