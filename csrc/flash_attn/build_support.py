"""Builds the CUDA library: which archs, which flags, how many jobs; ninja does the rest. Called by setup.py.

Environment: FLASH_ATTN_CUDA_ARCHS ("80;90"), TORCH_CUDA_ARCH_LIST, FLASH_ATTN_HEAD_DIMS ("64;128"),
FLASH_ATTN_DTYPES ("bf16"), MAX_JOBS, NVCC_THREADS, FLASH_ATTENTION_SKIP_CUDA_BUILD, CUDA_HOME, and
FLASH_ATTN_DEV_BUILD: spills and serialised wgmma fail the build. torch is not imported, its headers are used.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import kernels as kernel_list
import old_glibc

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc" / "flash_attn"
MAX_SPILL_BYTES = 0  # stored by a thread
MAX_SPILL_BYTES_EXTRAS = 64  # of kernels with ALiBi and dropout: the backward at head dim 64 stores 36
GIB_PER_JOB = 6.5  # peak of one nvcc job, measured on the largest kernels
TORCH_TARGET_VERSION = "0x020a000000000000"  # the library runs on torch >= 2.10
HOST_SOURCES = ("flash_api.cpp", "kernel_table.cpp", "portable.cpp")
DEVICE_SOURCES = ("src/common/plan.cu", "src/common/bwd_preprocess.cu")
HOW_TO_BUILD = (
    "to build the CUDA kernels, install on a machine where torch sees a GPU, or name the archs: "
    'FLASH_ATTN_CUDA_ARCHS="80;90" pip install --no-build-isolation .'
)
TRUE = ("1", "TRUE", "ON", "YES")


class BuildError(RuntimeError):
    """Something the user can fix; its text says how."""


@dataclass
class Options:
    gpus: tuple[int, ...]  # 80: Ampere and everything since, 90: Hopper
    paths: tuple[int, ...]  # kernels' archs; the sm_80 path is built for Hopper too
    head_dims: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = kernel_list.DTYPES
    passes: tuple[str, ...] = kernel_list.PASSES
    dev: bool = False
    defines: tuple[str, ...] = field(default=())

    def kernels(self) -> list[kernel_list.Kernel]:
        return kernel_list.all_kernels(self.paths, self.head_dims, self.dtypes, self.passes)


def is_true(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").upper() in TRUE


def split_list(text: str) -> list[str]:
    return [part for part in re.split(r"[;,\s]+", text) if part]


def parse_arch(text: str) -> int:
    """80 | 8.0 | 8.6+PTX | 90a | 9.0a -> the code path that serves it."""
    match = re.fullmatch(r"(\d+)\.?(\d)[a-z]?(\+PTX)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise BuildError(f'CUDA archs must look like "80;90" or "8.0 9.0a", got {text!r}')
    number = int(match[1]) * 10 + int(match[2])
    if number < 80:
        raise BuildError(f"GPUs before compute capability 8.0 are not supported, got {text!r}")
    return 90 if number == 90 else 80


def visible_archs() -> list[int]:
    """Code paths of the GPUs that nvidia-smi lists."""
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return sorted({parse_arch(line) for line in out.split("\n") if re.fullmatch(r"\d+\.\d", line.strip())})


def options_from_env(env: Mapping[str, str] = os.environ) -> Options | None:
    """What to build, or None: no CUDA library. Prints one line that says why."""
    for name in ("BUILD_TARGET", "GPU_ARCHS", "OPT_DIM", "FLASH_ATTENTION_TRITON_AMD_ENABLE"):
        if env.get(name, "").upper() not in ("", "0", "FALSE", "CUDA"):
            raise BuildError(f"{name}={env[name]}: ROCm builds are not supported, unset it")
    for name in ("FLASH_ATTENTION_FORCE_CXX11_ABI", "FLASH_ATTN_LOCAL_VERSION"):
        if env.get(name):
            print(f"flash_attn: {name} is ignored (stable ABI, static version)")
    if is_true(env, "FLASH_ATTENTION_SKIP_CUDA_BUILD"):
        print("flash_attn: FLASH_ATTENTION_SKIP_CUDA_BUILD is set, the CUDA library is not built")
        return None
    named = split_list(env.get("FLASH_ATTN_CUDA_ARCHS", ""))
    if not named:  # often set for a whole image, with archs older than ours
        named = [
            a
            for a in split_list(env.get("TORCH_CUDA_ARCH_LIST", ""))
            if float(a.split("+")[0].rstrip("af")) >= 8
        ]
    archs = sorted({parse_arch(a) for a in named}) if named else visible_archs()
    if not archs:
        print(f"flash_attn: no GPU visible and no arch named, the CUDA library is not built; {HOW_TO_BUILD}")
        return None
    options = Options(
        gpus=tuple(archs),
        paths=(80, 90) if 90 in archs else (80,),
        head_dims=tuple(int(d) for d in split_list(env.get("FLASH_ATTN_HEAD_DIMS", ""))) or None,
        dtypes=tuple(split_list(env.get("FLASH_ATTN_DTYPES", ""))) or kernel_list.DTYPES,
        dev=is_true(env, "FLASH_ATTN_DEV_BUILD"),
    )
    try:
        options.kernels()
    except ValueError as error:
        raise BuildError(str(error)) from error
    return options


def find_nvcc(env: Mapping[str, str] = os.environ) -> tuple[str, Path]:
    """(nvcc, toolkit folder): CUDA_HOME, then PATH, then the nvidia-cuda-nvcc wheel."""
    candidates = [Path(env[n]) / "bin" / "nvcc" for n in ("CUDA_HOME", "CUDA_PATH") if env.get(n)]
    on_path = shutil.which("nvcc", path=env.get("PATH"))
    candidates += [Path(on_path)] if on_path else []
    candidates += [Path("/usr/local/cuda/bin/nvcc")]
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or []) if spec else []:
        candidates += sorted(Path(location).glob("cu*/bin/nvcc"))
    for nvcc in candidates:
        if nvcc.exists():
            out = subprocess.run([str(nvcc), "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
            top = re.search(r"^#\$ TOP=(.*)$", out, re.MULTILINE)
            return str(nvcc), Path(top[1]).resolve() if top else nvcc.resolve().parents[1]
    raise BuildError(
        "nvcc was not found (CUDA_HOME, PATH, nvidia-cuda-nvcc wheel). Install a CUDA toolkit >= 12.4, or "
        "set FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE for the Python part (CPU, and torch's own GPU kernels)"
    )


def find_cutlass() -> Path:
    own = ROOT / "csrc" / "cutlass" / "include"
    if (own / "cutlass" / "cutlass.h").exists():
        return own
    spec = importlib.util.find_spec("cutlass_library")
    if spec and spec.origin:
        include = Path(spec.origin).parent / "source" / "include"
        if (include / "cutlass" / "cutlass.h").exists():
            return include
    raise BuildError(
        "CUTLASS headers were not found: pip install nvidia-cutlass==4.2.0, or put a checkout's include "
        "folder at csrc/cutlass/include"
    )


def find_torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(
            "torch was not found, and the CUDA library needs its headers. Install torch >= 2.10 first, then: "
            "pip install --no-build-isolation . (pip's isolated build environment does not see torch)"
        )
    return Path(spec.origin).parent


def available_gib() -> float:
    try:
        text = Path("/proc/meminfo").read_text()
        return int(re.search(r"MemAvailable:\s+(\d+)", text)[1]) / 2**20  # type: ignore[index]
    except (OSError, TypeError):
        return 8.0


def num_jobs(env: Mapping[str, str] = os.environ) -> int:
    """MAX_JOBS, else as many as cores and memory allow."""
    if env.get("MAX_JOBS"):
        jobs = int(env["MAX_JOBS"])
        if jobs < 1:
            raise BuildError(f"MAX_JOBS must be a positive number, got {env['MAX_JOBS']}")
        return jobs
    threads = max(int(env.get("NVCC_THREADS") or 1), 1)
    return max(1, min(os.cpu_count() or 1, int(available_gib() / (GIB_PER_JOB * threads))))


def gencode(path: int, gpus: Sequence[int]) -> list[str]:
    """Machine code of one code path.

    The sm_80 path runs on Hopper too (FLASH_ATTN_FORCE_ARCH=80): natively where only Hopper is asked,
    else from its PTX, which also serves GPUs newer than this library.
    """
    if path == 90:
        return ["-gencode", "arch=compute_90a,code=sm_90a"]
    if 80 not in gpus:
        return ["-gencode", "arch=compute_90,code=sm_90"]
    return ["-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_80,code=compute_80"]


def tile_defines(gpus: Sequence[int]) -> list[str]:
    """Hopper alone: the tiles for GPUs with less shared memory are left out, a third of the code."""
    return [] if 80 in gpus else ["FLASH_ATTN_LARGE_TILES"]


def nvcc_flags(cutlass: Path, cuda: Path, defines: Sequence[str], env: Mapping[str, str]) -> list[str]:
    flags = [
        "-std=c++17",
        "-O3",
        "--expt-relaxed-constexpr",
        "--expt-extended-lambda",
        "--use_fast_math",
        "-DNDEBUG",
    ]
    flags += ["-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden", f"-I{ROOT}", f"-I{cutlass}"]
    flags += [f"-D{d}" for d in defines]
    if (cuda / "include" / "cccl").exists():
        flags.append(f"-I{cuda / 'include' / 'cccl'}")
    if env.get("NVCC_THREADS"):
        flags += ["--threads", env["NVCC_THREADS"]]
    return flags


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def build_id() -> str:
    """Commit of the sources, with "+" when they differ from it; "unknown" outside a checkout."""
    try:
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", "csrc", "hopper")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def ninja_escape(text: str) -> str:
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def stub_flags(folder: Path, cxx: str) -> list[str]:
    try:
        return old_glibc.write_stubs(folder, cxx)
    except FileNotFoundError as error:
        raise BuildError(f"CXX={cxx} was not found") from error
    except subprocess.CalledProcessError as error:
        command = shlex.join(error.cmd)
        raise BuildError(f"stubs of glibc's old libraries: {command} failed:\n{error.stderr}") from error


def cxx_flags(torch: Path, cuda: Path) -> list[str]:
    return [
        "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", f"-I{ROOT}",
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", f"-I{torch / 'include'}", f"-I{cuda / 'include'}",
    ]  # fmt: skip


def link_flags(torch: Path, cuda: Path) -> list[str]:
    folders = (cuda / "lib64", cuda / "lib")
    lib64 = next((f for f in folders if (f / "libcudart_static.a").exists()), folders[0])
    return [
        "-shared", "-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed",
        f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu",
        f"-L{lib64}", "-lcudart_static", "-ldl", "-lpthread", "-lrt",
    ]  # fmt: skip


RULES = """\
ninja_required_version = 1.5
rule cuda
  command = {cuda} $gencode -MD -MF $out.d -c $in -o $out > $out.log 2>&1 || (cat $out.log; false)
  depfile = $out.d
  deps = gcc
  description = $out
