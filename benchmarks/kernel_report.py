"""The kernels' tables, from the rows that run.py writes. report.py puts them into the README."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from built_from import library_of

Rows = list[dict[str, Any]]


def case_name(row: dict[str, Any]) -> str:
    c, graph = row["case"], ", graph" if row.get("graph") else ""
    if "N" not in c:
        return f"B={c['B']}, S={c['S']}, {'causal' if c['causal'] else 'full'}, d={c['d']}{graph}"
    groups = f", {c['groups']} groups" if c["groups"] != 1 else ""
    groups += f", window {c['window_left'] + 1}" if "window_left" in c else ""
    groups += f", Hk={c['Hk']}" if c["Hk"] != 8 else ""
    groups += ", fp16" if c["dtype"] == "fp16" else ""
    lengths = f"R~U(131, {c['R']})" if c.get("ragged") else f"R={c['R']}"
    return f"N={c['N']}, P={c['P']}, {lengths}, d={c['d']}{groups}{graph}"


def merged(rows: Rows) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """case -> provider -> pass -> row, in the order of the file."""
    out: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for row in rows:
        out.setdefault(case_name(row), {}).setdefault(row["provider"], {})[row["pass"]] = row
    return out


def cells(row: dict[str, Any] | None) -> tuple[str, str]:
    if row is None or row.get("time_ms") is None:
        return "-", "-"
    once = "*" if row.get("rounds") == 1 else ""
    time = f"{row['time_ms']:.3g}" if row["time_ms"] < 1 else f"{row['time_ms']:.1f}"
    return f"{time}{once}", f"{row['tflops']:.0f}"


def commit_of(row: dict[str, Any]) -> str:
    return str(row.get("commit", "unknown"))[:12]


def where(rows: Rows) -> str:
    """Machine, software, days and commits of all rows."""

    def each(key: str) -> str:
        return " and ".join(sorted({str(row.get(key)) for row in rows}))

    software = f"driver {each('driver')}, CUDA {each('cuda')}, torch {each('torch')}"
    commits = list(dict.fromkeys(commit_of(row) for row in rows))
    named = f"commit{'s' * (len(commits) > 1)} {' and '.join(commits)}"
    return f"{rows[0]['gpu']}, {software}, {named}, {each('date')}"


def apart(providers: dict[str, dict[str, dict[str, Any]]]) -> dict[str, list[str]]:
    """commit -> providers of a case that were timed, ours first."""
    found: dict[str, list[str]] = {}
    for name in sorted(providers, key=lambda n: not n.startswith("ours")):
        commits = dict.fromkeys(commit_of(row) for row in providers[name].values() if row.get("time_ms"))
        if commits:
            found.setdefault(" and ".join(commits), []).append(name)
    return found


def table(rows: Rows, markdown_table: Callable[[list[tuple[str, ...]]], str]) -> str:
    """A table a case, the fastest step first; under it the commits, where a file holds several."""
    several = len({commit_of(row) for row in rows}) > 1
    head = ("", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "both ms", "peak GiB", "scratch GiB")
    parts = []
    for case, providers in merged(rows).items():
        lines: list[tuple[str, ...]] = [(case, *head[1:])]
        total = {name: step for name, passes in providers.items() if (step := _step(passes)) is not None}
        for name in sorted(total, key=lambda n: total[n]):
            passes = providers[name]
            memory = [passes["bwd"].get(key) for key in ("peak_gib", "extra_gib")]
            sizes = ("-" if gib is None else f"{gib:.1f}" for gib in memory)
            both = cells({"time_ms": total[name], "tflops": 0})[0]
            lines.append((name, *cells(passes["fwd"]), *cells(passes["bwd"]), both, *sizes))
        for name, passes in providers.items():
            if name not in total and any(row.get("time_ms") for row in passes.values()):
                lines.append((name, *cells(passes.get("fwd")), *cells(passes.get("bwd")), "-", "-", "-"))
        if len(lines) > 1:
            runs = apart(providers)
            foot = "; ".join(f"{', '.join(names)}: {commit}" for commit, names in runs.items())
            foot = f"Commit {next(iter(runs))}." if len(runs) == 1 else f"Not of one run: {foot}."
            parts.append(markdown_table(lines) + (f"\n\n{foot}" if several else ""))
    return "\n\n".join(part for part in parts if part)


def not_run(rows: Rows) -> str:
    """Who did not run what, and why."""
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        if row.get("error"):
            found.setdefault((row["provider"], row["error"]), set()).add(case_name(row))
    lines = [f"- {name} ({'; '.join(sorted(cases))}): {error}" for (name, error), cases in found.items()]
    return "\n\nNot run:\n\n" + "\n".join(lines) if lines else ""


def text(rows: Rows, markdown_table: Callable[[list[tuple[str, ...]]], str]) -> str:
    """What was measured, a line a problem, and folded away a table of every way for each."""
    c = next((r["case"] for r in rows if "N" in r["case"]), rows[0]["case"])
    dtype = "bf16" if all(row["case"]["dtype"] == "bf16" for row in rows) else "bf16 or, where named, fp16"
    added = ", ".join(sorted({row["provider"] for row in rows if row.get("added")}))
    how = "interleaved in one process" + (f" ({added}: in one after it)" if added else "")
    several = len({commit_of(row) for row in rows}) > 1
    how += ", but for those named under a case" if several else ""
    alone = sorted({row["provider"] for row in rows if row.get("apart")})
    how += f"; {', '.join(alone)}, where they hold more than 8 GiB, by themselves" if alone else ""
    matmul = sorted({row["matmul_tflops"] for row in rows if "matmul_tflops" in row})
    ceiling = f"{matmul[0]}" + (f" to {matmul[-1]}" if len(matmul) > 1 else "")
    once = " *: one run after one that warmed up." if any(row.get("rounds") == 1 for row in rows) else ""
    about = f"""{where(rows)}; H={c["H"]}, Hk={c["Hk"]}, {dtype}, causal. All providers of a case are {how};
