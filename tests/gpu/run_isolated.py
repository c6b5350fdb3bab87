"""Runs the GPU tests in many processes: a CUDA error that stays with its process takes few other tests along.

    python tests/gpu/run_isolated.py --out benchmarks/results/h200/tests.json [--shards 14] [pytest arguments]

Each code path is cut in shards, one process each, side by side on the one GPU. What failed is then run again,
one process a test; the report holds the outcome of that second run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from needs_gpu import require_gpu  # noqa: E402

MARKERS = "gpu and not multi_gpu"


def run_pytest(arguments: list[str], report: Path, limit_s: float) -> tuple[str, dict[str, Any] | None]:
    """Output and report of one process; None when it died or ran out of time."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-m", MARKERS, "--gpu-report", str(report), *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s)
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        output = f"over {limit_s:.0f} s\n{error.stdout or ''}"
    return output, json.loads(report.read_text()) if report.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description="GPU tests in many processes.")
    parser.add_argument("--out", required=True, help="JSON report")
    parser.add_argument("--paths", default="90,80", help="code paths")
    parser.add_argument("--shards", type=int, default=14, help="processes per code path")
    parser.add_argument("--parallel", type=int, default=14, help="processes at a time")
    parser.add_argument("--limit", type=float, default=300, help="seconds for all")
    parser.add_argument("--log", default=None, help="file for the output of what failed")
    args, rest = parser.parse_known_args()
    require_gpu()
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp())
    log: list[str] = []

    def left() -> float:
        return max(args.limit - (time.monotonic() - start), 1.0)

    def shard(job: tuple[str, int]) -> dict[str, Any]:
        path, index = job
        arguments = ["tests/gpu", "--paths", path, "--shard", f"{index}/{args.shards}", *rest]
        arguments += ["--deadline", str(time.time() + left())]
        output, report = run_pytest(arguments, folder / f"{path}_{index}.json", left() + 30)
        if report is None or report["failures"]:
            log.append(f"#### path {path}, shard {index}\n{output}")
        return report or {"tests": {f"path {path}, shard {index}": "died"}, "failures": []}

    def again(test: str) -> tuple[str, str]:
        if left() < 15:  # too late to start a process: the first outcome stays
            return test, tests[test]
        name = folder / f"again_{abs(hash(test))}.json"
        output, report = run_pytest([test], name, left())
        outcome = "died" if report is None else next(iter(report["tests"].values()), "died")
        if outcome != "passed":
            log.append(f"#### alone: {test}\n{output}")
        return test, outcome

    jobs = [(path, i) for path in args.paths.split(",") for i in range(args.shards)]
    with ThreadPoolExecutor(args.parallel) as pool:
        reports = list(pool.map(shard, jobs))
        tests = {name: outcome for report in reports for name, outcome in report["tests"].items()}
        failed = sorted(name for name, outcome in tests.items() if outcome in ("failed", "error"))
        tests.update(pool.map(again, failed))
    facts = next((r for r in reports if "gpu" in r), {})
    files: dict[str, Counter[str]] = {}
    for name, outcome in tests.items():
        files.setdefault(name.split("::")[0], Counter())[outcome] += 1
    report = {k: v for k, v in facts.items() if k not in ("tests", "files", "failures", "total")}
    report["seconds"] = round(time.monotonic() - start)
    report["total"] = dict(Counter(tests.values()))
    report["files"] = {f: dict(c) for f, c in sorted(files.items())}
    report["failures"] = sorted(n for n, o in tests.items() if o not in ("passed", "skipped", "not run"))
    report["not_run"] = sorted(n for n, o in tests.items() if o == "not run")
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    if args.log:
        Path(args.log).write_text("\n".join(log))
    print(json.dumps({k: report[k] for k in ("total", "seconds", "failures")}, indent=1))
    return int(bool(report["failures"] or report["not_run"]))


if __name__ == "__main__":
    sys.exit(main())