rule cxx
  command = {cxx} -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = $out
rule link
  command = {link} -o $out
  description = $out
"""


def write_ninja(options: Options, folder: Path, env: Mapping[str, str] = os.environ) -> Path:
    """build.ninja and the generated sources. Returns the library's path."""
    nvcc, cuda = find_nvcc(env)
    cutlass, torch = find_cutlass(), find_torch()
    generated = kernel_list.write_sources(options.kernels(), folder / "src", build_id())
    cxx, quote, join = env.get("CXX") or "g++", shlex.quote, shlex.join
    launcher = shutil.which("ccache") or shutil.which("sccache") or ""
    nvcc_all = nvcc_flags(cutlass, cuda, [*options.defines, *tile_defines(options.gpus)], env)
    ld_flags = [*link_flags(torch, cuda), *stub_flags(folder / "stubs", cxx)]
    rules = RULES.format(
        cuda=f"{launcher} {quote(nvcc)} {join(nvcc_all)}".strip(),
        cxx=f"{launcher} {quote(cxx)} {join(cxx_flags(torch, cuda))}",
        link=f"{quote(cxx)} $in {join(ld_flags)}",
    )
    edges, objects = [], []

    def add(rule: str, source: Path, codes: Sequence[str] = ()) -> None:
        output = f"obj/{source.name}.o"
        objects.append(output)
        edges.append(f"build {output}: {rule} {ninja_escape(str(source))}")
        if codes:
            edges.append(f"  gencode = {join(codes)}")

    # the slowest first: large head dims, backward
    kernels = zip(options.kernels(), generated, strict=True)
    for kernel, path in sorted(kernels, key=lambda kp: (-kp[0].head_dim, kp[0].pass_name != "bwd")):
        add("cuda", path, gencode(kernel.arch, options.gpus))
    for name in DEVICE_SOURCES:
        add("cuda", CSRC / name, gencode(80, options.gpus))
    for path in [CSRC / name for name in HOST_SOURCES] + [folder / "src" / "kernel_list.cpp"]:
        add("cxx", path)
    edges.append(f"build _C.so: link {' '.join(objects)}")
    (folder / "build.ninja").write_text(rules + "\n".join(edges) + "\n")
    return folder / "_C.so"