medians.{once} TFLOP/s count every visible (query, key) pair once and prompts once: forward
4 H d (P²/2 + N (P R + R²/2)), backward 2.5 times that. Memory is the backward's: most that was allocated,
inputs included, and what was neither there before nor returned. A dense bf16 matrix product of 8192³ ran at
{ceiling} TFLOP/s in the same run.{_same_forward(rows)}"""
    lines, passes = overview(rows)
    shared = ""
    if len(lines) > 1 and passes:
        below = f"\n\n{lost}" if (lost := _behind(passes)) else ""
        fa4 = f" {_fa4_text(rows)}" if "best FA4" in lines[0] else ""
        shared = f"{_filled(_verdict(passes) + fa4)}\n\n{markdown_table(lines)}{below}\n\n"
    return f"""\
{textwrap.fill(about, 110, break_on_hyphens=False)}

{plain(rows, markdown_table)}{shared}<details><summary>Every way, case by case</summary>

{table(rows, markdown_table)}

</details>{not_run(rows)}"""


FA3 = ("fa3-two-call", "fa3-gather")  # forward only
FA4 = ("fa4-two-call", "fa4-gather", "fa4-block-sparse")
PASSES = ("fwd", "bwd")
COLUMNS = {  # of the overview
    "ours, sm_90a": ("ours-sm90a",), "ours, sm_80": ("ours-sm80",), "FA2 two-call": ("fa2-two-call",),
    "cuDNN two-call": ("cudnn-two-call",), "best FA3": FA3, "best FA4": FA4,
}  # fmt: skip
PEERS = ("fa2-two-call", "cudnn-two-call", "flex", "gather-varlen", "prefix-grouper", *FA3, *FA4)


def _filled(words: str) -> str:
    return textwrap.fill(" ".join(words.split()), 110, break_on_hyphens=False)


def _same_forward(rows: Rows) -> str:
    names = {row["provider"] for row in rows if row.get("time_ms")}
    if not names.issuperset({"ours-deterministic", "ours-sm90a"}):
        return ""
    return (
        " `ours-deterministic` has the forward of `ours-sm90a`: "
        "where both are of one run, these two times show how far equal calls are apart."
    )


def _tflops(passes: dict[str, dict[str, Any]] | None) -> str:
    values = [(passes or {}).get(direction, {}).get("tflops") for direction in ("fwd", "bwd")]
    return " / ".join("-" if value is None else f"{value:.0f}" for value in values)


def fastest(
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


def _ratio(peer: float | None, own: float | None) -> str:
    """Times as fast as the peer; bold where the peer wins."""
    if peer is None or own is None:
        return "-"
    return f"{peer / own:.2f}x" if peer >= own else f"**{peer / own:.2f}x**"


def _time(passes: dict[str, dict[str, Any]], direction: str) -> float | None:
    return passes.get(direction, {}).get("time_ms")


Passes = dict[str, dict[str, Any]]


class Verdict(NamedTuple):
    ahead: bool  # ours
    peer: str
    direction: str
    case: str
    close: bool  # the rounds of both overlap


def overlap(own: dict[str, Any], peer: dict[str, Any]) -> bool:
    """Whether the rounds of two rows overlap, 20th to 80th percentile; equal times do."""
    (low, high), (first, last) = (
        (row.get("p20_ms", row["time_ms"]), row.get("p80_ms", row["time_ms"])) for row in (own, peer)
    )
    return bool(low <= last and first <= high)


def _passes(case: str, ours: Passes, best: Passes) -> list[Verdict]:
    """Forward and backward of a case against the fastest peer."""
    found = []
    for direction, word in (("fwd", "forward"), ("bwd", "backward")):
        own, peer = ours.get(direction, {}), best.get(direction)
        if own.get("time_ms") and peer:
            ahead = own["time_ms"] <= peer["time_ms"]
            found.append(Verdict(ahead, peer["provider"], word, case, overlap(own, peer)))
    return found


def _share(passes: list[Verdict], what: str = "") -> str:
    """In how many passes ours is ahead, and in how many of these by less than the rounds vary."""
    won = [verdict.close for verdict in passes if verdict.ahead]
    within = f" (in {sum(won)} of them the rounds of both overlap)" if any(won) else ""
    return f"{len(won)} of {len(passes)}{what}{within}"


def _behind(passes: list[Verdict], where: str = "") -> str:
    """Who is ahead of ours, by peer and pass; nothing where none is."""
    lost: dict[str, list[str]] = {}
    for ahead, name, word, case, close in passes:
        if not ahead:
            lost.setdefault(f"{name}, {word}", []).append(f"{case}{' (~)' * close}")
    if not lost:
        return ""
    near = " (~: the rounds of both overlap)" if any(v.close for v in passes if not v.ahead) else ""
    names = ". ".join(f"{name}: {'; '.join(cases)}" for name, cases in lost.items())
    return _filled(f"Faster than ours{where}{near}: {names}.")


def _verdict(passes: list[Verdict]) -> str:
    return f"Ours, sm_90a, is ahead of every peer measured in {_share(passes, ' passes')}."


def fa4_ways(providers: dict[str, dict[str, dict[str, Any]]]) -> int:
    """How many of FlashAttention-4's ways were timed, in the pass where fewest were."""
    return min(sum(bool(_time(providers.get(n, {}), direction)) for n in FA4) for direction in PASSES)


