"""Links a library so that Linux of 2018 (glibc 2.28, manylinux_2_28) loads it, whatever Linux it is built on.

glibc 2.34 moved threads, dlopen and shared memory into libc and gave them new versions, which a linker takes;
it still serves the old ones. The linker is shown empty libraries of the old names with the old versions
first. What newer libstdc++ headers ask for: portable.cpp. Called by build_support.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

OLDEST = (2, 28)
# Libraries of glibc before 2.34, by the names of their functions.
LIBRARIES = {"libdl.so.2": r"dl\w+", "librt.so.1": r"shm_\w+", "libpthread.so.0": r"(pthread|sem)_\w+"}
_SYMBOL = re.compile(r"(?P<name>\w+)@(?P<default>@?)GLIBC_(?P<version>\d+(?:\.\d+)+)")


def moved_symbols(symbols: str) -> dict[str, str]:
    """name -> its newest version up to OLDEST, of those whose default is newer; from `readelf --dyn-syms`."""
    new, old = set(), dict[str, tuple[int, ...]]()
    for match in _SYMBOL.finditer(symbols):
        name, version = match["name"], tuple(map(int, match["version"].split(".")))
        if version[:2] <= OLDEST:
            old[name] = max(version, old.get(name, ()))
        elif match["default"]:
            new.add(name)
    return {name: "GLIBC_" + ".".join(map(str, old[name])) for name in sorted(new & set(old))}


def version_script(symbols: dict[str, str]) -> str:
    nodes: dict[str, list[str]] = {}
    for name, version in symbols.items():
        nodes.setdefault(version, []).append(name)
    return "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in nodes.items())


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def write_stubs(folder: Path, cxx: str) -> list[str]:
    """Arguments that, before -lc, make the linker take the old versions; [] where there is no newer glibc."""
    libc = _run(cxx, "-print-file-name=libc.so.6").strip()
    if not Path(libc).is_file():  # not glibc
        return []
    readelf = shutil.which(_run(cxx, "-print-prog-name=readelf").strip())
    if readelf is None:
        print("flash_attn: no readelf: the library will need this machine's glibc or a newer one")
        return []
    moved = moved_symbols(_run(readelf, "--dyn-syms", "--wide", libc))
    folder.mkdir(parents=True, exist_ok=True)
    stubs = []
    for soname, pattern in LIBRARIES.items():
        symbols = {name: version for name, version in moved.items() if re.fullmatch(pattern, name)}
        if symbols:
            stubs.append(_stub(folder / soname, symbols, cxx))
    return ["-Wl,--as-needed", *stubs] if stubs else []


def _stub(path: Path, symbols: dict[str, str], cxx: str) -> str:
    assembly, script = path.with_suffix(".s"), path.with_suffix(".map")
    assembly.write_text("".join(_function(symbols)))
    script.write_text(version_script(symbols))
    _run(
        cxx, "-shared", "-nostdlib", f"-Wl,-soname,{path.name}", f"-Wl,--version-script={script}",
        str(assembly), "-o", str(path),
    )  # fmt: skip
    return str(path)


def _function(names: Iterable[str]) -> Iterable[str]:
    return (f".text\n.globl {name}\n.type {name}, %function\n{name}:\n" for name in names)
