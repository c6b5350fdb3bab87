"""Texts of the GPU tests, the sanitizer runs and the build; report.py puts them into documents."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from attention_report import machine_of

Rows = list[dict[str, Any]]
Table = Callable[[list[tuple[str, ...]]], str]
PATHS = {80: "sm_80", 90: "sm_90a"}
UNFINISHED = "works; the whole GPU suite has not passed yet"
WHOLE = "CUDA kernels"  # the support table's row that needs every file of the suite


def gpu_tests(report: dict[str, Any], markdown_table: Table) -> str:
    """`make test-gpu`: outcomes by file."""
    outcomes = ("passed", "failed", "skipped", "died", "not run")
    lines: list[tuple[str, ...]] = [("", *outcomes)]
    for name, counts in [*report["files"].items(), ("all", report["total"])]:
        failed = counts.get("failed", 0) + counts.get("error", 0)
        numbers = {**counts, "failed": failed}
        lines.append((f"`{name}`" if name != "all" else name, *(str(numbers.get(o, 0)) for o in outcomes)))
    failures = "".join(f"\n- `{name}`" for name in report["failures"])
    what = report.get("kernels") or "backend composed"  # what runs without a library
    seconds = f"; {report['seconds']:.0f} s" if "seconds" in report else ""
    note = f" {report['note']}" if report.get("note") else ""
    where = f"{report['gpu']}, CUDA {report['cuda']}, torch {report['torch']}, Python {report['python']}"
    where += f", commit {report['commit'][:12]}"
    if report.get("library") == "not built":
        where += ", no compiled library"
    elif report.get("library") not in (None, report["commit"][:12]):
        where += f" with the library of {report['library']}"
    where += f"; {what}{seconds}.{note}"
    return f"""\
{textwrap.fill(where, 110)}

{markdown_table(lines)}{chr(10) + chr(10) + "Not passed:" + chr(10) + failures if failures else ""}"""


def sanitizer(rows: Rows, markdown_table: Table) -> str:
    """`tests/gpu/run_sanitizer.py`: errors by tool, path and head dim."""
    first = rows[0]
    lines: list[tuple[str, ...]] = [("compute-sanitizer", "path", "head dim", "errors", "s")]
    for row in rows:
        errors = "did not finish" if not row["completed"] or row["errors"] is None else str(row["errors"])
        lines.append((row["tool"], PATHS[row["path"]], str(row["head_dim"]), errors, str(row["seconds"])))
    found = "".join(f"\n- {row['tool']}: {row['first']}" for row in rows if row.get("first"))
    return f"""\
{machine_of(first)}: the corner set
`tests/gpu/memcheck.py`, torch's caching allocator off, all side by side.

{markdown_table(lines)}{chr(10) + found if found else ""}"""


def _minutes(seconds: float | None) -> str:
    return "-" if seconds is None else f"{int(seconds) // 60} min {int(seconds) % 60} s"


def build_time(rows: Rows, markdown_table: Table) -> str:
    """`benchmarks/build_time.py`: how long the library took."""
    lines: list[tuple[str, ...]] = [
        ("", "files", "MAX_JOBS", "wall clock", "compilers / MAX_JOBS", "library MB")
    ]
    for row in rows:
        share = _minutes(row["busy_s"] / row["jobs"])
        size = f"{row['library_mb']:.1f}"
        lines.append((row["what"], str(row["files"]), str(row["jobs"]), _minutes(row["wall_s"]), share, size))
    first = rows[0]
    note = f" {first['note']}" if first.get("note") else ""
    cores = f"{first['cores']} cores of {first['cpu']}"
    where = f"nvcc {first['nvcc']}, {cores}, {first['date']}, commit {first['commit'][:12]}.{note}"
    return f"""\
{textwrap.fill(where, 110)}

{markdown_table(lines)}"""


def passed(files: Iterable[dict[str, int]]) -> bool:
    """Tests ran, and none failed, died or was left out."""
    files = list(files)
    return any(c.get("passed", 0) for c in files) and not any(c.keys() - {"passed", "skipped"} for c in files)


def support_states(text: str, runs: Rows) -> str:
    """The README with the states of the rows that name a test of tests/gpu set by the runs of that suite."""

    def state(match: re.Match[str]) -> str:
        feature, path, rest = match["feature"], match["path"], match["rest"]
        if feature.startswith(WHOLE):
            done = any(passed(run["files"].values()) for run in runs)
        else:
            done = any(passed([run["files"].get(path, {})]) for run in runs)
        word = "works" if done else UNFINISHED if feature.startswith(WHOLE) else "not yet"
        return f"| {feature} | {word} | `{path}{rest}"

    row = r"^\| (?P<feature>[^|]*) \| [^|]* \| `(?P<path>tests/gpu/\w+\.py)(?P<rest>::)"
    return re.sub(row, state, text, flags=re.MULTILINE)
