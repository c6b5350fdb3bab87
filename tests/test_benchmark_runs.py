"""How benchmarks count work, check providers once, time slow calls less often, and resume."""

from __future__ import annotations

import importlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import break_even
import decoder_layer
import records
import run
import sequence_parallel
import timing
from cases import Case, uniform_lens

ROOT = Path(__file__).resolve().parents[1]


def test_work_of_ragged_responses_is_the_sum_over_them():
    ragged = Case(3, 1000, 400, num_heads=2, head_dim=8, ragged=True)
    lens = ragged.response_lens
    assert len(set(lens)) == 3 and all(131 <= r <= 400 for r in lens)
    pairs = 1000**2 / 2 + sum(1000 * r + r * r / 2 for r in lens)
    assert ragged.forward_flops() == 4 * 2 * 8 * pairs and ragged.total == 1000 + sum(lens)
    assert ragged.row()["ragged"] and "ragged" not in Case(3, 1000, 400).row()
    assert uniform_lens(8, 2048)[:3] == uniform_lens(3, 2048)  # larger micro-batches hold the smaller


def test_a_provider_is_checked_once_for_all_processes(tmp_path, monkeypatch):
    found = {"right": None, "wrong": "dk is wrong"}
    calls = []
    monkeypatch.setattr(run, "what_is_wrong", lambda name, case: (calls.append(name), found[name])[1])
    for _ in range(2):
        for name, text in found.items():
            assert run.checked(name, Case(2, 8, 8), "library a", tmp_path / "checks") == text
    assert calls == ["right", "wrong"]
    assert run.checked("wrong", Case(2, 8, 8), "library b", tmp_path / "checks") == "dk is wrong"
    assert run.checked("right", Case(2, 8, 8, head_dim=64), "library a", tmp_path / "checks") is None
    assert len(calls) == 4


def test_sequence_parallel_says_how_it_is_started(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="start it with torchrun, or with --cpu --num-ranks 2"):
        sequence_parallel.main([])


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["test-gpu", "bench", "bench-full"])
def test_targets_for_a_gpu_say_so(target, tmp_path):
    """With an nvidia-smi that finds none, or without one."""
    programs = {name: shutil.which(name) for name in ("sh", "head", "tr")}
    for name, path in programs.items():
        (tmp_path / name).symlink_to(path)
    for _ in range(2):
        found = subprocess.run(
            [shutil.which("make"), target, "PYTHON=false"],
            cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True,
        )  # fmt: skip
        assert found.stdout == f"make {target} needs an NVIDIA GPU\n"
        assert found.returncode == 2 and len(found.stderr.splitlines()) == 1, found.stderr
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
        (tmp_path / "nvidia-smi").chmod(0o755)


def commands() -> list[str]:
    """The README's commands that print one row."""
    text = (ROOT / "benchmarks" / "README.md").read_text().split("One row of a table", 1)[1]
    lines = text.split("```sh\n", 1)[1].split("```", 1)[0].splitlines()
    return [line.partition("#")[0].strip() for line in lines]


@pytest.mark.parametrize("command", commands())
def test_one_row_is_one_command(command, monkeypatch):
    """As far as it goes without a GPU: arguments are understood."""
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: False)
    python, script, *arguments = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    assert python == "python"
    monkeypatch.setattr(run, "PROVIDERS", run.PROVIDERS | {"fa4-two-call": None})  # not installed here
    with pytest.raises(SystemExit, match=rf"^{Path(script).name} needs an NVIDIA GPU$"):
        importlib.import_module(Path(script).stem).main()


@pytest.mark.parametrize("name", ["28:16384", "28:4096:2048:bf16", "8:64:64:32:8:64:fp8", "plain:16", "x"])
def test_what_is_no_case_is_named(name):
    with pytest.raises(SystemExit, match=rf"^a case is N:P:R\[.* or one of .*, got '{name}'$"):
        run.cases_of(f"28:4096:2048,{name}")
    kinds = run.cases_of("28:4096:2048:32:8:64:fp16,plain:2:500:full:64,28:4096:2048")
    assert [case.head_dim for case in kinds] == [64, 64, 128] and kinds[0].dtype == "fp16"


@pytest.mark.parametrize(
    ("script", "arguments", "otherwise"),
    [
        ("trl_updates", [], "--model tiny --device cpu --dtype float32"),
        ("trl_updates", ["--model", "tiny"], "--model tiny --device cpu --dtype float32"),
        ("verl_updates", [], "--model tiny"),
        ("verl_updates", ["--model", "qwen3-30b-a3b"], "--model tiny"),
    ],
)
def test_a_trainers_updates_name_what_runs_without_a_gpu(script, arguments, otherwise, monkeypatch):
    """One line before the trainer is imported; on a CPU only what is asked for."""
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{script}.py"])
    module = importlib.import_module(script)
    with pytest.raises(SystemExit, match=rf"^{script}\.py needs an NVIDIA GPU \(on a CPU: {otherwise}\)$"):
        module.main(arguments)
    for name in ("Bench", "start_processes"):
        monkeypatch.setattr(module, name, lambda *_: sys.exit("starts"), raising=False)
    with pytest.raises(SystemExit, match=r"^starts$"):
        module.main(otherwise.split())


