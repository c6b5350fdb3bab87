"""What the README says is so: its code runs, its figures are those of the JSON, its tests and paths exist."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
STATES = ("works", "falls back", "refused", "not yet")


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report():
    return load(ROOT / "benchmarks" / "report.py")


def table(head: str) -> list[list[str]]:
    """Cells of the README's table whose first line is `head`."""
    lines = README.split(head + "\n", 1)[1].splitlines()[1:]
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_example_runs_and_says_what_it_saves(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    names: dict = {}
    exec(compile(blocks[0], "README.md", "exec"), names)
    assert capsys.readouterr().out == "126 -> 48 tokens\n"
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in names["model"].parameters())
    rows = names["unpack_responses"](names["log_probs"], names["packed"])
    assert [len(row) for row in rows] == [3, 1, 2]


def test_figures_are_those_of_the_measurements(report):
    assert report.BLOCKS["policy_update"].sources(), "the demo was not measured"
    for block in report.BLOCKS.values():
        text = (ROOT / block.document).read_text()
        assert report.filled(text, block) == text, f"{block.name} is out of date: run make report"
        if block.draw:
            plots = [block.plot(source, kind) for source in block.sources() for kind in (".png", ".svg")]
            assert all(plot.is_file() for plot in plots), f"{block.name}: run make report"


def test_a_changed_figure_is_noticed(report, tmp_path, monkeypatch):
    block = report.BLOCKS["policy_update"]
    record = json.loads(block.sources()[0].read_text())
    record["variants"]["shared"]["tokens"] += 1
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "policy_update.json").write_text(json.dumps(record))
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "check_commit", lambda *_: None)
    assert report.filled(README, block) != README


def test_rows_of_a_gpu_run_become_a_table_and_a_plot(report, tmp_path):
    case = {"N": 8, "P": 1024, "R": 256, "H": 32, "Hk": 8, "d": 128, "dtype": "bf16", "groups": 1}
    facts = {"gpu": "a GPU", "driver": "1", "cuda": "13.0", "torch": "2.13.0", "date": "2026-01-01"}
    rows = [
        {**facts, "matmul_tflops": 700, "case": case, "pass": direction, "provider": provider,
         "time_ms": time_ms, "tflops": 100 / time_ms, "peak_gib": 1.5, "extra_gib": 0.25}
        for provider, time_ms in (("slow", 4.0), ("fast", 2.0))
        for direction in ("fwd", "bwd")
    ]  # fmt: skip
    text = report.BLOCKS["kernel_tables"].text(rows)
    assert text.index("| fast | 2.0 | 50 | 2.0 | 50 | 4.0 | 1.5 | 0.2 |") < text.index(
        "| slow | 4.0 | 25 | 4.0 | 25 | 8.0 | 1.5 | 0.2 |"
    )
    report.BLOCKS["kernel_tables"].draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_memory_of_a_stack_is_estimated_only_where_it_was_not_measured(report):
    case = {"num_layers": 6, "prompt_len": 100, "response_len": 10, "num_responses": 2, "dtype": "bfloat16"}
    machine = {"gpu": "a GPU", "memory_gib": 140.0, "torch": "2", "date": "today"}
    one, all_rows = (
        {"name": f"replicated, {n}", "tokens": 110 * n, "peak_gib": 10.0 * n, "time_s": 1.0} for n in (1, 2)
    )
    record = {
        "case": case, "machine": machine, "parameters": 3e9, "backends": {}, "replicated_tokens": 220,
        "replicated_estimate_gib": 20.0, "log_probs": None,
        "packed": {"tokens": 120, "peak_gib": 11.0, "time_s": 1.1}, "replicated": [one, all_rows],
    }  # fmt: skip
    text = report.BLOCKS["gemma4_stack"].text
    assert "| replicated, 2 of 2 rows | 220 | 20.0 | 1.0 |" in text(record) and "estimate" not in text(record)
    lost = {"name": "replicated, 2", "error": "CUDA out of memory", "layer": 3, "module": ""}
    found = text(record | {"replicated": [one, lost]})
    assert "| replicated, all rows | 220 | 20 (estimate) | - |" in found
    assert "ran out of memory in layer 3: CUDA out of memory." in found


@pytest.mark.parametrize("commit", [None, "0" * 40 + "+changes", "f" * 40])
def test_figures_of_another_checkout_are_refused(report, commit):
    if commit == "f" * 40 and not (ROOT / ".git").exists():
        pytest.skip("ancestors are known to git only")
    with pytest.raises(ValueError, match=r"policy_update.json must be measured on .*, got"):
        report.check_commit(commit, report.BLOCKS["policy_update"].sources()[0])


