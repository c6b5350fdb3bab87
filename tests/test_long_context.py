"""The scripts for several GPUs, in gloo processes: an update of two ranks is that of one, and the report."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import multi_gpu_runs  # noqa: E402
import sequence_parallel_report as report  # noqa: E402


def start(num_ranks: int, folder: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """The example's processes, as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(ROOT / "examples" / "long_context_sp.py"), "--device", "cpu"]
    command += ["--dtype", "float32", "--num-responses", "3", "--response-length", "9", "--steps", "1"]
    command += ["--json", str(folder / f"{num_ranks}.json"), *arguments]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def test_an_update_of_two_ranks_is_that_of_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    shape = ["--shape", "tiny-gemma-4", "--prompt-length", "53", "--boundary", "shared"]
    started = [*start(1, tmp_path, *shape), *start(2, tmp_path, *shape)]
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert all(process.returncode == 0 for process in started), outputs
    one, two = (json.loads((tmp_path / f"{n}.json").read_text())[0] for n in (1, 2))
    assert (one["packed_tokens"], two["packed_tokens"]) == (80, 80) and two["rows_per_rank"] == 40
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5) and one["grad_norm"] > 0
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-6)
    assert two["memory_gib"]["weights"] == pytest.approx(one["memory_gib"]["weights"] / 2, rel=0.05)
    for text in ("old log-probs", "optimizer state", "80 tokens a pack instead of 186"):
        assert text in outputs[1]


def rows() -> list[dict[str, Any]]:
    """Cells as sequence_parallel.py writes them: times halve, memory follows a known model."""
    found = []
    for prompt_len, n in ((1024, 16), (4096, 16), (8192, 16), (1024, 4), (4096, 4)):
        for size, provider in ((1, "ours"), (2, "ulysses-1"), (2, "fa2-replicated")):
            case = {"N": n, "P": prompt_len, "R": 128, "H": 32, "Hk": 8, "d": 128, "dtype": "bf16"}
            peak = 0.5 + (2e-4 * prompt_len + 3e-4 * n * 128) / size
            row = {
                "gpu": "a GPU",
                "torch": "2",
                "date": "today",
                "sp": size,
                "case": case,
                "provider": provider,
            }
            time_ms = prompt_len / size * (1.25 if size > 1 else 1.0)
            row |= {"fwd_ms": time_ms / 3, "time_ms": time_ms, "peak_gib": peak}
            if provider == "fa2-replicated":
                row = {k: v for k, v in row.items() if k != "time_ms"} | {"error": "OutOfMemoryError: much"}
            elif size > 1:
                row["communication_share"] = 0.2
            found.append(row)
    return found


def test_memory_model_is_found_and_carried_on() -> None:
    models = report.fit_memory(rows())
    for size in (1, 2):
        assert (
            models[size][:3] == pytest.approx((0.5, 2e-4 / size, 3e-4 / size)) and models[size].error < 1e-9
        )
    assert report.predicted(models, 8, 8192, 2048) == pytest.approx(0.5 + (2e-4 * 8192 + 3e-4 * 2048) / 8)
    assert report.predicted({1: models[1]}, 8, 8192, 2048) is None


def test_report_of_several_gpus(tmp_path: Path) -> None:
    from report import markdown_table

    text = report.text(rows(), markdown_table)
    assert "| ulysses-1, 2 GPUs | 1706.7 | 5120.0 | 1.6 | 80% | 20.0% |" in text
    assert "| fa2-replicated, 2 GPUs | OutOfMemoryError |" in text
    assert "| P = 8192, N·R = 2048 | 2.8 | 1.6 | 1.1 | 0.8 |" in text
    report.draw(rows(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    unmeasured = [{**row, "peak_gib": None} for row in rows()]
    assert "Memory was not measured." in report.text(unmeasured, markdown_table)


@pytest.mark.parametrize("num_gpus, expected", [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_runs_for_any_number_of_gpus(num_gpus: int, expected: list[int], tmp_path: Path) -> None:
    assert multi_gpu_runs.sizes(num_gpus) == expected
    with pytest.raises(SystemExit):
        multi_gpu_runs.main(["--num-gpus", "0", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        multi_gpu_runs.main(["--num-gpus", "1", "--only", "other", "--out", str(tmp_path)])