def test_slow_calls_run_fewer_rounds(monkeypatch):
    times = {"fast": 1.0, "slow": timing.SLOW_MS + 1, "slowest": timing.ONCE_MS + 1}
    calls = []
    monkeypatch.setattr(timing, "once", lambda call: call())
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)
    got = timing.interleaved(
        {name: lambda name=name: (calls.append(name), times[name])[1] for name in times}, repeats=7, warmup=2
    )
    assert {name: found.rounds for name, found in got.items()} == {
        "fast": 7, "slow": timing.SLOW_ROUNDS, "slowest": 1,
    }  # fmt: skip
    assert {name: found.time_ms for name, found in got.items()} == times
    assert {name: calls.count(name) for name in times} == {"fast": 9, "slow": 4, "slowest": 2}


def test_a_way_that_holds_much_memory_is_timed_by_itself(monkeypatch):
    """It is let go before the next one; a failure leaves the others; no memory is counted twice."""
    held: list[float] = []

    class Held:  # what a provider keeps on the GPU
        def __init__(self, gib: float) -> None:
            self.gib = gib
            held.append(gib)

        def __del__(self) -> None:
            held.remove(self.gib)

    def provider(gib: float):
        def make(problem):
            if not gib:
                raise NotImplementedError("not here")
            kept = Held(gib)
            return (lambda: kept.gib), (lambda: kept.gib)

        return make

    timed: list[list[str]] = []
    held_then: list[list[float]] = []

    def interleaved(calls, repeats, warmup):
        timed.append(list(calls))
        held_then.append(sorted(held))
        return {name: timing.Timing(2.0, 2.0, 2.0, repeats) for name in calls}

    names = {"small": 1.0, "absent": 0.0, "large": run.APART_GIB + 1, "other": 2.0}
    monkeypatch.setattr(run, "PROVIDERS", {name: provider(gib) for name, gib in names.items()})
    monkeypatch.setattr(run, "Problem", lambda case: None)
    monkeypatch.setattr(run, "interleaved", interleaved)
    monkeypatch.setattr(run.torch.cuda, "memory_allocated", lambda: (10 + sum(held)) * 2**30)
    monkeypatch.setattr(run, "memory", lambda call: timing.Memory(11.0 + sum(held), call()))
    rows = run.time_case(Case(2, 8, 8), names, 3, {})
    assert timed == [["large"], ["large"], ["small", "other"], ["small", "other"]]
    assert held_then == [[1.0, 9.0], [1.0, 9.0], [1.0, 2.0], [1.0, 2.0]] and held == []
    assert [(row["provider"], row["pass"], row.get("apart"), row.get("error")) for row in rows[:4]] == [
        ("absent", "fwd", None, "NotImplementedError: not here"),
        ("absent", "bwd", None, "NotImplementedError: not here"),
        ("large", "fwd", True, None), ("large", "bwd", True, None),
    ]  # fmt: skip
    peaks = {row["provider"]: row["peak_gib"] for row in rows if row["pass"] == "bwd" and "peak_gib" in row}
    assert peaks == {"small": 12.0, "large": 11.0 + run.APART_GIB + 1, "other": 13.0}


def test_what_a_resumed_run_keeps(tmp_path):
    facts = {"gpu": "a", "driver": "1", "torch": "2", "library": "x", "commit": "c"}
    row = facts | {"case": {"N": 8}, "pass": "fwd", "time_ms": 1.23456789}
    rows = [row | {"provider": name} for name in ("ours", "fa2-replicated")]
    path = tmp_path / "new folder" / "rows.json"
    assert records.earlier(path, facts) == ([], [])
    records.write_rows(path, rows)
    assert len(path.read_text().splitlines()) == 4  # a row a line
    own, others = records.earlier(path, facts)
    assert [row["time_ms"] for row in own] == [1.23457] * 2 and others == []
    assert records.earlier(path, facts | {"library": "y"}) == ([], own)
    cells = [("ours", 8), ("fa4-two-call", 8), ("cudnn-padded", 1), ("cudnn-padded", 8), ("fa2-two-call", 1)]
    layer = [facts | {"provider": name, "case": {"P": 1024, "mb": count}} for name, count in cells]
    holds = [decoder_layer.still_holds(row, facts | {"library": "y"}) for row in layer]
    assert holds == [False, False, False, True, True]
    assert not any(decoder_layer.still_holds(row, facts | {"gpu": "b"}) for row in layer)