def test_every_row_of_the_support_table_names_a_test_that_exists():
    rows = table("| feature | state | test |")
    assert len(rows) > 15
    for feature, state, test in rows:
        assert state.startswith(STATES), f"{feature}: state {state!r}"
        path, _, name = test.strip("`").partition("::")
        assert (ROOT / path).is_file(), f"{feature}: no file {path}"
        assert name, f"{feature}: {path} names no test"
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (
            f"{feature}: no {name} in {path}"
        )


def test_what_works_on_a_gpu_was_run_on_one(report):
    """The rows on tests/gpu have the states of the committed runs of that suite; make report sets them."""
    rows = [row for row in table("| feature | state | test |") if "`tests/gpu/" in row[2]]
    assert len(rows) >= 3
    assert report.support_states(README) == README, "run make report"


def test_what_is_not_yet_there_is_not_there():
    """Whoever builds one of these changes the table."""
    not_yet = " ".join(
        feature for feature, state, _ in table("| feature | state | test |") if state == "not yet"
    )
    built = {path.stem for path in (ROOT / "flash_attn" / "integrations").glob("*.py")}
    built |= {path.stem for path in (ROOT / "flash_attn" / "shared_prompt").glob("*.py")}
    built |= {path.name for path in (ROOT / "flash_attn").iterdir()}
    built |= {path.stem for path in ROOT.glob("*.py")}
    for word, module in {
        "veRL": "verl",
        "OpenRLHF": "openrlhf",
        "ZeRO-3": "deepspeed",
        "Ulysses": "ulysses",
        "`layers`": "layers",
        "`ops`": "ops",
        "`losses`": "losses",
        "`flash_attn_2_cuda`": "flash_attn_2_cuda",
    }.items():
        assert (word in not_yet) != (module in built), f"{word}: the table and {module}.py disagree"


def test_the_map_and_the_commands_lead_to_files():
    paths = [path for row in table("| path | what |") for path in re.findall(r"`([^`]+)`", row[0])]
    commands = re.findall(r"(?:python |^)((?:examples|benchmarks|docs)/\w+\.py)", README, re.MULTILINE)
    assert len(paths) > 5 and commands
    for path in [*paths, *commands]:
        assert (ROOT / path).exists(), f"README.md names {path}, which does not exist"


DOCUMENTS = ["README.md", "docs/code.md", "benchmarks/README.md", "hopper/README.md"]
DOCUMENTS += ["csrc/cutlass/README.md", "csrc/flash_attn/src/sm80/README.md"]


def anchors(document: Path) -> set[str]:
    """What links into a document may name: its headings as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_and_headings(document):
    path = ROOT / document
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        file = path.parent / target if target else path
        assert file.exists(), f"{document} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(file), (
            f"{document} links to {target}#{anchor}: no such heading"
        )


def test_the_page_about_the_code_names_files_that_exist():
    text = (ROOT / "docs" / "code.md").read_text()
    named = re.findall(r"`([\w/]+(?:\.(?:py|h|md|cpp)|/))`", text)
    named += re.findall(r"^ +([\w/]+(?:\.(?:py|cpp)|/)) ", text, re.MULTILINE)
    folders = [ROOT / name for name in ("flash_attn", "csrc", "hopper", "tests", "benchmarks")]
    paths = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    there = {f"/{path.relative_to(ROOT).as_posix()}" for path in paths}
    gone = [name for name in named if not any(path.endswith("/" + name.rstrip("/")) for path in there)]
    assert named and not gone, f"docs/code.md names {gone}"


def test_the_first_figures_are_those_of_the_table_below_them():
    head, gains = README.split("## Two commands")[0], README.split("begin gains")[1].split("end gains")[0]
    for name, factor in zip(("TRL", "veRL"), re.findall(r"(\d+\.\d) times", head), strict=True):
        row = rf"^\| {name}'s (policy )?update.*\| {factor}x \|$"
        assert re.search(row, gains, re.MULTILINE), f"{name}: {factor}"


def test_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"README.md says make {target}"


def test_a_windowed_layer_is_measured_by_the_rate_without_a_window(report):
    rates = {"fwd": (600, 400), "bwd": (500, 400)}
    rows = [
        {
            "case": {"d": 256, **window},
            "provider": "ours",
            "pass": name,
            "tflops": rate,
            "time_ms": 1200 / rate,
        }
        for name, pair in rates.items()
        for window, rate in zip(({}, {"window_left": 99}), pair, strict=True)
    ]
    # 3 and 3 ms, at the rates without a window 2 and 2.4
    assert report.kernel_report.window_ratios(rows) == [
        "ours fwd 1.50",
        "ours bwd 1.25",
        "both passes ours 1.36",
    ]
    assert report.kernel_report.window_ratios(rows[:2]) == ["ours fwd 1.50"]
    assert report.kernel_report.window_ratios(rows[:1]) == []
