"""How long the CUDA library took to build, from ninja's log of a build from scratch.

    python csrc/flash_attn/kernels.py --archs "80;90" --gpus 90 --out build/all
    python benchmarks/build_time.py --what "all head dims, both dtypes, sm_80 and sm_90a" --jobs 2 \\
        --folder build/all --out benchmarks/results/cpu/build.json
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from records import read_rows, write_rows
from run import commit


def times_of(log: str) -> tuple[dict[str, tuple[int, int]], int | None]:
    """Output -> (begin, end) in milliseconds, its last entry; and the whole, of a build in one run."""
    lines = [line.split("\t") for line in log.splitlines() if line and not line.startswith("#")]
    ends = [int(line[1]) for line in lines]
    whole = max(ends) - min(int(line[0]) for line in lines) if ends == sorted(ends) else None
    return {line[3]: (int(line[0]), int(line[1])) for line in lines}, whole


def row_of(folder: Path, what: str, jobs: int) -> dict[str, Any]:
    times, whole = times_of((folder / ".ninja_log").read_text())
    return {
        "what": what,
        "jobs": jobs,
        "files": sum(name.endswith(".o") for name in times),
        "wall_s": None if whole is None else round(whole / 1000),  # built in several runs: unknown
        "busy_s": round(sum(b - a for a, b in times.values()) / 1000),
        "library_mb": max(path.stat().st_size for path in folder.glob("*.so")) / 1e6,
    }


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text()
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    return {
        "cpu": next(iter(re.findall(r"model name\s*: (.*)", info)), "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "nvcc": next(iter(re.findall(r"release ([\d.]+)", version)), "unknown"),
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", required=True, help="what was built")
    parser.add_argument("--jobs", type=int, required=True, help="MAX_JOBS of the build")
    parser.add_argument("--folder", type=Path, required=True, help="the build's --out")
    parser.add_argument("--note", default="", help="what else the machine did")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; a row is added or replaced")
    args = parser.parse_args()
    row = machine() | row_of(args.folder, args.what, args.jobs) | {"note": args.note}
    rows = [other for other in read_rows(args.out) if other["what"] != args.what]
    write_rows(args.out, [*rows, row])
    print(row)


if __name__ == "__main__":
    main()
