"""Seconds and peak memory of a phase, and what machine they were measured on.

Peak memory is what a phase adds: on Linux the kernel's high-water mark of resident memory, reset when it
starts; on a GPU torch's. Freed memory is handed back first, so that no phase hides in what another left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

MIB = 2**20


@dataclass
class Phases:
    """Seconds and additional peak MiB (None where the system does not tell) of each phase, in order."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    peak_mib: dict[str, float | None] = field(default_factory=dict)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measures the block as phase `name`."""
        before = reset_peak(self.device)
        begin = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = time.perf_counter() - begin
        after = peak_bytes(self.device)
        self.peak_mib[name] = None if before is None or after is None else (after - before) / MIB

    @property
    def total_seconds(self) -> float:
        """Sum over the phases."""
        return sum(self.seconds.values())


def reset_peak(device: torch.device) -> int | None:
    """Sets the peak back to what is in use now, and returns that in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return peak_bytes(device)


def peak_bytes(device: torch.device) -> int | None:
    """The peak since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, versions, load and commit that belong beside a measurement."""
    import transformers

    import flash_attn

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": _cpu_model(),
        "num_threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "flash_attn": flash_attn.__version__,
        "backend": flash_attn.backend(device),
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def busy(found: dict[str, Any]) -> str | None:
    """A warning where the load that `machine` found leaves no core to this program's threads."""
    load, num_threads = found["load_average"], found["num_threads"]
    if load <= num_threads:
        return None
    return f"warning: load average {load:.1f} for {num_threads} threads: other work distorts the times"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def commit() -> str | None:
    """What FLASH_ATTN_COMMIT says, else the checkout's commit, with "+changes" where sources differ from it,
    or None."""
    if "FLASH_ATTN_COMMIT" in os.environ:
        return os.environ["FLASH_ATTN_COMMIT"]
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
        ).stdout

    try:
        sources = (":(top)", ":(top,exclude)benchmarks/results", ":(top,exclude)README.md")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *sources).strip()
        return git("rev-parse", "HEAD").strip() + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
