"""Tables and plot of what decoder_layer.py wrote; report.py puts them into benchmarks/README.md.

Memory law: peak GiB = base + slope x rows in the layer (+ slope x N P where the prompt's keys are copied for
each response), by least squares of the relative deviation over a provider's cells. rho, the token ratio:
replicated over packed rows, of the lengths drawn and as N (P + R) / (P + N R) predicts.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from attention_report import machine_of
from kernel_report import overlap
from plotting import COLORS, pyplot
from plotting import thousands as short

Rows = list[dict[str, Any]]
Table = Callable[[list[tuple[str, ...]]], str]
Cells = dict[tuple[int, int], dict[str, dict[str, Any]]]
OURS, BASE = "ours", "fa2-replicated"
GATHERED = ("gather-varlen", "prefix-grouper")  # which copy the prompt's keys and values
REPEATING = (BASE, "cudnn-padded")  # whose batches repeat the prompt
MEAN_LENGTH = (131 + 2048) / 2
FIRST_MS = 2000.0  # of rows that do not say it: above, the first run stands


def cells_of(rows: Rows) -> Cells:
    """(prompt length, micro-batch) -> provider -> row."""
    found: Cells = {}
    for row in rows:
        found.setdefault((row["case"]["P"], row["case"]["mb"]), {})[row["provider"]] = row
    return dict(sorted(found.items()))


def milliseconds(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if row.get("time_ms") is None:
        return "OOM" if row.get("out_of_memory") else "-"
    return f"{row['time_ms']:.3g}" if row["time_ms"] < 100 else f"{row['time_ms']:.0f}"


def marked(row: dict[str, Any] | None) -> str:
    """With a star where a first run, which nothing warmed up, stands."""
    if row is None or not row.get("time_ms"):
        return milliseconds(row)
    return milliseconds(row) + "*" * (not row.get("warmed", row["time_ms"] < FIRST_MS))


def fastest_peer(cell: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    timed = [row for name, row in cell.items() if name != OURS and row.get("time_ms")]
    return min(timed, key=lambda row: row["time_ms"], default=None)


def grid(cells: Cells, value: Callable[[dict[str, dict[str, Any]]], str]) -> list[tuple[str, ...]]:
    """Prompt lengths down, micro-batches across."""
    prompts, counts = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    lines: list[tuple[str, ...]] = [
        ("P", *("1 response" if count == 1 else f"{count} responses" for count in counts))
    ]
    for prompt in prompts:
        found = [cells.get((prompt, count), {}) for count in counts]
        lines.append((short(prompt), *(value(cell) for cell in found)))
    return lines


def versus_peer(cell: dict[str, dict[str, Any]]) -> str:
    """Our time, and how many times as long the fastest peer takes (bold where it wins)."""
    own, peer = cell.get(OURS), fastest_peer(cell)
    if own is None or not own.get("time_ms") or peer is None:
        return milliseconds(own)
    ratio = peer["time_ms"] / own["time_ms"]
    text = f"{ratio:.2f}x {peer['provider']}"
    return f"{milliseconds(own)}; {text if ratio >= 1 else f'**{text}**'}"


def lost_text(cells: Cells) -> str:
    """In how many cells which is faster, and in how many of these by less than the rounds vary."""
    pairs = [(cell.get(OURS), fastest_peer(cell)) for cell in cells.values()]
    timed = [(own, peer) for own, peer in pairs if own and own.get("time_ms") and peer]
    lost = [(own, peer) for own, peer in timed if peer["time_ms"] < own["time_ms"]]
    close = [peer for own, peer in lost if overlap(own, peer)]
    within = sum(overlap(own, peer) for own, peer in timed) - len(close)
    won = f" (in {within} of them the rounds of both overlap)" if within else ""
    if not lost:
        return f"Ours is ahead in all of {len(timed)} cells with both{won}."
    ahead = f"Ours is ahead in {len(timed) - len(lost)} of {len(timed)} cells with both{won}"
    overlapping = "the rounds of both overlap (20th to 80th percentile)"
    which = f"{len(close)} of the other {len(lost)}"
    if len(close) == len(lost):
        which = "the other" if len(lost) == 1 else f"all {len(lost)} others"
    return textwrap.fill(f"{ahead}; in {which} {overlapping}.", 110)


def sharing_ratios(rows: Rows) -> dict[tuple[int, int], tuple[float, str, bool]]:
    """Of cells with several responses: the fastest other way that stores a prompt once, over ours; who;
    whether their rounds overlap.
    """
    ratios = {}
    for (prompt, count), cell in cells_of(rows).items():
        own = cell.get(OURS, {})
        peer = fastest_peer({name: row for name, row in cell.items() if name not in REPEATING})
        if count > 1 and own.get("time_ms") and peer:
            ratios[prompt, count] = (peer["time_ms"] / own["time_ms"], peer["provider"], overlap(own, peer))
    return ratios


def versus_replicated(cell: dict[str, dict[str, Any]]) -> str:
    """Times as fast as FA2 on replicated rows, and the ratio of executed FLOPs."""
    own, base = cell.get(OURS, {}), cell.get(BASE, {})
    if not own.get("flops") or not base.get("flops"):
        return "-"
    ratio = base["flops"] / own["flops"]
    if not own.get("time_ms") or not base.get("time_ms"):
        return f"OOM ({ratio:.2f})" if base.get("out_of_memory") and own.get("time_ms") else "-"
    return f"{base['time_ms'] / own['time_ms']:.2f}x ({ratio:.2f})"


def frontier(cells: Cells) -> list[tuple[str, ...]]:
    """Largest micro-batch that each provider ran, a line a provider; "< N": N ran out at a shorter prompt."""
    prompts = sorted({prompt for prompt, _ in cells})
    providers = list(dict.fromkeys(name for cell in cells.values() for name in cell))
    lines: list[tuple[str, ...]] = [("largest micro-batch at P", *map(short, prompts))]
    for name in providers:
        line = []
        for prompt in prompts:
            own = {count: cell[name] for (p, count), cell in cells.items() if p == prompt and name in cell}
            ran = [count for count, row in own.items() if row.get("time_ms")]
            full = any(row.get("out_of_memory") for row in own.values())
            lost = [
                n for (p, n), cell in cells.items() if p < prompt and cell.get(name, {}).get("out_of_memory")
            ]
            unknown = "0" if full else f"< {min(lost)}" if lost else "-"
            line.append(unknown if not ran else f"{max(ran)}" if full else f"≥ {max(ran)}")
        lines.append((name, *line))
    return lines


def memory_law(rows: Rows, provider: str) -> tuple[float, float, float, float] | None:
    """GiB at no rows, KiB a row in the layer, KiB a copied prompt row, largest relative deviation."""
    own = [row for row in rows if row["provider"] == provider and row.get("peak_gib")]
    if len({row["rows"] for row in own}) < 4:
        return None
    peaks = np.array([row["peak_gib"] for row in own])
    copies = [row["case"]["P"] * row["case"]["mb"] for row in own]
    columns = [np.ones(len(own)), [row["rows"] for row in own], copies]
    if provider not in GATHERED:  # their rows hold the copies, or there are none
        columns.pop()
    factors = np.stack(columns, 1).astype(float) / peaks[:, None]
    found = np.linalg.lstsq(factors, np.ones(len(own)), rcond=None)[0]  # relative deviations
    worst = float(abs(factors @ found - 1).max())
    base, slope, copy = (*found, 0.0)[:3]
    return float(base), float(slope) * 2**20, float(copy) * 2**20, worst


def law_text(law: tuple[float, float, float, float]) -> str:
    base, slope, copy, worst = law
    copied = f" + {copy:.1f} KiB a copied prompt row" if copy else ""
    return f"{base:.1f} GiB + {slope:.0f} KiB a row{copied} (within {worst:.0%})"


def memory_text(rows: Rows, cells: Cells, table: Table) -> str:
    """Peak memory against the prompt at one micro-batch, the law, and the ratio of tokens."""
    providers = [n for n in dict.fromkeys(r["provider"] for r in rows) if memory_law(rows, n)]
    count = 8 if any(key[1] == 8 for key in cells) else max(key[1] for key in cells)
    prompts = [prompt for prompt, n in cells if n == count]
    lines: list[tuple[str, ...]] = [(f"peak GiB, {count} responses, P", *map(short, prompts), "law")]
    for name in providers:
        values = [cells[prompt, count].get(name, {}) for prompt in prompts]
        law = memory_law(rows, name)
        assert law is not None
        known = [f"{v['peak_gib']:.1f}" if v.get("peak_gib") else milliseconds(v) for v in values]
        lines.append((name, *known, law_text(law)))
    measured, predicted = [], []
    for prompt in prompts:
        case = cells[prompt, count][next(iter(cells[prompt, count]))]["case"]
        packed = prompt + case["tokens"]
        measured.append(f"{(count * prompt + case['tokens']) / packed:.2f}")
        expected = count * (prompt + MEAN_LENGTH) / (prompt + count * MEAN_LENGTH)
        predicted.append(f"{expected:.2f}")
    lines.append(("rho, tokens replicated / packed", *measured, "of the lengths drawn"))
    lines.append(("rho, predicted", *predicted, "N (P + R) / (P + N R), R = 1,090"))
    return table(lines)


def every_way(cells: Cells, table: Table) -> str:
    """Milliseconds of all ways, a line a cell."""
    names = list(dict.fromkeys(name for cell in cells.values() for name in cell))
    lines: list[tuple[str, ...]] = [("P, responses", *names)]
    for (prompt, count), cell in cells.items():
        lines.append((f"{short(prompt)}, {count}", *(marked(cell.get(name)) for name in names)))
    return f"""\
