"""The README's first table: what sharing gains, one line from each kind of measurement.

The cells are fixed here, so that a line shows the same problem whatever the figures are.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from decoder_layer_report import sharing_ratios
from kernel_report import step_ratios
from plotting import thousands

Rows = list[dict[str, Any]]
GPU = "nvidia_h200"


def find(rows: Rows, **wanted: Any) -> dict[str, Any]:
    """The first row, or case of a row, that has these values."""
    for row in rows:
        facts = row | row.get("case", {})
        if all(facts.get(key) == value for key, value in wanted.items()) and not row.get("error"):
            return row
    return {}


def times(milliseconds: float) -> str:
    return f"{milliseconds / 1000:,.1f} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def line(name: str, replicated: float | None, shared: float | None) -> list[tuple[str, ...]]:
    """Milliseconds of both ways; no line where one was not measured."""
    if not replicated or not shared:
        return []
    factor = replicated / shared
    return [(name, times(replicated), times(shared), f"{factor:.{1 if factor >= 1 else 2}f}x")]


def attention(rows: Rows, provider: str, n: int, p: int, r: int) -> float | None:
    """Forward and backward."""
    passes = [
        find(rows, provider=provider, N=n, P=p, R=r, d=128, dtype="bf16", **{"pass": d})
        for d in ("fwd", "bwd")
    ]
    return sum(row["time_ms"] for row in passes) if all(passes) else None


def span(numbers: list[int]) -> str:
    """The smallest and the largest."""
    return f"{min(numbers):,}" + (f" to {max(numbers):,}" if min(numbers) < max(numbers) else "")


def demo_line(demo: dict[str, Any]) -> list[tuple[str, ...]]:
    """`make demo`: the whole update."""
    case, groups = demo["case"], demo["groups"]
    seconds = [demo["variants"][way]["total_seconds"] for way in ("replicated", "shared")]
    prompts = span([group["prompt"] for group in groups])
    lengths = span([length for group in groups for length in group["responses"]])
    name = f"`make demo`, a whole update (old log-probs to optimizer step) of {case['model']} on a CPU: "
    name += (
        f"{case['num_groups']} prompts of {prompts} tokens, {case['num_responses']} responses of {lengths} "
    )
    return line(f"{name}to each", *(1000 * x for x in seconds))


def trl_line(updates: Rows) -> list[tuple[str, ...]]:
    """TRL's update; says where one round was timed, or some of the rows, and the time scaled."""
    cell = dict(model="qwen3-1.7b", groups=8, P=4096, N=8, R=512)
    ways = [
        find(updates, provider=f"trl-replicated-{kind}", **cell) for kind in ("sdpa", "flash_attention_2")
    ]
    best = min((row for row in ways if row), key=lambda row: row["time_ms"], default={})
    shared = find(updates, provider="trl-shared", **cell)
    name = "TRL's update (loss and backward), Qwen3-1.7B: 8 prompts of 4,096, 8 responses of 512 to each"
    if best and shared:
        rows = cell["N"] * cell["groups"]
        parts = [f"{row['timed_rows']} {way}" for row, way in ((best, "replicated"), (shared, "shared"))
                 if row["timed_rows"] < rows]  # fmt: skip
        notes = [f"{' and '.join(parts)} of {rows} rows timed, scaled to all"] if parts else []
        notes += ["one round"] if 1 in (best["repeats"], shared["repeats"]) else []
        name += f" ({'; '.join(notes)})" if notes else ""
    return line(name, best.get("time_ms"), shared.get("time_ms"))


def verl_line(passes: Rows) -> list[tuple[str, ...]]:
    """A policy update of veRL's worker with one micro-batch."""
    cell = dict(model="qwen3-8b", micro_batch=8, num_micro_batches=1, dp=1, sp=1)
    found = [
        find(passes, provider=way, **cell, **{"pass": "policy_update"})
        for way in ("verl-torch-fa2", "shared")
    ]
    if not all(found):
        return []
    lengths = [length for group in found[1]["response_lens"] for length in group]
    name = "veRL's policy update (loss, backward, optimizer step), Qwen3-8B: "
    name += f"a prompt of {found[1]['prompt_len']:,}, {len(lengths)} responses of {span(lengths)}"
    return line(name, *(1000 * row["seconds"] for row in found))