def _fewer_fa4(rows: Rows) -> str:
    """In how many cases not all of FlashAttention-4's ways ran."""
    ways = [fa4_ways(providers) for providers in shared_cases(rows).values()]
    words = ("none", "one", "two")
    counts = [f"{words[n]} ran in {ways.count(n)}" for n in range(len(FA4)) if n in ways]
    return f"{', '.join(counts)} of {len(ways)} rows" if counts else ""


def _fa4_text(rows: Rows) -> str:
    fewer = _fewer_fa4(rows)
    text = """"best FA4": the fastest of those of FlashAttention-4's three ways that were run, pass by pass"""
    return f"{text} (†: not all three in both passes; {fewer})." if fewer else f"{text}."


def shared_cases(rows: Rows) -> dict[str, dict[str, Passes]]:
    """case -> provider -> pass -> row of shared prompts, as graphs where timed so too."""
    found = merged([row for row in rows if "N" in row["case"]])
    return {case: providers for case, providers in found.items() if f"{case}, graph" not in found}


def step_ratios(rows: Rows) -> list[tuple[float, str, bool]]:
    """Of each case: both passes of the fastest peer, over ours; which peer; whether the rounds overlap."""

    def both(passes: Passes) -> dict[str, Any]:
        keys = ("time_ms", "p20_ms", "p80_ms")
        return {key: sum(passes[d].get(key, passes[d]["time_ms"]) for d in PASSES) for key in keys}

    ratios = []
    for providers in shared_cases(rows).values():
        own = providers.get("ours-sm90a", {})
        steps = [(step, name) for name in PEERS if (step := _step(providers.get(name, {}))) is not None]
        if _step(own) and steps:
            step, name = min(steps)
            mine = both(own)
            ratios.append((step / mine["time_ms"], name, overlap(mine, both(providers[name]))))
    return ratios


