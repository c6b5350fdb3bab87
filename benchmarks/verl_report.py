"""Table and plot of what verl_updates.py wrote: passes of veRL's real worker, shared and replicated.
report.py puts them into the documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from built_from import library_of

Rows = list[dict[str, Any]]
Table = Callable[[list[tuple[str, ...]]], str]

MODELS = {"qwen3-8b": ("Qwen3-8B", 36), "qwen3-30b-a3b": ("Qwen3-30B-A3B", 48)}
SHARED, OWN, TORCH = "shared", "verl-flash_attention_2", "verl-torch-fa2"
PASSES = ("policy_update", "old_log_prob", "ref_log_prob")
STEPS = {"GRPO": PASSES, "DAPO": PASSES[:2]}  # what a step of each consists of, generation aside


def place_of(row: dict[str, Any]) -> str:
    """Model, layers where these are fewer, processes."""
    model, num_layers = MODELS.get(row["model"], (row["model"], row["num_layers"]))
    cut = f", {row['num_layers']} of {num_layers} layers" if row["num_layers"] != num_layers else ""
    spread = "".join(f", {kind.upper()}={row[kind]}" for kind in ("dp", "sp") if row[kind] > 1)
    return f"{model}{cut}{spread}"


def name_of(row: dict[str, Any]) -> str:
    """Where, and the micro-batches of a mini-batch."""
    several = f"{row['num_micro_batches']} " if row["num_micro_batches"] > 1 else ""
    ending = "es of" if several else ""
    return f"{place_of(row)}, {several}micro-batch{ending} {row['micro_batch']}"


def cells(rows: Rows) -> list[dict[str, dict[str, Any]]]:
    """provider -> row of every pass that the plug-in ran, in the order measured."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((name_of(row), row["pass"]), {})[row["provider"]] = row
    return [cell for cell in found.values() if "seconds" in cell.get("shared", {})]


def speedup(cell: dict[str, dict[str, Any]], provider: str) -> float | None:
    """Of the shared pass over this replicated one."""
    seconds = cell.get(provider, {}).get("seconds")
    return seconds / cell["shared"]["seconds"] if seconds else None


def _number(row: dict[str, Any] | None, name: str, form: str) -> str:
    if row is None:
        return "-"
    if "error" in row:
        return "out of memory"
    return format(row[name], form) + "*" * (name == "seconds" and not row["num_repeats"])


def largest(rows: Rows) -> str:
    """Of each model the largest micro-batch of a policy update that fitted, and the smallest that did not."""
    parts = []
    names = {SHARED: "shared", OWN: "veRL"}
    updates = [row for row in rows if row["pass"] == "policy_update" and row["provider"] in names]
    for place in dict.fromkeys(place_of(row) for row in updates):
        for provider, name in names.items():
            own = [row for row in updates if place_of(row) == place and row["provider"] == provider]
            fitted = [row["micro_batch"] for row in own if "seconds" in row]
            failed = [row["micro_batch"] for row in own if "error" in row]
            if failed:
                parts.append(f"{place}, {name}: {max(fitted, default=0)} (not {min(failed)})")
    return f"\n\nLargest micro-batch of a policy update: {'; '.join(parts)}." if parts else ""


def table_of(own: list[dict[str, dict[str, Any]]], table: Table) -> str:
    """A line a pass."""
    lines: list[tuple[str, ...]] = [(
        "", "shared s", "veRL s", "veRL, torch's FA2 s", "speed-up", "FLOPs", "of FLOPs",
        "over torch's FA2", "shared GiB", "veRL GiB",
    )]  # fmt: skip
    for cell in own:
        shared = cell["shared"]
        gain, over_torch = speedup(cell, OWN), speedup(cell, TORCH)
        ratio = shared["flop_ratio"]
        lines.append((
            f"{name_of(shared)}: {shared['pass'].replace('_', ' ')}",
            *(_number(cell.get(p), "seconds", ".2f") for p in ("shared", OWN, TORCH)),
            "-" if gain is None else f"{gain:.2f}x", f"{ratio:.2f}x",
            "-" if gain is None else f"{gain / ratio:.0%}",
            "-" if over_torch is None else f"{over_torch:.2f}x",
            *(_number(cell.get(p), "peak_gib", ".1f") for p in ("shared", OWN)),
        ))  # fmt: skip
    return table(lines)