def layer_line(layer: Rows) -> list[tuple[str, ...]]:
    """A decoder layer; its file has the sum of the lengths drawn."""
    found = [find(layer, provider=way, P=16384, mb=8) for way in ("fa2-replicated", "ours")]
    if not all(found):
        return []
    name = "a decoder layer of Qwen3-8B, forward and backward: a prompt of 16,384, "
    name += f"8 responses of 131 to 2,048 ({found[1]['case']['tokens']:,} tokens in all)"
    return line(name, *(row["time_ms"] for row in found))


def behind_text(found: list[tuple[float, str, bool]]) -> str:
    """How many steps of the other kernel tables are behind, and by how much."""
    ratios = [ratio for ratio, *_ in found]
    lost = [f"{100 * (1 - ratio):.1f}" for ratio in sorted(ratios, reverse=True) if ratio < 1]
    text = "in the other cases of benchmarks/README.md (fp16, longer prompts, other head dims) it is "
    text += f"{min(ratios):.2f} to {max(ratios):.2f} times as fast, behind in {len(lost)} of {len(ratios)}"
    return text + (f", by {', '.join(lost)} %" if lost else "")


def against_sharing(kernels: Rows, others: Rows, layer: Rows) -> str:
    """How ours compares with the fastest other way that stores a prompt once."""

    def factor(found: list[tuple[float, str, bool]]) -> str:
        ratios = [ratio for ratio, *_ in found]
        fa4 = sum(name.startswith("fa4") for _, name, _ in found)
        close = sum(near for ratio, _, near in found if ratio > 1)
        won = sum(ratio > 1 for ratio in ratios)
        text = f"{min(ratios):.2f} to {max(ratios):.2f} times as fast (median {median(ratios):.2f}, "
        text += f"ahead in {won} of {len(ratios)}"
        text += f", in {close} of them the rounds of both overlap" if close else ""
        return f"{text}; that way is FlashAttention-4's in {fa4})"

    parts = []
    if found := step_ratios(kernels):
        parts.append(f"attention (forward and backward, the cases of its table below) is {factor(found)}")
    if found := step_ratios(others):
        parts.append(behind_text(found))
    if cells := sharing_ratios(layer):
        prompts, counts = ([key[place] for key in cells] for place in (0, 1))
        what = f"a decoder layer of Qwen3-8B ({span(counts)} responses, prompts of "
        what += f"{thousands(min(prompts))} to {thousands(max(prompts))}) is"
        parts.append(f"{what} {factor(list(cells.values()))}")
    if not parts:
        return ""
    sentence = f"Against the fastest other way measured that stores a prompt once too: {'; '.join(parts)}."
    return "\n\n" + textwrap.fill(sentence, 110, break_on_hyphens=False)


def text(demo: dict[str, Any], results: Path, table: Callable[[list[tuple[str, ...]]], str]) -> str:
    """The demo's update on a CPU, then a GPU's measurements."""

    def rows(name: str) -> Rows:
        path = results / GPU / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else []

    lines: list[tuple[str, ...]] = [
        ("what is timed", "replicated", "shared", "times as fast"),
        *demo_line(demo),
    ]
    lines += trl_line(rows("trl_updates"))
    lines += verl_line(rows("verl_updates"))
    layer = rows("decoder_layer")
    lines += layer_line(layer)
    kernels = rows("kernels")
    found = [attention(kernels, way, 28, 16384, 2048) for way in ("fa2-replicated", "ours-sm90a")]
    lines += line("attention, forward and backward: a prompt of 16,384, 28 responses of 2,048", *found)
    short = find(rows("break_even"), N=32, P=64, R=512)
    lines += line(
        "attention, forward and backward, same kernels, calls as CUDA graphs, copying the prompt not timed: "
        "a prompt of 64, 32 responses of 512",
        short.get("replicated_ms"), short.get("shared_ms"),
    )  # fmt: skip
    gpu = next((row["gpu"] for row in kernels), "a GPU")
    sharing = against_sharing(kernels, rows("kernels_full") + rows("kernels_head_dims"), layer)
    return f"""\
{table(lines)}

On one {gpu} but for the first line; replicated rows run in torch's FlashAttention-2 (TRL: the faster of SDPA
and this package's `flash_attention_2`; last line: our own kernels, where a prompt is too short to
share).{sharing}"""
