"""The one reader and writer of benchmarks/results: JSON rows, one a line, or one record.

A row is a measurement; `earlier` and `merged` are how a run that was cut short goes on: rows of the same
library are not measured again, rows of another stand until they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
SAME = ("gpu", "driver", "torch", "library", "commit")  # what a row must share with a run that keeps it


def _six_digits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _six_digits(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_six_digits(x) for x in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_rows(path: Path | str | None, rows: Rows) -> None:
    """One row a line, six digits; nothing without a path: then what a script prints is all."""
    if path is None:
        return
    lines = ",\n".join(json.dumps(_six_digits(row)) for row in rows)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f"[\n{lines}\n]\n")


def write_record(path: Path | str, record: dict[str, Any]) -> None:
    """A file that is not a list of rows."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def read_rows(path: Path | str | None) -> Rows:
    """What a file holds; nothing where there is none."""
    return json.loads(Path(path).read_text()) if path and Path(path).exists() else []


def earlier(path: Path | str | None, facts: dict[str, Any]) -> tuple[Rows, Rows]:
    """Rows that this library, torch and GPU measured, and the others."""
    rows = read_rows(path)
    own = [row for row in rows if all(row.get(key) == facts.get(key) for key in SAME)]
    return own, [row for row in rows if row not in own]


def measured(row: dict[str, Any]) -> str:
    """What a row is a measurement of."""
    return json.dumps([row["case"], row["provider"], row.get("pass"), row.get("graph", False)])


def merged(old: Rows, new: Rows, key: Callable[[dict[str, Any]], str] = measured) -> Rows:
    """`old` with the measurements of `new` in their places, then what `new` alone has."""
    fresh = {key(row): row for row in new}
    placed = [fresh.pop(key(row), row) for row in old]
    return placed + list(fresh.values())
