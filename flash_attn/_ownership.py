"""Tells the user when another distribution also provides `flash_attn`: which files run is then a matter of
luck."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

_DISTRIBUTION = "flash-attn"


def other_copies(version: str, file: str, search_path: Iterable[str]) -> list[str]:
    """Where else `flash_attn` lives: other folders with an interface module, and another owner's metadata."""
    ours = Path(file).resolve().parent
    found = []
    for folder in map(Path, search_path):
        if folder.resolve() != ours and (folder / "flash_attn_interface.py").exists():
            found.append(str(folder.resolve()))
    try:
        owner = metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return found
    where = str(owner.locate_file("flash_attn"))
    if owner.version != version and where not in found:
        found.append(f"{where} (distribution {_DISTRIBUTION} {owner.version})")
    return found


def warn_of_other_copies(version: str, file: str, search_path: Iterable[str]) -> None:
    """A RuntimeWarning that names both places."""
    for other in other_copies(version, file, search_path):
        warnings.warn(
            f"another distribution also provides flash_attn: {other}; the one that runs is "
            f"{Path(file).resolve().parent} ({version}). Uninstall one: pip uninstall {_DISTRIBUTION}",
            RuntimeWarning,
            stacklevel=3,
        )