<details><summary>Milliseconds of every way (*: its first run; OOM: out of memory)</summary>

{table(lines)}

</details>"""


def run_of(row: dict[str, Any]) -> tuple[str | None, str]:
    return row.get("gpu_uuid"), row["commit"]


def text(rows: Rows, table: Table) -> str:
    """Time, against whom, out of memory, memory."""
    cells, first = cells_of(rows), rows[0]
    errors = {
        row["provider"]: row["error"] for row in rows if row.get("error") and not row.get("out_of_memory")
    }
    others = Counter(row["provider"] for row in rows if run_of(row) != run_of(first))
    every = Counter(row["provider"] for row in rows)
    named = (n if count == every[n] else f"{n} in {count} cells" for n, count in sorted(others.items()))
    apart = f"Measured in other runs, on GPUs of the same kind: {', '.join(named)}." if others else ""
    apart = apart and "\n" + textwrap.fill(apart, 110, break_on_hyphens=False)
    missing = "".join(f"\n{name} did not run: {error}." for name, error in errors.items())
    return f"""\
{machine_of(first)}.
One decoder layer of Qwen3-8B's shape, forward and backward, bf16, one prompt of P tokens and responses of
U(131, 2048). Milliseconds of ours; then how many times as long the fastest other way takes, and which it is.
Bold: it is faster than ours.{apart}{missing}
{lost_text(cells)}

