"""The oldest Linux that a compiled library runs on, as a wheel's platform tag (PEP 600). Called by setup.py.

A library asks for versions of glibc's and libstdc++'s symbols by name, in its dynamic string table. The tag
is of the first row of POLICIES that has them all; pip then refuses the wheel where the loader would.
"""

from __future__ import annotations

import re
from pathlib import Path

Version = tuple[int, ...]

# Minor version of glibc 2 -> newest GLIBCXX and CXXABI of the distributions that have it.
POLICIES: dict[int, tuple[Version, Version]] = {
    17: ((3, 4, 19), (1, 3, 7)),
    28: ((3, 4, 24), (1, 3, 11)),
    31: ((3, 4, 28), (1, 3, 12)),
    34: ((3, 4, 29), (1, 3, 13)),
    35: ((3, 4, 30), (1, 3, 13)),
    38: ((3, 4, 32), (1, 3, 14)),
    39: ((3, 4, 33), (1, 3, 15)),
}
_NAMES = re.compile(rb"\0(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)+)(?=\0)")


def needed_versions(library: Path) -> dict[str, Version]:
    """The newest version that the library asks for of each of GLIBC, GLIBCXX and CXXABI."""
    newest: dict[str, Version] = {}
    for name, text in _NAMES.findall(library.read_bytes()):
        version = tuple(map(int, text.decode().split(".")))
        newest[name.decode()] = max(version, newest.get(name.decode(), ()))
    return newest


def platform_tag(library: Path, platform: str) -> str:
    """`platform` (linux_x86_64) as manylinux_2_<n>_x86_64; as it is where no policy has what is needed."""
    system, _, machine = platform.partition("_")
    needed = needed_versions(library)
    if system != "linux" or "GLIBC" not in needed:
        return platform
    for minor, (glibcxx, cxxabi) in POLICIES.items():
        fits = needed["GLIBC"][:2] <= (2, minor)
        if fits and needed.get("GLIBCXX", ()) <= glibcxx and needed.get("CXXABI", ()) <= cxxabi:
            return f"manylinux_2_{minor}_{machine}"
    return platform
