"""The commit of the library that rows of a JSON file were measured with, for the tables' first lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def library_of(rows: Iterable[dict[str, Any]]) -> str:
    """What follows a date: the commits of all libraries in the file's order; nothing where no row has one."""
    found = [str(row.get("library") or row.get("commit") or "")[:12] for row in rows]
    names = list(dict.fromkeys(name for name in found if name))
    if not names:
        return ""
    return f", library of commit{'s' * (len(names) > 1)} {' and '.join(names)}"
