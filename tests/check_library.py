"""Checks a compiled library without a GPU.

It loads under a CPU-only torch, holds no C++ symbols of torch or Python, links no CUDA runtime, and its code
uses the tensor cores of each arch; it is small enough, and every Linux of its platform tag can load it.

    python tests/check_library.py build/check/_C.so
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "csrc" / "flash_attn"))

import manylinux

MAX_BYTES = 100 * 2**20
OLD_ENOUGH = ("manylinux_2_17_x86_64", "manylinux_2_28_x86_64")  # torch's own wheels are of the second
# Libraries of every Linux (PEP 600), and torch's, which are loaded before.
LINKED = r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|torch|torch_cpu)\.so[.\d]*|ld-linux-[\w-]+\.so\.\d"
OPS = ("plan", "fwd", "bwd", "built", "build_id", "unsupported")
# arch of the machine code -> instructions that a main kernel of this arch must hold
AMPERE = ("HMMA.16816", "LDSM", "LDGSTS")
SASS = {"sm_80": AMPERE, "sm_90": AMPERE, "sm_90a": ("HGMMA", "UTMALDG")}


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_symbols(library: str) -> None:
    undefined = run("nm", "-DC", "--undefined-only", library)
    foreign = re.findall(r"\b(?:at|c10)::\S+|\bPy[A-Z_]\w+", undefined)
    assert not foreign, f"symbols of torch's C++ or Python: {foreign[:5]}"
    needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", library))
    assert not [n for n in needed if "cuda" in n], f"linked with CUDA libraries: {needed}"
    foreign = [n for n in needed if not re.fullmatch(LINKED, n)]
    assert not foreign, f"linked with libraries that a Linux need not have: {foreign}"
    assert "libtorch.so" in needed, needed
    print("symbols: stable ABI only;", len(needed), "libraries linked")


def check_platform(library: str) -> None:
    size, tag = Path(library).stat().st_size, manylinux.platform_tag(Path(library), "linux_x86_64")
    assert size <= MAX_BYTES, f"{size} bytes, allowed are {MAX_BYTES}"
    assert tag in OLD_ENOUGH, f"needs {manylinux.needed_versions(Path(library))}"
    print(f"{size / 2**20:.0f} MiB; {tag}")


def check_load(library: str) -> None:
    torch.ops.load_library(library)
    missing = [name for name in OPS if not hasattr(torch.ops.flash_attn_cuda, name)]
    assert not missing, missing
    built = torch.ops.flash_attn_cuda.built()
    assert built != "nothing"
    try:
        torch.ops.flash_attn_cuda.unsupported(0, 64, torch.float32)
    except ValueError as error:
        assert "dtype must be float16 or bfloat16" in str(error)
    else:
        raise AssertionError("an unknown dtype must be refused")
    print(f"loads under torch {torch.__version__}: {built}")


def find_tool(name: str) -> str | None:
    for spec in (importlib.util.find_spec("nvidia"),):
        for location in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(location).glob(f"*/bin/{name}")):
                return str(path)
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def check_sass(library: str) -> None:
    tool = find_tool("cuobjdump")
    if tool is None:
        sys.exit("cuobjdump was not found: pip install nvidia-cuda-cuobjdump")
    archs = set(re.findall(r"\.(sm_\d+a?)\.cubin", run(tool, "--list-elf", library)))
    if (
        "sm80: " not in torch.ops.flash_attn_cuda.built()
    ):  # then plan and preprocess alone are built for sm_90
        archs.discard("sm_90")
    for arch, instructions in SASS.items():
        if arch in archs:
            code = run(tool, "--dump-sass", "--gpu-architecture", arch, library)
            for instruction in instructions:
                assert instruction in code, f"{arch}: no {instruction}"
            print(f"{arch}: {', '.join(instructions)} found")
    assert archs & set(SASS), archs


if __name__ == "__main__":
    path = str(Path(sys.argv[1]).resolve())
    check_symbols(path)
    check_platform(path)
    check_load(path)
    check_sass(path)
