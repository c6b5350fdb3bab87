"""The build without compiling: choices from the environment, generated sources, compiler reports."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "csrc" / "flash_attn"))

import build_support  # noqa: E402
import kernels  # noqa: E402


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_support, "visible_archs", lambda: [])


def test_without_a_gpu_and_archs_nothing_is_built(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_support.options_from_env({}) is None
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 1 and "FLASH_ATTN_CUDA_ARCHS=" in printed


def test_skip_wins_over_everything(capsys: pytest.CaptureFixture[str]) -> None:
    env = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE", "FLASH_ATTN_CUDA_ARCHS": "80"}
    assert build_support.options_from_env(env) is None
    assert "FLASH_ATTENTION_SKIP_CUDA_BUILD" in capsys.readouterr().out


def test_visible_gpus_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_support, "visible_archs", lambda: [80])
    options = build_support.options_from_env({})
    assert options is not None and options.gpus == (80,) and options.paths == (80,)


@pytest.mark.parametrize(
    ("env", "gpus", "paths"),
    [
        ({"FLASH_ATTN_CUDA_ARCHS": "80;90"}, (80, 90), (80, 90)),
        ({"FLASH_ATTN_CUDA_ARCHS": "90"}, (90,), (80, 90)),  # FLASH_ATTN_FORCE_ARCH=80 works on Hopper
        ({"TORCH_CUDA_ARCH_LIST": "7.0 7.5 8.0 8.6 9.0a+PTX"}, (80, 90), (80, 90)),
        ({"TORCH_CUDA_ARCH_LIST": "9.0", "FLASH_ATTN_CUDA_ARCHS": "8.9"}, (80,), (80,)),
        ({"FLASH_ATTN_CUDA_ARCHS": "120"}, (80,), (80,)),
    ],
)
def test_archs(env: dict[str, str], gpus: tuple[int, ...], paths: tuple[int, ...]) -> None:
    options = build_support.options_from_env(env)
    assert options is not None and (options.gpus, options.paths) == (gpus, paths)


def test_narrowed_builds() -> None:
    env = {"FLASH_ATTN_CUDA_ARCHS": "80", "FLASH_ATTN_HEAD_DIMS": "64;128", "FLASH_ATTN_DTYPES": "bf16"}
    options = build_support.options_from_env(env)
    assert options is not None
    built = {(k.head_dim, k.dtype, k.pass_name) for k in options.kernels()}
    assert built == {(d, "bf16", p) for d in (64, 128) for p in kernels.PASSES}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"FLASH_ATTN_CUDA_ARCHS": "ampere"}, "CUDA archs must look like"),
        ({"FLASH_ATTN_CUDA_ARCHS": "70"}, "before compute capability 8.0 are not supported, got '70'"),
        (
            {"FLASH_ATTN_CUDA_ARCHS": "80", "FLASH_ATTN_HEAD_DIMS": "48"},
            "head dim must be one of 64.*, got 48",
        ),
        ({"FLASH_ATTN_CUDA_ARCHS": "80", "FLASH_ATTN_DTYPES": "fp8"}, "dtype must be one of .*, got fp8"),
        ({"BUILD_TARGET": "rocm"}, "ROCm builds are not supported"),
    ],
)
def test_wrong_settings_are_named(env: dict[str, str], message: str) -> None:
    with pytest.raises(build_support.BuildError, match=message):
        build_support.options_from_env(env)


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_support.Path, "exists", lambda self: False)
    with pytest.raises(
        build_support.BuildError, match=r"nvcc was not found.*FLASH_ATTENTION_SKIP_CUDA_BUILD"
    ):
        build_support.find_nvcc({"PATH": str(tmp_path)})
    with pytest.raises(build_support.BuildError, match=r"pip install nvidia-cutlass==4\.2\.0"):
        build_support.find_cutlass()
    monkeypatch.setattr(build_support.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(build_support.BuildError, match="--no-build-isolation"):
        build_support.find_torch()


def test_jobs_follow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_support.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(build_support, "available_gib", lambda: 20.0)
    assert build_support.num_jobs({}) == 3  # 6.5 GB each
    assert build_support.num_jobs({"NVCC_THREADS": "2"}) == 1
    assert build_support.num_jobs({"MAX_JOBS": "7"}) == 7
    with pytest.raises(build_support.BuildError, match="MAX_JOBS must be a positive number, got 0"):
        build_support.num_jobs({"MAX_JOBS": "0"})


def test_machine_code() -> None:
    assert "arch=compute_90a,code=sm_90a" in build_support.gencode(90, (80, 90))
    assert build_support.gencode(80, (90,))[1] == "arch=compute_90,code=sm_90"
    assert "arch=compute_80,code=compute_80" in build_support.gencode(80, (80,))  # PTX for newer GPUs
    assert build_support.tile_defines((80, 90)) == [] == build_support.tile_defines((80,))
    assert build_support.tile_defines((90,)) == ["FLASH_ATTN_LARGE_TILES"]


REPORT = "ptxas info: f\n    0 bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"


def test_compiler_reports() -> None:
    assert build_support.log_problems("a.cu", REPORT.format(0, 0)) == []
    assert build_support.log_problems("a.cu", REPORT.format(4, 8)) == [
        "a.cu: 4 bytes spill stores, 8 bytes spill loads"
    ]
    serialised = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    )
    assert build_support.log_problems("a.cu", serialised) == ["a.cu: C7510 (wgmma serialised)"]
    assert build_support.log_problems("a.cu", REPORT.format(32, 32), 32) == []
    assert len(build_support.log_problems("a.cu", REPORT.format(36, 8), 32)) == 1


def test_generated_sources(tmp_path: Path) -> None:
    """Every kernel has a file, and a row of the table that names its functions; other passes are null."""
    listed = kernels.all_kernels(head_dims=[64, 128], passes=["fwd", "bwd"])
    files = kernels.write_sources(listed, tmp_path, "abc")
    assert [f.name for f in files] == [k.file_name for k in listed] and len(set(files)) == len(files)
    table = (tmp_path / "kernel_list.cpp").read_text()
    rows = re.findall(r"^    \{(.*)\},$", table, re.MULTILINE)
    assert len(rows) == len({(k.arch, k.head_dim, k.dtype) for k in listed})
    assert f"kNumKernels = {len(rows)};" in table and '"abc"' in table
    for row in rows:
        assert row.count("nullptr") == 4  # bwd_dq and the three of extras
    for path in files:
        for function in re.findall(r"cudaError_t (\w+)\(", path.read_text()):
            assert re.search(rf"::{function}\b", table), function
    before = [f.stat().st_mtime_ns for f in files]
    kernels.write_sources(listed, tmp_path, "abc")
    assert [f.stat().st_mtime_ns for f in files] == before  # incremental builds


def test_head_dims_are_those_of_the_tile_tables() -> None:
    """A row in tiles.h is what makes a kernel: a table nobody reads, or a kernel without tiles, cannot be."""
    assert kernels.HEAD_DIMS[80] == (64, 96, 128, 192, 256, 512)
    assert set(kernels.HEAD_DIMS[90]) >= {64, 96, 128, 192, 256}
    for arch, head_dims in kernels.HEAD_DIMS.items():
        assert {k.head_dim for k in kernels.all_kernels([arch])} == set(head_dims)


def test_large_head_dims_have_one_pass_an_output(tmp_path: Path) -> None:
    """Nothing finishes an accumulator of dq there: no such function is generated, and the table says so."""
    listed = kernels.all_kernels([80], head_dims=[256, 512], dtypes=["bf16"])
    kernels.write_sources(listed, tmp_path, "abc")
    rows = re.findall(r"^    \{(.*)\},$", (tmp_path / "kernel_list.cpp").read_text(), re.MULTILINE)
    small, large = sorted(rows, key=lambda row: "512" in row)
    assert ", false, " in small and "sm80::bwd_post_bf16_256" in small and "nullptr" not in small
    assert "sm80::fwd_extras_bf16_256, sm80::bwd_extras_bf16_256, sm80::bwd_dq_extras_bf16_256" in small
    assert ", true, " in large and large.endswith("sm80::bwd_dq_bf16_512" + ", nullptr" * 4)
    assert "bwd_post" not in (tmp_path / "sm80_bwd_bf16_512.cu").read_text()


def test_device_code_includes_no_torch() -> None:
    for folder in ("csrc", "hopper"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".cu", ".h") and path.name != "tensors.h":
                assert not re.search(r"#include\s*[<\"](torch|ATen|c10)/", path.read_text()), path
