"""GPU tests: both code paths, poisoned memory, and a JSON report (--gpu-report FILE)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", default=None, help="write passed and failed per file as JSON")
    parser.addoption("--paths", default=DEFAULT_PATHS, help="code paths to test, 80,90")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent and not item.get_closest_marker("multi_gpu"):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(params=[90, 80], ids=["sm90a", "sm80"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The code path under test, forced."""
    if str(request.param) not in request.config.getoption("--paths", DEFAULT_PATHS).split(","):
        pytest.skip("not asked for (--paths)")
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
        "gpu": torch.cuda.get_device_name(),
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
    failures = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            files.setdefault(report.nodeid.split("::")[0], Counter())[outcome] += 1
            if outcome in ("failed", "error"):
                failures.append(report.nodeid)
    total = Counter()
    for counts in files.values():
        total.update(counts)
    report = {**environment(), "total": dict(total), "files": {f: dict(c) for f, c in sorted(files.items())}}
    report["failures"] = failures
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_text(json.dumps(report, indent=1) + "\n")
