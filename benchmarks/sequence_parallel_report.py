"""Table, memory model and plot of what sequence_parallel.py wrote. report.py puts them into the documents.

Memory of the attention layer on one of SP GPUs:  M0 + c_P P + c_R N R  (GiB), fitted for each SP by least
squares. Everything that grows is spread, so that on more GPUs than were measured c shrinks as 1 / SP.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from built_from import library_of

Rows = list[dict[str, Any]]
FITTED = ("ours", "ulysses-1")
PREDICTED = (4, 8)


class MemoryModel(NamedTuple):
    """GiB: constant, per prompt token, per response token; `error` is the largest relative one of the fit."""

    constant: float
    prompt: float
    response: float
    error: float

    def gib(self, prompt_len: int, num_response_tokens: int, shrink: float = 1.0) -> float:
        return self.constant + shrink * (self.prompt * prompt_len + self.response * num_response_tokens)


def gpus(num: int) -> str:
    return f"{num} GPU" + "s" * (num > 1)


def measured(rows: Rows) -> Rows:
    return [row for row in rows if "error" not in row]


def fit_memory(rows: Rows) -> dict[int, MemoryModel]:
    """SP -> model, where at least three cells of our providers tell their memory."""
    import torch

    found = {}
    for size in sorted({row["sp"] for row in rows}):
        cells = [r for r in measured(rows) if r["sp"] == size and r["provider"] in FITTED and r["peak_gib"]]
        points = {(r["case"]["P"], r["case"]["N"] * r["case"]["R"]): r["peak_gib"] for r in cells}
        if len(points) < 3:
            continue
        matrix = torch.tensor([[1.0, p, n] for p, n in points], dtype=torch.float64)
        peaks = torch.tensor(list(points.values()), dtype=torch.float64)
        scale = matrix.abs().amax(0)
        x = torch.linalg.lstsq(matrix / scale / peaks[:, None], torch.ones(len(points), 1).double())
        solution = x.solution[:, 0] / scale
        error = float(((matrix @ solution) / peaks - 1).abs().max())
        found[size] = MemoryModel(*solution.tolist(), error)
    return found


def predicted(
    models: dict[int, MemoryModel], size: int, prompt_len: int, num_response_tokens: int
) -> float | None:
    """GiB on `size` GPUs by the model of the largest measured number of GPUs below it."""
    known = [n for n in models if 1 < n <= size]
    if not known:
        return None
    return models[max(known)].gib(prompt_len, num_response_tokens, max(known) / size)


def by_prompt(rows: Rows) -> dict[tuple[int, int], Rows]:
    """(P, N) -> its measured rows, for the number of responses that all prompt lengths have."""
    most = max(row["case"]["N"] for row in rows)
    found: dict[tuple[int, int], Rows] = {}
    for row in rows:
        if row["case"]["N"] == most:
            found.setdefault((row["case"]["P"], most), []).append(row)
    return found


def efficiency(row: dict[str, Any], rows: Rows) -> float | None:
    """Time on one GPU over SP times the time on SP of them."""
    one = [r for r in measured(rows) if r["provider"] == "ours" and r["sp"] == 1]
    if not one or row["provider"] == "ours" or "replicated" in row["provider"]:
        return None
    return one[0]["time_ms"] / row["sp"] / row["time_ms"]


def cells(row: dict[str, Any], rows: Rows) -> tuple[str, ...]:
    name = f"{row['provider']}, {gpus(row['sp'])}"
    if "error" in row:
        return (name, row["error"].partition(":")[0], "", "", "", "")
    share, part = row.get("communication_share"), efficiency(row, rows)
    return (
        name,
        f"{row['fwd_ms']:.1f}" if row["fwd_ms"] else "-",
        f"{row['time_ms']:.1f}",
        f"{row['peak_gib']:.1f}" if row["peak_gib"] else "-",
        f"{part:.0%}" if part else "",
        f"{share:.1%}" if share is not None else "",
    )


def text(rows: Rows, markdown_table: Callable[[list[tuple[str, ...]]], str]) -> str:
    """What was run, a table per prompt length, and the memory model."""
    first, parts = rows[0], []
    for (prompt_len, _), cell_rows in by_prompt(rows).items():
        head = (
            f"P = {prompt_len}",
            "forward ms",
            "forward + backward ms",
            "peak GiB",
            "efficiency",
            "exchange",
        )
        parts.append(markdown_table([head, *(cells(row, cell_rows) for row in cell_rows)]))
    c = first["case"]
    where = f"{first['gpu']}, torch {first['torch']}"
    where += f", driver {first['driver']}, CUDA {first['cuda']}" if "driver" in first else ""
    tables = "\n\n".join(parts)
    most = max(r["case"]["N"] for r in rows)
    return f"""\