def steps(rows: Rows) -> list[dict[str, dict[str, Any]]]:
    """As `cells`, the passes of a GRPO and of a DAPO step together, where all of them were measured."""
    found = []
    for name in dict.fromkeys(name_of(cell["shared"]) for cell in cells(rows)):
        of_pass = {c["shared"]["pass"]: c for c in cells(rows) if name_of(c["shared"]) == name}
        for step, names in STEPS.items():
            step_cell = {}
            for provider in (SHARED, OWN, TORCH):
                parts = [of_pass.get(each, {}).get(provider, {}) for each in names]
                if all("seconds" in part for part in parts):
                    step_cell[provider] = added(parts) | {"pass": f"{step} step"}
            if SHARED in step_cell and OWN in step_cell:
                found.append(step_cell)
    return found


def added(parts: Rows) -> dict[str, Any]:
    """Passes one after the other as one row."""
    flops = sum(row["flops"] for row in parts)
    return {
        **parts[0], "flops": flops, "seconds": sum(row["seconds"] for row in parts),
        "flop_ratio": sum(row["flop_ratio"] * row["flops"] for row in parts) / flops,
        "peak_gib": max(row["peak_gib"] for row in parts),
        "num_repeats": min(row["num_repeats"] for row in parts),
    }  # fmt: skip


def smallest_degree(rows: Rows) -> str:
    """Where replicated rows fit with sequence parallelism only: shared ones without it beside them, in
    seconds of a policy update for each group of rows, since the numbers of data-parallel ranks differ."""
    lines = []
    updates = [row for row in rows if row["pass"] == "policy_update" and "seconds" in row]
    for shared in (row for row in updates if row["provider"] == SHARED and row["sp"] == 1):
        same = {name: shared[name] for name in ("model", "num_layers", "micro_batch", "num_micro_batches")}
        for provider in (OWN, TORCH):
            own = [
                row for row in updates
                if row["provider"] == provider and row["dp"] * row["sp"] == shared["dp"]
                and all(row[name] == value for name, value in same.items())
            ]  # fmt: skip
            first = min(own, key=lambda row: row["sp"], default=shared)
            if first["sp"] > 1:
                per_group = [row["seconds"] / row["dp"] for row in (shared, first)]
                lines.append(
                    f"{name_of(shared)}: {per_group[0]:.3f} s a group, {provider} with SP={first['sp']} "
                    f"{per_group[1]:.3f} s: {per_group[1] / per_group[0]:.2f} times"
                )
    return "\n\nShared without sequence parallelism against replicated with the least that fits: " * bool(
        lines
    ) + "; ".join(lines)


def passes(rows: Rows, table: Table) -> str:
    """Every pass, and the steps that they make up."""
    return table_of([*cells(rows), *steps(rows)], table) + smallest_degree(rows)


def text(rows: Rows, table: Table) -> str:
    """Policy updates, and what was run."""
    updates = [cell for cell in cells(rows) if cell["shared"]["pass"] == "policy_update"]
    first = rows[0]
    date = f"{first['date']}{library_of(rows)}"
    lens = [length for row in rows for own in row["response_lens"] for length in own]
    return f"""\
{first["gpu"]}, driver {first["driver"]}, CUDA {first["cuda"]}, torch {first["torch"]}, {date}:
veRL's TrainingWorker on FSDP2, random weights, bf16 (optimizer states too), gradient checkpointing; one group
a micro-batch, a prompt of {first["prompt_len"]:,} tokens and responses of {min(lens):,} to {max(lens):,}.
"veRL" is its own path with this package's `flash_attention_2`, and the speed-up is over it; "FLOPs" is how
many times as many that path executes. A policy update is loss, backward and optimizer step. Medians of 1 to 3
runs after one to warm up; *: that first run. `benchmarks/README.md` has the log-probs too.

{table_of(updates, table)}{largest(rows)}"""


def draw(rows: Rows, path: Path) -> None:
    """Speed-up beside the ratio of FLOPs."""
    from plotting import pyplot

    plt = pyplot()
    own = [cell for cell in cells(rows) if speedup(cell, OWN) is not None]
    names = [f"{name_of(c['shared'])}\n{c['shared']['pass']}" for c in own]
    figure, axis = plt.subplots(figsize=(7.5, 0.9 + 0.42 * len(own)), layout="constrained")
    at = range(len(own))
    axis.barh(at, [speedup(cell, OWN) for cell in own], color="#1f4e9c", label="measured")
    ratios = [cell["shared"]["flop_ratio"] for cell in own]
    axis.plot(ratios, at, "|", color="black", markersize=14, label="ratio of FLOPs")
    axis.axvline(1, color="#888888", linewidth=0.8)
    axis.set_yticks(at, names, fontsize=7)
    axis.margins(y=0.01)
    axis.invert_yaxis()
    axis.set_xlabel("times as fast as veRL's own path")
    axis.legend(frameon=False, loc="upper right")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
