"""The kernels' tables and plot, from the rows that run.py writes. report.py puts them into the README."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from plotting import pyplot

Rows = list[dict[str, Any]]


def case_name(row: dict[str, Any]) -> str:
    c, graph = row["case"], ", graph" if row.get("graph") else ""
    if "N" not in c:
        return f"B={c['B']}, S={c['S']}, {'causal' if c['causal'] else 'full'}, d={c['d']}{graph}"
    groups = f", {c['groups']} groups" if c["groups"] != 1 else ""
    groups += f", window {c['window_left'] + 1}" if "window_left" in c else ""
    groups += f", Hk={c['Hk']}" if c["Hk"] != 8 else ""
    groups += ", fp16" if c["dtype"] == "fp16" else ""
    return f"N={c['N']}, P={c['P']}, R={c['R']}, d={c['d']}{groups}{graph}"


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
    head = ("", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "peak GiB", "scratch GiB")
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
            memory = [passes["bwd"].get(key) for key in ("peak_gib", "extra_gib")]
            sizes = ("-" if gib is None else f"{gib:.1f}" for gib in memory)
            lines.append((name, *cells(passes["fwd"]), *cells(passes["bwd"]), *sizes))
        for name, passes in providers.items():
            if name not in total:
                lines.append((name, *cells(passes.get("fwd")), *cells(passes.get("bwd")), "-", "-"))
        parts.append(markdown_table(lines))
    return "\n\n".join(parts)


def text(rows: Rows, markdown_table: Callable[[list[tuple[str, ...]]], str]) -> str:
    first = rows[0]
    c = next((r["case"] for r in rows if "N" in r["case"]), first["case"])
    software = f"driver {first['driver']}, CUDA {first['cuda']}, torch {first['torch']}"
    software += f", commit {first.get('commit', 'unknown')[:12]}"
    return f"""\
{first["gpu"]}, {software}, {first["date"]}; H={c["H"]}, Hk={c["Hk"]}, {c["dtype"]}, causal. All providers are
interleaved in one process; medians. TFLOP/s count every visible (query, key) pair once and prompts once:
forward 4 H d (P²/2 + N (P R + R²/2)), backward 2.5 times that. Memory is the backward's: most that was
allocated, inputs included, and what was neither there before nor returned. A dense bf16 matrix product of
8192³ ran at {first["matmul_tflops"]} TFLOP/s in the same run.

{table(rows, markdown_table)}"""


FA4 = ("fa4-two-call", "fa4-gather", "fa4-block-sparse")
PEERS = ("fa2-two-call", "cudnn-two-call", "flex", "gather-varlen", "prefix-grouper", *FA4)


def _tflops(passes: dict[str, dict[str, Any]] | None) -> str:
    values = [(passes or {}).get(direction, {}).get("tflops") for direction in ("fwd", "bwd")]
    return " / ".join("-" if value is None else f"{value:.0f}" for value in values)


def _best(
    providers: dict[str, dict[str, dict[str, Any]]], names: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """The fastest of some ways, pass by pass."""
    best: dict[str, dict[str, Any]] = {}
    for name in names:
        for direction, row in providers.get(name, {}).items():
            if row.get("time_ms") and row["time_ms"] < best.get(direction, {}).get("time_ms", float("inf")):
                best[direction] = row
    return best


def _step(passes: dict[str, dict[str, Any]]) -> float | None:
    times = [passes.get(direction, {}).get("time_ms") for direction in ("fwd", "bwd")]
    return None if None in times else sum(times)


def summary(rows: Rows, markdown_table: Callable[[list[tuple[str, ...]]], str]) -> str:
    """A line a problem: TFLOP/s of ours and the peers', and how much faster our step is than any peer's."""
    columns = {
        "ours, sm_90a": ("ours-sm90a",),
        "ours, sm_80": ("ours-sm80",),
        "FA2 two-call": ("fa2-two-call",),
        "cuDNN two-call": ("cudnn-two-call",),
        "best FA4": FA4,
    }
    measured = {row["provider"] for row in rows if row.get("time_ms")}
    columns = {head: names for head, names in columns.items() if measured.intersection(names)}
    lines: list[tuple[str, ...]] = [("forward / backward, TFLOP/s", *columns, "step")]
    found = merged([row for row in rows if "N" in row["case"]])
    for case, providers in found.items():
        if f"{case}, graph" in found:  # launches dominate without
            continue
        ours = providers.get("ours-sm90a", {})
        steps = [step for name in PEERS if (step := _step(providers.get(name, {}))) is not None]
        own = _step(ours)
        ratio = f"{min(steps) / own:.2f}x" if steps and own else "-"
        lines.append((case, *(_tflops(_best(providers, names)) for names in columns.values()), ratio))
    first = rows[0]
    c = next(row["case"] for row in rows if "N" in row["case"])
    machine = f"{first['gpu']}, CUDA {first['cuda']}, torch {first['torch']}, {first['date']}"
    machine += f", commit {first.get('commit', 'unknown')[:12]}"
    sizes = f"H={c['H']}, Hk={c['Hk']}, {c['dtype']}"
    fa4 = (
        '"best FA4": the fastest of FlashAttention-4\'s three ways, pass by pass.\n'
        if "best FA4" in columns
        else ""
    )
    return f"""\
{machine};
{sizes}; all providers interleaved in one process. "two-call": what a careful user builds from existing
kernels (prompt, responses on the prompt, responses on themselves, merged).
{fa4}"step": time of the fastest peer's forward and backward over ours. `benchmarks/README.md` has every row.

{markdown_table(lines)}"""


def window_ratios(rows: Rows) -> list[str]:
    """Of each windowed case: its time over that of its own pairs at the rate of the case without a window."""
    rates = {}
    for row in rows:
        case = {k: v for k, v in row["case"].items() if k != "window_left"}
        key = (str(sorted(case.items())), row["provider"], row["pass"])
        rates.setdefault(key, {})["window_left" in row["case"]] = row.get("tflops")
    return [
        f"{provider} {direction} {found[False] / found[True]:.2f}"
        for (_, provider, direction), found in rates.items()
        if found.get(True) and found.get(False)
    ]


def layers_text(rows: Rows, markdown_table: Callable[[list[tuple[str, ...]]], str]) -> str:
    """`run.py --cases gemma4`: attention of Gemma-4-31B's layers."""
    first = rows[0]
    ratios = window_ratios(rows)
    windows = "" if not ratios else (
        "\nTime of the windowed layer over that of its own pairs at the rate without a window: "
        + ", ".join(ratios) + "."
    )  # fmt: skip
    where = f"{first['gpu']}, CUDA {first['cuda']}, torch {first['torch']}, {first['date']}"
    case = first["case"]
    return f"""\
Attention of Gemma-4-31B's layers ({where};
{case["dtype"]}, H={case["H"]}, medians; every visible pair counts once, and prompts once).{windows}

{table(rows, markdown_table)}"""


def draw(rows: Rows, path: Path) -> None:
    """Forward and backward TFLOP/s of every provider, one group of bars a case."""
    plt = pyplot()
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
