"""GPU tests: both code paths, poisoned memory, and a JSON report (--gpu-report FILE)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the references run in deterministic mode
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "csrc" / "flash_attn"))

from kernels import ARCHS  # noqa: E402

DEFAULT_PATHS = ",".join(map(str, ARCHS))
CHOSEN = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", default=None, help="write passed and failed per file as JSON")
    parser.addoption(
        "--deadline", type=float, default=None, help="time (s since 1970) to stop; the rest: not run"
    )
    parser.addoption("--shard", default="0/1", help="i/n: every n-th test, from the i-th (run_isolated.py)")
    parser.addoption("--paths", default=DEFAULT_PATHS, help="code paths to test, 80,90")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent and not item.get_closest_marker("multi_gpu"):
            item.add_marker(pytest.mark.gpu)
    paths = config.getoption("--paths", DEFAULT_PATHS).split(",")
    index, count = map(int, config.getoption("--shard", "0/1").split("/"))
    if paths == DEFAULT_PATHS.split(",") and count == 1:
        return
    params = [getattr(item, "callspec", None) for item in items]
    asked = [str(c.params.get("path", 80) if c else 80) in paths for c in params]
    chosen = [item for item, ok in zip(items, asked, strict=True) if ok][index::count]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[CHOSEN] = [item.nodeid for item in session.items]


def pytest_runtest_setup(item: pytest.Item) -> None:
    deadline = item.config.getoption("--deadline", None)
    if deadline is not None and time.time() > deadline:
        pytest.exit("out of time", returncode=2)


@pytest.fixture(params=[90, 80], ids=["sm90a", "sm80"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The code path under test, forced."""
    if request.param == 90 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    monkeypatch.setenv("FLASH_ATTN_FORCE_ARCH", str(request.param))
    monkeypatch.setenv("FLASH_ATTN_BACKEND", "cuda")
    return request.param


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def environment() -> dict[str, Any]:
    from flash_attn import _backend

    library = torch.ops.flash_attn_cuda if _backend._load_library() is None else None
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "commit": os.environ.get("FLASH_ATTN_COMMIT") or _git("rev-parse", "--short=12", "HEAD"),
        "library": library.build_id() if library else "not built",
        "kernels": library.built() if library else "",
    }


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    target = config.getoption("--gpu-report", None)  # the options exist where tests/gpu is named
    if not target:
        return
    files: dict[str, Counter[str]] = {}
    tests: dict[str, str] = {}
    for outcome in ("passed", "skipped", "failed", "error"):  # the worst of a test's phases stays
        for report in terminalreporter.stats.get(outcome, []):
            tests[report.nodeid] = outcome
    tests = {name: "not run" for name in config.stash.get(CHOSEN, [])} | tests
    for name, outcome in tests.items():
        files.setdefault(name.split("::")[0], Counter())[outcome] += 1
    total = Counter()
    for counts in files.values():
        total.update(counts)
    report = {**environment(), "total": dict(total), "files": {f: dict(c) for f, c in sorted(files.items())}}
    report["tests"] = tests
    report["failures"] = [name for name, outcome in tests.items() if outcome not in ("passed", "skipped")]
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_text(json.dumps(report, indent=1) + "\n")
