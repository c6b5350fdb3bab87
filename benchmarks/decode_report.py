"""Tables of what decode.py wrote: time of a decoding call, and its share of the memory's bandwidth. report.py
puts them into the README."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from built_from import library_of

Rows = list[dict[str, Any]]
Table = Callable[[list[tuple[str, ...]]], str]

OURS, SHARED, REPLICATED, PEER, COPY = "ours", "ours-shared", "ours-replicated", "sdpa", "copy"
NAMES = {"ours-op-sm90a": "the op, sm_90a", "ours-op-sm80": "the op, sm_80", "sdpa": "torch FA2"}


def length(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def cells(rows: Rows) -> list[tuple[dict[str, Any], dict[tuple[str, bool], dict[str, Any]]]]:
    """(case, (provider, graph) -> row) in the order measured."""
    found: list[tuple[dict[str, Any], dict[tuple[str, bool], dict[str, Any]]]] = []
    for row in rows:
        if not found or found[-1][0] != row["case"]:
            found.append((row["case"], {}))
        found[-1][1][row["provider"], bool(row.get("graph"))] = row
    return found


def microseconds(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return "failed" if "error" in row else f"{1e3 * row['time_ms']:,.0f}"


def marked(own: dict[str, Any] | None, *others: dict[str, Any] | None) -> tuple[str, ...]:
    """Times of ours and of others, bold the others that are faster."""
    mine = (own or {}).get("time_ms")
    texts = [microseconds(own)]
    for row in others:
        won = row is not None and mine is not None and row.get("time_ms", mine) < mine
        texts.append(f"**{microseconds(row)}**" if won else microseconds(row))
    return tuple(texts)


def share(row: dict[str, Any] | None) -> str:
    return f"{100 * row['of_floor']:.0f} %" if row is not None and "of_floor" in row else "-"


def part_of(shorter: dict[str, Any] | None, row: dict[str, Any] | None) -> str:
    """One time as a share of another."""
    if shorter is None or row is None or "error" in shorter or "error" in row:
        return "-"
    return f"{100 * shorter['time_ms'] / row['time_ms']:.0f} %"


def calls(rows: Rows) -> str:
    """How many calls a graph has, and how much they read in all."""
    found = [row for row in rows if row.get("graph") and "layers" in row]
    counts = [row["layers"] for row in found]
    gigabytes = min(row["layers"] * cache_bytes(row["case"]) for row in found) / 1e9
    return f"{min(counts)} to {max(counts)}, each on caches of its own, {gigabytes:.2f} GB or more in all"


def cache_bytes(case: dict[str, Any]) -> int:
    """Of one call, 16 bit."""
    keys = case["B"] * case["S"] + case["B"] // case["N"] * case["P"]
    return 4 * case["d"] * case["Hk"] * keys


def text(rows: Rows, table: Table) -> str:
    """Sequences on caches of their own, then sequences on shared prompts."""
    first, found = rows[0], cells(rows)
    own = [cell for cell in found if not cell[0]["P"]]
    on_prompts = [cell for cell in found if cell[0]["P"]]
    used = [name for name in NAMES if any((name, True) in by for _, by in own)]
    peers = [name for name in (PEER,) if any((name, False) in by for _, by in own)]
    heads = [*(NAMES[n] + ", us" for n in used), "ours, from Python"]
    heads += [f"{NAMES[n]}, from Python" for n in peers]
    copied = any((COPY, True) in by for _, by in own)
    heads = ["a copy of as many bytes, us", "ours, of the copy", *heads] if copied else heads
    lines: list[tuple[str, ...]] = [("sequences, keys of each", "ours, us", "ours, of the floor", *heads)]
    for case, by in own:
        mine = by.get((OURS, True))
        time, *others = marked(mine, *(by.get((name, True)) for name in used))
        if copied:
            copy = by.get((COPY, True))
            others = [microseconds(copy), part_of(copy, by.get((OURS, True))), *others]
        eager = marked(by.get((OURS, False)), *(by.get((name, False)) for name in peers))
        lines.append((f"{case['B']}, {length(case['S'])}", time, share(mine), *others, *eager))
    case, machine = found[0][0], f"{first['gpu']}, CUDA {first.get('cuda')}, torch {first['torch']}"
    parts = [
        f"{machine}, {first['date']}{library_of(rows)};\n"
        f"H={case['H']}, Hk={case['Hk']}, d={case['d']} (query heads, key heads, head dim), bf16, "
        "one query token a sequence; 8K: 8,192.\n"
        f"Medians of a call in a CUDA graph of {calls(rows)} (L2: 0.06).\n"
        f"Floor: bytes of the caches at {first['copy_tb_s']:.2f} TB/s, "
        "a copy's in the same process; reading alone is faster.\n"
        "Shares: time of the floor, or of the copy, over ours. The op: the kernels that train,\n"
        "sm_90a those for Hopper, sm_80 those for every GPU from sm_80 on, here on the same one.\n"
        "Bold: faster than ours of the same kind, graph or Python.",
        table(lines),
    ]
    if on_prompts:
        lines = [("sequences on a prompt, prompts", "prompt, own keys", "shared, us", "shared, of the floor",
                  "prompt copied to each, us")]  # fmt: skip
        for case, by in on_prompts:
            mine = by.get((SHARED, True))
            lines.append(
                (f"{case['N']}, {case['B'] // case['N']}", f"{length(case['P'])}, {length(case['S'])}",
                 microseconds(mine), share(mine), microseconds(by.get((REPLICATED, True))))
            )  # fmt: skip
        parts.append(table(lines))
    return "\n\n".join(parts)
