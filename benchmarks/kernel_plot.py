"""The kernels' plots, from the rows that run.py writes: TFLOP/s of forward and backward, bars for each case.
report.py puts them into the documents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kernel_report import FA3, FA4, Passes, Rows, case_name, fastest, merged
from plotting import COLORS, pyplot, thousands

Cases = dict[str, dict[str, Passes]]
CASES_A_LINE = 8
BARS = {  # of the plots, in their order
    "ours, sm_90a": ("ours-sm90a",), "best FA4": FA4, "best FA3": FA3, "cuDNN two-call": ("cudnn-two-call",),
    "FlexAttention": ("flex",), "ours, sm_80": ("ours-sm80",), "FA2 two-call": ("fa2-two-call",),
    "FA2 replicated": ("fa2-replicated",),
}  # fmt: skip


def drawn(rows: Rows) -> Rows:
    """Of shared prompts, as CUDA graphs where a case was timed so: launches dominate it without."""
    rows = [row for row in rows if "N" in row["case"] and row.get("tflops")]
    graphs = {case_name(row) for row in rows if row.get("graph")}
    return [row for row in rows if row.get("graph") or f"{case_name(row)}, graph" not in graphs]


def panels(rows: Rows) -> list[Rows]:
    """Cases of one head dim and dtype beside one another; single ones of others together."""
    kinds: dict[tuple[int, str], Rows] = {}
    for row in rows:
        kinds.setdefault((row["case"]["d"], row["case"]["dtype"]), []).append(row)
    single = [own for own in kinds.values() if len({case_name(row) for row in own}) == 1]
    several = [own for own in kinds.values() if own not in single]
    return several + ([[row for own in single for row in own]] if single else [])


def tick(case: str) -> str:
    """A case's name below its bars, a part a line."""
    name = re.sub(r"(?<==)\d+", lambda found: thousands(int(found[0])), case)
    return name.replace("(131, 2048)", "\n(131,2K)").replace(", ", "\n")


def lines_of(parts: list[Rows]) -> list[list[Cases]]:
    """Panels in lines of at most `CASES_A_LINE` cases, so that a page shows them legibly."""
    lines: list[list[Cases]] = []
    left = 0
    for part in parts:
        cases = list(merged(part).items())
        for begin in range(0, len(cases), CASES_A_LINE):
            piece = dict(cases[begin : begin + CASES_A_LINE])
            if len(piece) > left:
                lines.append([])
                left = CASES_A_LINE
            lines[-1].append(piece)
            left -= len(piece)
    return lines


def draw_line(figure: Any, parts: list[Cases], bars: dict[str, tuple[str, ...]]) -> None:
    """Forward above backward, a group of bars a case, a panel a part."""
    widths = [len(part) for part in parts]
    axes = figure.subplots(
        2, len(parts), sharex="col", sharey="row", squeeze=False, gridspec_kw={"width_ratios": widths}
    )
    width = 0.86 / max(len(bars), 1)
    for line, (direction, title) in zip(axes, (("fwd", "forward"), ("bwd", "backward")), strict=True):
        line[0].set_ylabel(f"{title}, TFLOP/s")
        for axis, cases in zip(line, parts, strict=True):
            there = [[head for head, names in bars.items() if fastest(p, names)] for p in cases.values()]
            for head, names in bars.items():
                own = [(i, p) for i, p in enumerate(cases.values()) if head in there[i]]
                heights = [fastest(p, names).get(direction, {}).get("tflops") or 0 for _, p in own]
                places = [i + (there[i].index(head) - (len(there[i]) - 1) / 2) * width for i, _ in own]
                axis.bar(places, heights, width, color=COLORS.get(head))
            axis.set_xticks(range(len(cases)), map(tick, cases), fontsize=9)
            axis.set_xlim(-0.6, len(cases) - 0.4)
            axis.grid(axis="y", alpha=0.3)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)


def draw(rows: Rows, path: Path) -> None:
    """Forward and backward TFLOP/s of every case."""
    plt = pyplot()
    lines = lines_of(panels(drawn(rows)))
    known = {name for line in lines for part in line for passes in part.values() for name in passes}
    bars = {head: names for head, names in BARS.items() if known.intersection(names)}
    bars = bars or {name: (name,) for name in sorted(known)}
    cases = max(sum(len(part) for part in line) for line in lines)
    figure = plt.figure(figsize=(max(6.0, 1.5 + 1.1 * cases), 0.5 + 4.6 * len(lines)), layout="constrained")
    for place, line in zip(figure.subfigures(len(lines), 1, squeeze=False)[:, 0], lines, strict=True):
        draw_line(place, line, bars)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS.get(head)) for head in bars]
    figure.legend(handles, list(bars), fontsize=9, ncols=4, frameon=False, loc="outside upper center")
    figure.savefig(path, dpi=130)
    plt.close(figure)