def overview(rows: Rows) -> tuple[list[tuple[str, ...]], list[Verdict]]:
    """A line a problem: TFLOP/s of ours and the peers', and times as fast as the fastest; who wins."""
    measured = {row["provider"] for row in rows if row.get("time_ms")}
    columns = {head: names for head, names in COLUMNS.items() if measured.intersection(names)}
    lines: list[tuple[str, ...]] = [("forward / backward, TFLOP/s", *columns, "forward", "backward", "step")]
    passes: list[Verdict] = []
    for case, providers in shared_cases(rows).items():
        ours, best = providers.get("ours-sm90a", {}), fastest(providers, PEERS)
        steps = [step for name in PEERS if (step := _step(providers.get(name, {}))) is not None]
        ratios = [_ratio(_time(best, direction), _time(ours, direction)) for direction in PASSES]
        passes += _passes(case, ours, best)
        ratios.append(_ratio(min(steps, default=None), _step(ours)))
        rates = {head: _tflops(fastest(providers, names)) for head, names in columns.items()}
        if "best FA4" in rates and 0 < fa4_ways(providers) < len(FA4):
            rates["best FA4"] += "†"
        lines.append((case, *rates.values(), *ratios))
    return lines, passes


def elsewhere(others: dict[str, Rows]) -> str:
    """In how many passes of the other files' cases ours is ahead."""
    counts = []
    for name, rows in others.items():
        fewer = _fewer_fa4(rows) if any(row["provider"] in FA4 for row in rows) else ""
        fewer = f"; of FlashAttention-4's three ways {fewer}" if fewer else ""
        counts.append(f"{name} {_share(overview(rows)[1])}{fewer}")
    return f" {'. '.join(counts)}." if counts else ""


