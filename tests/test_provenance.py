"""Which commit a figure is said to be of: sources that differ from it are never left unsaid."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmarks_run", BENCHMARKS / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("cases", "providers", "providers_plain", "timing"):
        sys.modules.pop(name, None)
    return module


def test_changes_are_said(run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASH_ATTN_COMMIT", raising=False)
    assert run.commit(tmp_path) == "unknown"

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for name in ("source.py", "README.md", "benchmarks/results/rows.json"):
        (tmp_path / name).write_text("1\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD")
    (tmp_path / "README.md").write_text("2\n")
    (tmp_path / "benchmarks" / "results" / "rows.json").write_text("2\n")
    (tmp_path / "note.txt").write_text("untracked\n")
    assert run.commit(tmp_path) == head
    (tmp_path / "source.py").write_text("2\n")
    assert run.commit(tmp_path) == f"{head}+changes"
    monkeypatch.setenv("FLASH_ATTN_COMMIT", "abc")
    assert run.commit(tmp_path) == "abc"
