"""The list of kernels: arch x pass x head dim x dtype. Everything that enumerates kernels asks here.

`write_sources` writes one .cu per kernel and the dispatch table (kernel_list.cpp) into a build folder;
build_support.py compiles them. GPU tests take their lists from here too.

    python csrc/flash_attn/kernels.py --archs 80 --head-dims 128 --dtypes bf16 --passes fwd --out build/dev
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PASSES = ("fwd", "bwd", "bwd_dq", "extras")  # extras: all three once more, with ALiBi and dropout
DTYPES = ("bf16", "fp16")
PASS_WISE_ABOVE = 256  # larger head dims: each gradient has a pass of its own, nothing needs finishing


@dataclass(frozen=True)
class Arch:
    number: int
    namespace: str
    folder: str  # of launch.h and tiles.h, from the repository's root
    elements: tuple[tuple[str, str], ...]  # C++ type of each dtype


ARCHS = {
    80: Arch(
        80, "sm80", "csrc/flash_attn/src/sm80", (("bf16", "cutlass::bfloat16_t"), ("fp16", "cutlass::half_t"))
    ),
    90: Arch(90, "sm90", "hopper", (("bf16", "cutlass::bfloat16_t"), ("fp16", "cutlass::half_t"))),
}


def tile_tables(arch: int) -> str:
    return (Path(__file__).resolve().parents[2] / ARCHS[arch].folder / "tiles.h").read_text()


# An arch has kernels for the head dims that its tile tables have rows for.
HEAD_DIMS = {
    arch: tuple(sorted({int(d) for d in re.findall(r"^ *\{(\d+),", tile_tables(arch), re.MULTILINE)}))
    for arch in ARCHS
}
MAX_HEAD_DIM = max(max(dims) for dims in HEAD_DIMS.values())

# Functions that the file of a pass defines; those of the table's columns.
FUNCTIONS = {
    "fwd": ("fwd",),
    "bwd": ("bwd", "bwd_post"),
    "bwd_dq": ("bwd_dq",),
    "extras": ("fwd_extras", "bwd_extras", "bwd_dq_extras"),
}
COLUMNS = ("fwd", "bwd", "bwd_dq", "bwd_post", *FUNCTIONS["extras"])
PARAMS = {name: "FwdParams" if name.startswith("fwd") else "BwdParams" for name in COLUMNS}
CPP_DTYPES = {"fp16": "DType::kFloat16", "bf16": "DType::kBFloat16"}


@dataclass(frozen=True)
class Kernel:
    arch: int
    pass_name: str
    head_dim: int
    dtype: str

    @property
    def file_name(self) -> str:
        return f"sm{self.arch}_{self.pass_name}_{self.dtype}_{self.head_dim}.cu"

    @property
    def pass_wise(self) -> bool:
        return self.head_dim > PASS_WISE_ABOVE

    @property
    def functions(self) -> tuple[str, ...]:
        names = FUNCTIONS[self.pass_name]
        return tuple(name for name in names if name != "bwd_post" or not self.pass_wise)

    def function(self, name: str) -> str:
        return f"{name}_{self.dtype}_{self.head_dim}"


def all_kernels(
    archs: Iterable[int] = tuple(ARCHS),
    head_dims: Sequence[int] | None = None,
    dtypes: Iterable[str] = DTYPES,
    passes: Iterable[str] = PASSES,
) -> list[Kernel]:
    """The kernels of these archs, narrowed to head dims, dtypes and passes. ValueError for unknown values."""
    known = sorted({d for dims in HEAD_DIMS.values() for d in dims})
    checks = (
        ("arch", archs, tuple(ARCHS)),
        ("head dim", head_dims or (), known),
        ("dtype", dtypes, DTYPES),
        ("pass", passes, PASSES),
    )
    for what, values, allowed in checks:
        for value in values:
            if value not in allowed:
                raise ValueError(f"{what} must be one of {', '.join(map(str, allowed))}, got {value}")
    return [
        Kernel(arch, pass_name, head_dim, dtype)
        for arch in sorted(archs)
        for dtype in dtypes
        for head_dim in HEAD_DIMS[arch]
        if head_dims is None or head_dim in head_dims
        for pass_name in passes
        if pass_name != "extras" or (arch == 80 and head_dim <= PASS_WISE_ABOVE)
    ]


def kernel_source(kernel: Kernel) -> str:
    arch = ARCHS[kernel.arch]
    element = dict(arch.elements)[kernel.dtype]
    lines = [f'#include "{arch.folder}/launch.h"', "", f"namespace flash_attn::{arch.namespace} {{"]
    for name in kernel.functions:
        lines.append(
            f"cudaError_t {kernel.function(name)}({PARAMS[name]} const& p, cudaStream_t stream) "
            f"{{ return run_{name}<{element}, {kernel.head_dim}>(p, stream); }}"
        )
    return "\n".join([*lines, f"}}  // namespace flash_attn::{arch.namespace}", ""])


def table_source(kernels: Sequence[Kernel], build_id: str) -> str:
    """kernel_list.cpp: one row per (arch, head dim, dtype), null for passes that are not built."""
    declarations, rows = [], []
    built = set(kernels)
    for arch, dtype, head_dim in dict.fromkeys((k.arch, k.dtype, k.head_dim) for k in kernels):
        space = ARCHS[arch].namespace
        columns = []
        for column in COLUMNS:
            owner = next(p for p, names in FUNCTIONS.items() if column in names)
            kernel = Kernel(arch, owner, head_dim, dtype)
            if kernel in built and column in kernel.functions:
                name = kernel.function(column)
                declarations.append(
                    f"namespace {space} {{ cudaError_t {name}({PARAMS[column]} const&, cudaStream_t); }}"
                )
                columns.append(f"{space}::{name}")
            else:
                columns.append("nullptr")
        facts = [str(arch), str(head_dim), CPP_DTYPES[dtype], tile_function(arch, head_dim)]
        facts.append("true" if head_dim > PASS_WISE_ABOVE else "false")
        rows.append(f"    {{{', '.join(facts + columns)}}},")
    includes = [f'#include "{ARCHS[a].folder}/tiles.h"' for a in dict.fromkeys(k.arch for k in kernels)]
    return "\n".join(
        [
            '#include "csrc/flash_attn/kernel_table.h"',
            *includes,
            "",
            "namespace flash_attn {",
            *declarations,
            "",
            "Kernels const kKernels[] = {",
            *(rows or ["    {},"]),
            "};",
            f"int const kNumKernels = {len(rows)};",
            f'char const* const kBuildId = "{build_id}";',
            "}  // namespace flash_attn",
            "",
        ]
    )


def tile_function(arch: int, head_dim: int) -> str:
    """Tile sizes by shared memory, where this arch's tiles.h distinguishes GPUs."""
    by_memory = re.search(r"tile_sizes\(int head_dim, int \w+\)", tile_tables(arch))
    arguments = f"{head_dim}, shared_memory" if by_memory else str(head_dim)
    name = " shared_memory" if by_memory else ""
    return f"[](int{name}) {{ return {ARCHS[arch].namespace}::tile_sizes({arguments}); }}"


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def write_sources(kernels: Sequence[Kernel], folder: Path, build_id: str) -> list[Path]:
    """Writes the .cu files (returned) and kernel_list.cpp; unchanged files keep their time stamps."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = []
    for kernel in kernels:
        path = folder / kernel.file_name
        write_if_changed(path, kernel_source(kernel))
        sources.append(path)
    write_if_changed(folder / "kernel_list.cpp", table_source(kernels, build_id))
    return sources


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import build_support

    build_support.main()