One attention layer, N={most}, R={c["R"]}, H={c["H"]}, Hk={c["Hk"]}, d={c["d"]}, {c["dtype"]}; {where},
{first["date"]}{library_of(rows)}.
Times are the slowest GPU's median; efficiency: time of one GPU / (GPUs x time); exchange:
part of the time that is not the kernels'. `ulysses-C`: heads exchanged in C chunks; `context`: keys brought
to the queries; `fa2-replicated`: a prompt per response, spread by heads, torch's FlashAttention-2.

{tables}

{memory_text(rows, markdown_table)}"""


def summary(rows: Rows, markdown_table: Callable[[list[tuple[str, ...]]], str]) -> str:
    """A line a prompt length: one GPU, all of them, replicated."""
    first, c = rows[0], rows[0]["case"]
    most = max(row["sp"] for row in rows)
    many, copied = gpus(most), "FA2 replicated"
    lines: list[tuple[str, ...]] = [(
        "P", "1 GPU, ms", f"{many}, ms", "efficiency", f"{copied}, {many}, ms", "GiB of a GPU",
        f"{copied}, GiB",
    )]  # fmt: skip
    for (prompt_len, _), own in by_prompt(rows).items():
        timed = measured(own)
        one = next((r for r in timed if r["provider"] == "ours"), {})
        spread = [r for r in timed if r["sp"] == most and r["provider"] in FITTED]
        best = min(spread, key=lambda r: r["time_ms"], default={})
        peaks = [r["peak_gib"] for r in spread if r["peak_gib"]]
        copies = next((r for r in timed if r["sp"] == most and "replicated" in r["provider"]), {})
        share = efficiency(best, own) if best else None
        lines.append((
            f"{prompt_len // 1024}K", *(f"{r['time_ms']:.0f}" if r else "-" for r in (one, best)),
            f"{share:.0%}" if share else "-", f"{copies['time_ms']:,.0f}" if copies else "-",
            f"{min(peaks):.1f}" if peaks else "-",
            f"{copies['peak_gib']:.1f}" if copies.get("peak_gib") else "-",
        ))  # fmt: skip
    head = f"Forward and backward of one attention layer, N={max(r['case']['N'] for r in rows)}, R={c['R']}, "
    head += f"H={c['H']}, Hk={c['Hk']}, d={c['d']}, {c['dtype']}; {first['gpu']}, torch {first['torch']}, "
    head += f"{first['date']}{library_of(rows)}. Efficiency: time of one GPU / (GPUs x time). "
    head += "`benchmarks/README.md` has every way and the memory model."
    return f"{textwrap.fill(head, 110, break_on_hyphens=False)}\n\n{markdown_table(lines)}"


def memory_text(rows: Rows, markdown_table: Callable[[list[tuple[str, ...]]], str]) -> str:
    models = fit_memory(rows)
    if not models:
        return "Memory was not measured."
    lines = [
        f"{gpus(size)}: {m.constant:.2f} + {m.prompt * 1024:.4f} P/1024 "
        f"+ {m.response * 1024:.4f} N·R/1024 GiB (largest error {m.error:.1%})"
        for size, m in models.items()
    ]
    shapes = {(r["case"]["P"], r["case"]["N"] * r["case"]["R"]) for r in rows}
    most = max(n for _, n in shapes)
    sizes = [n for n in PREDICTED if n > max(models)]
    table: list[tuple[str, ...]] = [("memory by the model, GiB", *(gpus(n) for n in (*models, *sizes)))]
    for prompt_len in sorted({p for p, n in shapes if n == most}):
        known = [models[n].gib(prompt_len, most) for n in models]
        further = [predicted(models, n, prompt_len, most) for n in sizes]
        values = [f"{x:.1f}" if x is not None else "-" for x in (*known, *further)]
        table.append((f"P = {prompt_len}, N·R = {most}", *values))
    note = f" ({', '.join(map(str, sizes))} GPUs: extrapolated from {max(models)})" if sizes else ""
    model = f"Memory model{note}: " + "; ".join(lines) + ".\n\n" + markdown_table(table)
    return model + against_model(rows, models, markdown_table)


def against_model(
    rows: Rows, models: dict[int, MemoryModel], markdown_table: Callable[[list[tuple[str, ...]]], str]
) -> str:
    """Measured peaks on more GPUs than two beside what the model of the fewest (of several) says of them."""
    fewest = min((n for n in models if n > 1), default=0)
    lines = [("peak GiB of a GPU", "GPUs", "measured", f"model of {gpus(fewest)}", "measured / model")]
    for row in measured(rows):
        if fewest and row["sp"] > fewest and row["provider"] in FITTED and row["peak_gib"]:
            tokens = row["case"]["N"] * row["case"]["R"]
            said = models[fewest].gib(row["case"]["P"], tokens, fewest / row["sp"])
            name, ratio = f"P = {row['case']['P']}, N·R = {tokens}", row["peak_gib"] / said
            lines.append((name, str(row["sp"]), f"{row['peak_gib']:.2f}", f"{said:.2f}", f"{ratio:.2f}"))
    return "\n\n" + markdown_table(lines) if len(lines) > 1 else ""


def draw(rows: Rows, path: Path) -> None:
    """Time over GPUs beside the ideal, and memory: measured, fitted, predicted."""
    from plotting import pyplot

    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    models = fit_memory(rows)
    for index, ((prompt_len, n), cell_rows) in enumerate(by_prompt(rows).items()):
        color, label = f"C{index}", f"P = {prompt_len // 1024}K"
        ours = [r for r in measured(cell_rows) if r["provider"] in FITTED]
        if not ours:
            continue
        best = {r["sp"]: r["time_ms"] for r in sorted(ours, key=lambda r: -r["time_ms"])}
        sizes = sorted(best)
        left.loglog(sizes, [best[s] for s in sizes], "o-", color=color, label=label, base=2)
        left.loglog(sizes, [best[sizes[0]] * sizes[0] / s for s in sizes], ":", color=color, base=2)
        for r in measured(cell_rows):
            if "replicated" in r["provider"]:
                left.plot([r["sp"]], [r["time_ms"]], "x", color=color)
        peaks = {r["sp"]: r["peak_gib"] for r in ours if r["peak_gib"]}
        right.plot(list(peaks), list(peaks.values()), "o", color=color, label=label)
        tokens = n * cell_rows[0]["case"]["R"]
        further = sorted({*(s for s in models if s > 1), *PREDICTED}) if any(s > 1 for s in models) else []
        values = [predicted(models, s, prompt_len, tokens) for s in further]
        right.plot(further, values, "--", color=color)
    sizes = sorted({row["sp"] for row in measured(rows)})
    left.set_xticks(sizes, list(map(str, sizes)))
    low, high = left.get_ylim()
    ticks = [4**power for power in range(12) if low <= 4**power <= high]
    left.set_yticks(ticks, list(map(str, ticks)))
    left.set(
        xlabel="GPUs", ylabel="forward + backward, ms", title="dotted: ideal; x: replicated, FlashAttention-2"
    )
    right.set(xlabel="GPUs", ylabel="peak GiB of a GPU", title="dashed: memory model", ylim=(0, None))
    for axis in (left, right):
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