def test_a_map_that_is_cut_short_keeps_its_cells(tmp_path, monkeypatch):
    facts = {"gpu": "a", "driver": "1", "torch": "2", "library": "x", "commit": "c"}
    measured = []

    def cell(case: Case, provider: str, repeats: int) -> dict:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(case)
        return {"case": case.row(), "provider": provider, "speedup": 2.0}

    for name, value in {"cell": cell, "require_gpu": lambda: None, "environment": lambda: facts}.items():
        monkeypatch.setattr(break_even, name, value)
    monkeypatch.setattr(break_even, "clean", lambda: None)
    out = tmp_path / "map.json"
    monkeypatch.setattr(
        sys, "argv", ["break_even.py", "--out", str(out), "--responses", "2", "4", "--resume"]
    )
    for count in (3, 6):
        measured.clear()
        with pytest.raises(KeyboardInterrupt):
            break_even.main()
        assert len(records.read_rows(out)) == count


def test_new_measurements_take_the_places_of_old_ones():
    old = [
        {"case": {"N": 8}, "provider": name, "pass": "fwd", "graph": False, "time_ms": 1.0}
        for name in ("ours", "flex")
    ]
    again, graph, other = (old[0] | change for change in ({"time_ms": 2.0}, {"graph": True}, {"pass": "bwd"}))
    assert records.merged(old, [graph, again, other]) == [again, old[1], graph, other]
    assert records.merged([], old) == old and records.merged(old, []) == old


def test_a_provider_may_be_asked_for_some_cases_only():
    case = Case(28, 4096, 2048, head_dim=64)
    assert (
        run.runs_on("flex", case)
        and run.runs_on("flex@64", case)
        and run.runs_on("flex@128+28:4096:2048", case)
    )
    assert not run.runs_on("flex@128", case) and not run.runs_on("flex@28:4096:256", case)
    assert run.expanded("f*x@64") == ["flex@64"] and run.expanded("other") == ["other"]
    assert run.expanded("*-two-call")[:2] == ["fa2-two-call", "cudnn-two-call"]


def test_ways_of_a_cell_run_in_turn_and_memory_of_one_is_not_anothers(monkeypatch):
    """Steps in turn run all rounds, one alone as many as it takes, a slow one stands after its first; what
    memory cannot hold is split.
    """
    clock: list[float] = []
    allocated = [0]

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None: ...

        def elapsed_time(self, end: object) -> float:
            return clock[-1]

    class Step:
        def __init__(self, layer, batch, name, *_) -> None:
            self.ms, self.gib = batch
            allocated[0] += self.gib * 2**30
            if allocated[0] > 100 * 2**30:
                allocated[0] -= self.gib * 2**30
                self.gib = 0
                raise decoder_layer.torch.OutOfMemoryError("no memory")

        def __call__(self) -> None:
            clock.append(self.ms)

        def reset(self) -> None: ...

        def __del__(self) -> None:
            allocated[0] -= self.gib * 2**30

    for name, value in {
        "Event": Event, "memory_allocated": lambda: allocated[0], "synchronize": lambda: None,
        "max_memory_allocated": lambda: allocated[0] + 2**30, "reset_peak_memory_stats": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(decoder_layer.torch.cuda, name, value)
    monkeypatch.setattr(decoder_layer, "Step", Step)
    monkeypatch.setattr(decoder_layer, "map_memory", lambda: None)
    layer = decoder_layer.Layer(decoder_layer.Shape(8, 8), "cpu", decoder_layer.torch.float32)
    long, slow = decoder_layer.ENOUGH_MS + 1, decoder_layer.SLOW_IN_TURN_MS + 1
    found = decoder_layer.measured(layer, {"short": (1.0, 10), "long": (long, 20), "slow": (slow, 30)}, 4)
    assert [(row["time_ms"], row["rounds"], row["warmed"], row["peak_gib"]) for row in found.values()] == [
        (1.0, 4, True, 11.0), (long, 4, True, 21.0), (slow, 1, False, 31.0),
    ]  # fmt: skip
    assert set(clock[:3]) == {1.0, long, slow} and len(clock) == 11 and allocated == [0]
    assert set(clock[3:5]) == set(clock[5:7]) == {1.0, long}
    for ms, rounds, warmed in ((1.0, 5, True), (long, 1, True), (decoder_layer.SLOW_MS + 1, 1, False)):
        row = decoder_layer.measured(layer, {"alone": (ms, 10)})["alone"]
        assert (row["time_ms"], row["rounds"], row["warmed"]) == (ms, rounds, warmed)
    found = decoder_layer.measured(layer, {"fits": (1.0, 60), "too": (1.0, 60), "never": (1.0, 101)})
    assert [row.get("peak_gib") for row in found.values()] == [61.0, 61.0, None]
    assert found["never"] == {"error": "OutOfMemoryError: no memory", "out_of_memory": True}
    names = ["cudnn-padded", "ours", "gather-varlen", "fa4-two-call"]
    assert decoder_layer.in_turn(names, 8) == [["ours", "fa4-two-call"], ["cudnn-padded"], ["gather-varlen"]]
    assert decoder_layer.in_turn(names, 1) == [["cudnn-padded", "ours", "fa4-two-call"], ["gather-varlen"]]
    assert decoder_layer.in_turn(["gather-varlen"], 1) == [["gather-varlen"]]
