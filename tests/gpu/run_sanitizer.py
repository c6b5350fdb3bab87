"""Runs memcheck.py under compute-sanitizer, all combinations side by side, and writes what it found as JSON.

    python tests/gpu/run_sanitizer.py --out benchmarks/results/nvidia_h200/sanitizer.json
    python tests/gpu/run_sanitizer.py --out FILE --runs memcheck:90:128 synccheck:90:128

Torch's caching allocator is off, so that every tensor is an allocation of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "benchmarks")]

from conftest import environment  # noqa: E402
from needs_gpu import require_gpu  # noqa: E402

RUNS = (
    "memcheck:90:128", "memcheck:80:128", "memcheck:90:64", "memcheck:80:64", "memcheck:90:256",
    "memcheck:90:512", "synccheck:90:128", "synccheck:80:128",
)  # fmt: skip
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


def finding(output: str) -> dict[str, Any]:
    """Number of errors, and the first of them; None where the tool did not come to its summary."""
    found = SUMMARY.search(output)
    errors = int(found.group(1)) if found else None
    first = next((line for line in output.splitlines() if line.startswith("========= ") and errors), None)
    return {"errors": errors} | ({"first": first.strip("= ")[:200]} if first else {})


def run(name: str, limit_s: float, logs: Path | None) -> dict[str, Any]:
    tool, path, head_dim = name.split(":")
    command = ["compute-sanitizer", "--launch-timeout", "120", "--tool", tool]
    command += [sys.executable, str(Path(__file__).with_name("memcheck.py")), path, "--head-dims", head_dim]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.monotonic()
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s)
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = (error.stdout or b"").decode(errors="replace"), None
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{name.replace(':', '_')}.log").write_text(output[-20000:])
    completed = f"path {path}, head dim {head_dim}: done" in output
    row = {"tool": tool, "path": int(path), "head_dim": int(head_dim), "completed": completed, "exit": code}
    return row | finding(output) | {"seconds": round(time.monotonic() - begin)}


def main() -> int:
    parser = argparse.ArgumentParser(description="compute-sanitizer over the corner set.")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), metavar="TOOL:PATH:HEAD_DIM")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each")
    parser.add_argument("--logs", type=Path, help="folder for what the tool printed")
    args = parser.parse_args()
    require_gpu()
    facts = {k: v for k, v in environment().items() if k != "kernels"} | {"date": time.strftime("%Y-%m-%d")}
    with ThreadPoolExecutor(len(args.runs)) as pool:
        rows = list(pool.map(lambda name: run(name, args.limit, args.logs), args.runs))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps([facts | row for row in rows], indent=1) + "\n")
    for row in rows:
        print(row, flush=True)
    return int(not all(row["completed"] and row["errors"] == 0 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
