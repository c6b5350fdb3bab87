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

import long_context_report  # noqa: E402
import multi_gpu_runs  # noqa: E402
import sequence_parallel_report as report  # noqa: E402
import verl_report  # noqa: E402


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
    assert one["commit"] == one["machine"]["commit"]  # where report.py looks for it
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


def test_without_a_gpu_they_say_what_runs_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    message = r"^multi_gpu_runs\.py needs NVIDIA GPUs \(or --tiny --num-gpus 8\)$"
    with pytest.raises(SystemExit, match=message):
        multi_gpu_runs.main(["--out", str(tmp_path)])
    script = str(ROOT / "examples" / "long_context_sp.py")
    hidden = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run([sys.executable, script], env=hidden, capture_output=True, text=True)
    otherwise = "(on a CPU: --device cpu --shape tiny-llama)"
    assert (found.returncode, found.stderr) == (1, f"long_context_sp.py needs NVIDIA GPUs {otherwise}\n")


def test_more_gpus_are_held_against_the_model_of_fewer() -> None:
    from report import markdown_table

    ours = [row for row in rows() if row["provider"] != "fa2-replicated"]
    four = [{**row, "sp": 4, "peak_gib": 2 * row["peak_gib"]} for row in ours if row["sp"] == 2]
    text = report.text(ours + four, markdown_table)
    said = 0.5 + (2e-4 * 8192 + 3e-4 * 2048) / 4
    measured = 2 * (0.5 + (2e-4 * 8192 + 3e-4 * 2048) / 2)
    line = f"| P = 8192, N·R = 2048 | 4 | {measured:.2f} | {said:.2f} | {measured / said:.2f} |"
    assert line in text and "measured / model" not in report.text(ours, markdown_table)


def verl_row(provider: str, name: str, seconds: float, **more: Any) -> dict[str, Any]:
    shared = provider == "shared"
    return {
        "model": "qwen3-30b-a3b", "num_layers": 48, "provider": provider, "pass": name, "micro_batch": 4,
        "num_micro_batches": 4, "dp": 8, "sp": 1, "flops": 1e12 if shared else 2e12, "flop_ratio": 2.0,
        "seconds": seconds, "num_repeats": 1, "peak_gib": 5.0 if shared else 9.0,
    } | more  # fmt: skip


def test_steps_are_their_passes_together() -> None:
    from report import markdown_table

    found = [verl_row("shared", name, 1.0) for name in verl_report.PASSES]
    found += [verl_row(verl_report.OWN, name, 1.5) for name in verl_report.PASSES]
    text = verl_report.passes(found, markdown_table)
    assert "micro-batches of 4: GRPO step | 3.00 | 4.50 | - | 1.50x | 2.00x | 75% | - | 5.0 | 9.0 |" in text
    assert "micro-batches of 4: DAPO step | 2.00 | 3.00 | - | 1.50x |" in text
    assert "DAPO" not in verl_report.passes(found[1:], markdown_table)


def test_shared_rows_stand_against_the_least_sequence_parallelism_that_fits() -> None:
    own = {"provider": verl_report.OWN, "name": "policy_update"}
    found = [verl_row("shared", "policy_update", 4.0)]
    found += [verl_row(**own, seconds=0.0) | {"error": "CUDA out of memory"}]
    found[-1].pop("seconds")
    found += [verl_row(**own, seconds=6.0, dp=4, sp=2), verl_row(**own, seconds=9.0, dp=2, sp=4)]
    text = verl_report.smallest_degree(found)
    assert text.endswith(f"0.500 s a group, {verl_report.OWN} with SP=2 1.500 s: 3.00 times")
    found.append(verl_row(**own, seconds=8.0))  # fits without any
    assert verl_report.smallest_degree(found) == ""


def test_replicated_runs_end_with_the_first_degree_that_fits(tmp_path: Path, monkeypatch: Any) -> None:
    commands: list[list[str]] = []
    found: list[dict[str, Any]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        degree = int(command[command.index("--sp") + 1]) if "--sp" in command else 1
        provider = command[command.index("--providers") + 1]
        # At first replicated rows end in a crash that writes nothing; a row of another model does not count.
        found.append(verl_row(provider, "policy_update", 1.0, sp=degree))
        found[-1]["model"] = "tiny" if provider != "shared" and degree < 2 else "tiny-moe"
        (tmp_path / "verl_updates.json").write_text(json.dumps(found))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    arguments = ["--tiny", "--num-gpus", "8", "--only", "moe", "--out", str(tmp_path)]
    assert multi_gpu_runs.main(arguments) == 0
    degrees = [c[c.index("--sp") + 1] if "--sp" in c else None for c in commands]
    assert degrees == [None, "1", "2"]
    assert all(c[c.index("--nproc-per-node") + 1] == "8" for c in commands)


def test_report_of_whole_updates(tmp_path: Path) -> None:
    from report import markdown_table

    def record(world: int, seconds: float, peak: float | None) -> dict[str, Any]:
        case = {"shape": "llama-3.1-8b", "prompt_length": 131072, "num_responses": 16}
        case |= {"response_length": 2048, "dtype": "bfloat16", "optimizer": "sgd", "steps": 1}
        phases = {name: {"seconds": seconds / 4, "peak_gib": peak} for name in long_context_report.PHASES}
        facts = {"device": "a GPU", "torch": "2", "transformers": "5", "date": "today"}
        return {
            "case": case, "phases": phases, "machine": facts, "commit": "0123456789abcdef", "world": world,
            "sp": world, "num_layers": 8, "update_seconds": seconds,
        }  # fmt: skip

    measured = [record(2, 9.0, 50.0), record(1, 12.0, None), record(2, 8.0, 40.0)]
    text = long_context_report.text(measured, markdown_table)
    assert "8 layers, sgd*, P=131,072 | 1 | 3.00 | 3.00 | 3.00 | 3.00 | 12.00 | - |  |" in text
    assert "| 2 | 2.00 | 2.00 | 2.00 | 2.00 | 8.00 | 40.0 | 75% |" in text and "9.00" not in text
    long_context_report.draw(measured, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
