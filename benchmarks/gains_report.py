"""The README's first table: what sharing gains, one line from each kind of measurement.

The cells are fixed here, so that a line shows the same problem whatever the figures are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    return [(name, times(replicated), times(shared), f"{replicated / shared:.2g}x")]


def attention(rows: Rows, provider: str, n: int, p: int, r: int) -> float | None:
    """Forward and backward."""
    passes = [
        find(rows, provider=provider, N=n, P=p, R=r, d=128, dtype="bf16", **{"pass": d})
        for d in ("fwd", "bwd")
    ]
    return sum(row["time_ms"] for row in passes) if all(passes) else None


def text(demo: dict[str, Any], results: Path, table: Callable[[list[tuple[str, ...]]], str]) -> str:
    """The demo's update on a CPU, then a GPU's measurements."""

    def rows(name: str) -> Rows:
        path = results / GPU / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else []

    case = demo["case"]
    lines: list[tuple[str, ...]] = [("forward and backward", "replicated", "shared", "times as fast")]
    seconds = [demo["variants"][way]["total_seconds"] for way in ("replicated", "shared")]
    longest = max(group["prompt"] for group in demo["groups"])
    name = f"`make demo`: {case['model']}, {case['num_groups']} prompts of {longest:,} tokens, "
    lines += line(f"{name}{case['num_responses']} responses, CPU", *(1000 * x for x in seconds))
    cell = dict(model="qwen3-1.7b", groups=8, P=4096, N=8, R=512)
    updates = rows("trl_updates")
    ways = [
        find(updates, provider=f"trl-replicated-{kind}", **cell) for kind in ("sdpa", "flash_attention_2")
    ]
    best = min((row["time_ms"] for row in ways if row), default=None)
    shared = find(updates, provider="trl-shared", **cell).get("time_ms")
    lines += line("TRL's update, Qwen3-1.7B: 8 prompts of 4,096, 8 responses of 512", best, shared)
    passes = rows("verl_updates")
    cell = {
        "model": "qwen3-8b",
        "micro_batch": 8,
        "num_micro_batches": 1,
        "pass": "policy_update",
        "dp": 1,
        "sp": 1,
    }
    found = [find(passes, provider=way, **cell).get("seconds", 0) for way in ("verl-torch-fa2", "shared")]
    lines += line("veRL's update, Qwen3-8B: a prompt of 8,192, 8 responses", *(1000 * x for x in found))
    layer = rows("decoder_layer")
    found = [find(layer, provider=way, P=16384, mb=8).get("time_ms") for way in ("fa2-replicated", "ours")]
    lines += line("a decoder layer of Qwen3-8B: a prompt of 16,384, 8 responses", *found)
    kernels = rows("kernels")
    found = [attention(kernels, way, 28, 16384, 2048) for way in ("fa2-replicated", "ours-sm90a")]
    lines += line("attention alone: a prompt of 16,384, 28 responses of 2,048", *found)
    short = find(rows("break_even"), N=32, P=64, R=512)
    lines += line(
        "attention alone, same kernels: a prompt of 64, 32 responses of 512",
        short.get("replicated_ms"), short.get("shared_ms"),
    )  # fmt: skip
    gpu = next((row["gpu"] for row in kernels), "a GPU")
    return f"""\
{table(lines)}

On one {gpu} but for the first line; replicated rows run in torch's FlashAttention-2 (TRL: the faster of SDPA
and this package's `flash_attention_2`; last line: our own kernels, where a prompt is too short to share)."""