def summary(
    rows: Rows,
    markdown_table: Callable[[list[tuple[str, ...]]], str],
    others: dict[str, Rows] | None = None,
) -> str:
    """`overview`, where it was measured, and what its columns mean; `others`: what else was measured."""
    lines, passes = overview(rows)
    found = merged([row for row in rows if "N" in row["case"]])
    c = next(row["case"] for row in rows if "N" in row["case"])
    half = any(row["case"]["dtype"] == "fp16" for row in rows)
    sizes = f"{c['H']} query heads (H), {c['Hk']} key heads (Hk), head dim d, bf16"
    sizes += ", fp16 where named" if half else ""
    again = {n for ps in found.values() for names in list(apart(ps).values())[1:] for n in names}
    runs = (
        f", but in some cases these, which ran in another process: {', '.join(sorted(again))}"
        if again
        else ""
    )
    head = f"{where(rows)}; {sizes}. The ways of a case took turns in one process{runs}."
    fa4 = _fa4_text(rows)
    fa3 = """"best FA3": of FlashAttention-3's two; its wheel on PyPI, fa3-fwd, has the forward only."""
    about = f""""ours, sm_90a": this package's kernels for Hopper; "ours, sm_80": those for every GPU
        from sm_80 on; both, like all others, on this GPU. "graph": calls replayed as a CUDA graph,
        without the time that launching takes. "two-call": what a careful user builds from existing
        kernels (prompt, responses on the prompt, responses on themselves, merged).
        {fa4 if "best FA4" in lines[0] else ""} {fa3 if "best FA3" in lines[0] else ""}
        "forward", "backward": time of the fastest of all peers in that pass over ours; "step":
        of the peer whose forward and backward together are fastest. Bold: a peer wins.
        `benchmarks/README.md` has every row."""
    lost = [_behind(passes)]
    lost += [_behind(overview(found)[1], f", {name.lower()}") for name, found in (others or {}).items()]
    verdict = f"{_verdict(passes)}{elsewhere(others or {})}"
    parts = [_filled(verdict), markdown_table(lines), *filter(None, lost), _filled(about), _filled(head)]
    return "\n\n".join(parts)


def plain(rows: Rows, markdown_table: Callable[[list[tuple[str, ...]]], str]) -> str:
    """Without a shared prompt: times as fast as torch's FlashAttention-2, bold where it wins."""
    found = merged([row for row in rows if "B" in row["case"]])
    if not found:
        return ""
    heads = [f"{path} {direction}" for path in ("sm_90a", "sm_80") for direction in ("forward", "backward")]
    lines: list[tuple[str, ...]] = [("plain attention, times as fast as FA2", *heads)]
    for case, providers in found.items():
        ratios = [
            _ratio(_time(providers.get("fa2", {}), direction), _time(providers.get(name, {}), direction))
            for name in ("ours-sm90a", "ours-sm80")
            for direction in ("fwd", "bwd")
        ]
        lines.append((case, *ratios))
    return f"{markdown_table(lines)}\n\n"


def window_ratios(rows: Rows) -> list[str]:
    """Of each windowed case: its time over that of its own pairs at the rate of the case without a window, by
    pass, then of both passes together.
    """
    pairs: dict[tuple[str, str], dict[str, dict[bool, dict[str, Any]]]] = {}
    for row in rows:
        case = {k: v for k, v in row["case"].items() if k != "window_left"}
        passes = pairs.setdefault((str(sorted(case.items())), row["provider"]), {})
        if row.get("tflops"):
            passes.setdefault(row["pass"], {})["window_left" in row["case"]] = row
    ratios, together = [], []
    for (_, provider), passes in pairs.items():
        both = [found for found in passes.values() if len(found) == 2]
        for found in both:
            ratio = found[False]["tflops"] / found[True]["tflops"]
            ratios.append(f"{provider} {found[True]['pass']} {ratio:.2f}")
        if len(both) == 2:
            time = sum(found[True]["time_ms"] for found in both)
            ideal = sum(f[True]["time_ms"] * f[True]["tflops"] / f[False]["tflops"] for f in both)
            together.append(f"{provider} {time / ideal:.2f}")
    return [*ratios, *(f"both passes {text}" for text in together)]


def layers_text(rows: Rows, markdown_table: Callable[[list[tuple[str, ...]]], str]) -> str:
    """`run.py --cases gemma4`: attention of Gemma-4-31B's layers."""
    first = rows[0]
    ratios = window_ratios(rows)
    sentence = "Time of the windowed layer over that of its own pairs at the rate without a window: "
    sentence += f"{', '.join(ratios)}."
    windows = "\n" + textwrap.fill(sentence, 110, break_on_hyphens=False) if ratios else ""
    where = f"{first['gpu']}, CUDA {first['cuda']}, torch {first['torch']}, {first['date']}{library_of(rows)}"
    case = first["case"]
    return f"""\
Attention of Gemma-4-31B's layers ({where};
{case["dtype"]}, H={case["H"]}, medians; every visible pair counts once, and prompts once).{windows}

{table(rows, markdown_table)}"""