{table(grid(cells, versus_peer))}

How many times as fast as FlashAttention-2 on replicated rows without padding (in brackets how many times as
many FLOPs that executes); OOM: it ran out of memory.

{table(grid(cells, versus_replicated))}

{every_way(cells, table)}

{table(frontier(cells))}

{memory_text(rows, cells, table)}"""


def draw_map(axis: Any, cells: Cells, base: str) -> None:
    """Times as fast as `base`, prompts upwards, micro-batches to the right; who ran out of memory."""
    from matplotlib.colors import LogNorm

    prompts, counts = (sorted({key[place] for key in cells}) for place in (0, 1))

    def value(prompt: int, count: int) -> float:
        cell = cells.get((prompt, count), {})
        times = [cell.get(name, {}).get("time_ms") for name in (base, OURS)]
        return times[0] / times[1] if all(times) else float("nan")

    values = [[value(prompt, count) for count in counts] for prompt in prompts]
    span = max([1.1, *(max(v, 1 / v) for line in values for v in line if v == v)])
    axis.imshow(values, origin="lower", aspect="auto", cmap="RdBu", norm=LogNorm(1 / span, span), alpha=0.8)
    for y, prompt in enumerate(prompts):
        for x, count in enumerate(counts):
            number, cell = values[y][x], cells.get((prompt, count), {})
            full = [name for name in (OURS, base) if cell.get(name, {}).get("out_of_memory")]
            who = full[0].removeprefix("fa2-") if full else ""
            word = f"{number:.2f}" if number == number else f"{who}:\nout of\nmemory" if who else ""
            color = "white" if number > span**0.7 else "black"
            axis.text(x, y, word, ha="center", va="center", fontsize=6 if full else 8, color=color)
    axis.set_xticks(range(len(counts)), list(map(str, counts)))
    axis.set_yticks(range(len(prompts)), list(map(short, prompts)))
    axis.set(xlabel="responses", ylabel="prompt tokens", title=f"ours: times as fast as {base}")


def draw_memory(axis: Any, cells: Cells, count: int) -> None:
    """Peak memory over the prompt, a line a way."""
    for name in dict.fromkeys(name for cell in cells.values() for name in cell):
        points = [
            (p, cell[name]["peak_gib"])
            for (p, n), cell in cells.items()
            if n == count and cell.get(name, {}).get("peak_gib")
        ]
        if points:
            style = dict(color=COLORS.get(name), linewidth=2.5 if name == OURS else 1.2)
            axis.plot(*zip(*points, strict=True), "o-", markersize=3, label=name, **style)
    prompts = sorted({p for p, n in cells if n == count})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(prompts, list(map(short, prompts)))
    low, high = axis.get_ylim()
    ticks = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if low <= size <= high]
    axis.set_yticks(ticks, list(map(str, ticks)))
    axis.set(xlabel="prompt tokens", ylabel="peak GiB", title=f"memory, {count} responses")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, frameon=False)


def draw(rows: Rows, path: Path) -> None:
    """Speed over FA2 on replicated rows and over FA4's two calls, cell by cell; memory over the prompt."""
    plt = pyplot()
    cells = cells_of(rows)
    counts = sorted({count for _, count in cells})
    bases = [base for base in (BASE, "fa4-two-call") if any(base in cell for cell in cells.values())]
    figure, axes = plt.subplots(1, len(bases) + 1, figsize=(5 * (len(bases) + 1), 4.4), layout="constrained")
    for axis, base in zip(axes, bases, strict=False):
        draw_map(axis, cells, base)
    draw_memory(axes[-1], cells, 8 if 8 in counts else counts[-1])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