def log_problems(name: str, log: str, max_spill_bytes: int = MAX_SPILL_BYTES) -> list[str]:
    """What a development build does not accept in the compiler's report of a main kernel."""
    problems = []
    for match in re.finditer(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log):
        if int(match[1]) > max_spill_bytes:
            problems.append(f"{name}: {match[0]}")
    for code, meaning in (("C7510", "wgmma serialised"), ("C7508", "setmaxnreg ignored")):
        if code in log:
            problems.append(f"{name}: {code} ({meaning})")
    return problems


def check_logs(options: Options, folder: Path) -> list[str]:
    problems = []
    for kernel in options.kernels():
        log = folder / "obj" / f"{kernel.file_name}.o.log"
        allowed = MAX_SPILL_BYTES_EXTRAS if kernel.pass_name == "extras" else MAX_SPILL_BYTES
        problems += log_problems(kernel.file_name, log.read_text(), allowed) if log.exists() else []
    return problems


def find_ninja() -> list[str]:
    found = shutil.which("ninja")
    if found:
        return [found]
    if importlib.util.find_spec("ninja"):
        return [sys.executable, "-m", "ninja"]
    raise BuildError("ninja was not found: pip install ninja")


def build(options: Options, folder: Path, env: Mapping[str, str] = os.environ) -> Path:
    """Compiles and links; incremental. Returns the library. BuildError when it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    library = write_ninja(options, folder.resolve(), env)
    jobs = num_jobs(env)
    count = len(options.kernels())
    print(f"flash_attn: {count} kernel files, {jobs} jobs (MAX_JOBS; {GIB_PER_JOB} GB each)", flush=True)
    command = [*find_ninja(), "-C", str(folder.resolve()), "-j", str(jobs)]
    status = {"NINJA_STATUS": "[%f of %t, %es] "}
    if subprocess.run(command, env={**os.environ, **status}).returncode != 0:
        raise BuildError(f"the CUDA library did not build (log above; objects and logs in {folder})")
    problems = check_logs(options, folder)
    for problem in problems:
        print(f"flash_attn: {problem}")
    if problems and options.dev:
        library.unlink()
        raise BuildError(f"{len(problems)} problems in the compiler's report (FLASH_ATTN_DEV_BUILD)")
    return library


def main() -> None:
    """Developer's build of a subset, outside pip."""
    parser = argparse.ArgumentParser(description="Compile a library with a subset of the kernels.")
    parser.add_argument("--archs", default="80", help='of the kernels: "80", "90" or "80;90"')
    parser.add_argument("--gpus", default="90", help='machine code for: "80", "90" or "80;90"')
    parser.add_argument("--head-dims", default="", help='"64;128", default: all')
    parser.add_argument("--dtypes", default=";".join(kernel_list.DTYPES))
    parser.add_argument("--passes", default=";".join(kernel_list.PASSES))
    parser.add_argument("--out", default="build/dev", help="folder; the library is OUT/_C.so")
    parser.add_argument("--define", action="append", default=[], help="macro for the kernels, NAME=VALUE")
    parser.add_argument("--strict", action="store_true", help="spills and serialised wgmma are errors")
    args = parser.parse_args()
    options = Options(
        gpus=tuple(sorted({parse_arch(a) for a in split_list(args.gpus)})),
        paths=tuple(sorted({parse_arch(a) for a in split_list(args.archs)})),
        head_dims=tuple(int(d) for d in split_list(args.head_dims)) or None,
        dtypes=tuple(split_list(args.dtypes)),
        passes=tuple(split_list(args.passes)),
        dev=args.strict,
        defines=tuple(args.define),
    )
    try:
        print(build(options, Path(args.out)))
    except (BuildError, ValueError) as error:
        sys.exit(f"flash_attn: {error}")


if __name__ == "__main__":
    main()
