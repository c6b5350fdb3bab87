"""Trains both ways with several seeds, side by side on one GPU, and puts the logs into one JSON file.

    python benchmarks/trl_training.py --seconds 300 --out FILE -- --steps 60 --device cuda ...

What follows `--` are options of examples/grpo_reasoning_gym.py. All runs are forks of one process that has
imported everything and read the model once, since imports would take longer than the first steps. After
`--seconds` runs are stopped: logs are written step by step, so what was trained until then is kept.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from pathlib import Path

# Looking for a GPU must not initialise CUDA, which forks cannot use; and one thread a run: forks do not have
# their parent's threads.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
EXAMPLE = ROOT / "examples" / "grpo_reasoning_gym.py"
WAYS = {"shared": "--shared-prompt", "replicated": "--replicated"}


def prepare(model: str | None) -> None:
    """Imports what runs import, and has them take the model from this process."""
    import grpo.training as training

    training.TaskSource.import_generators()
    policy, tokenizer, name = training.load_policy(model, torch.float32, torch.device("cpu"))
    training.unmark_quantized(policy)

    def loaded(
        path: str | None, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.nn.Module, object, str]:
        return policy.to(device, dtype), tokenizer, name

    training.load_policy = loaded


def start(way: str, seed: int, options: list[str], folder: Path) -> int:
    """The process id of a run; its output goes to a file."""
    arguments = [WAYS[way], "--seeds", str(seed), "--quiet", "--out", str(folder), *options]
    pid = os.fork()
    if pid:
        return pid
    log = os.open(folder / f"{way}{seed}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if torch.cuda._is_in_bad_fork():  # something initialised CUDA all the same: a process of its own
        os.execv(sys.executable, [sys.executable, str(EXAMPLE), *arguments])
    try:
        from grpo_reasoning_gym import main as example

        example(arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def wait(pids: dict[int, str], deadline: float) -> list[str]:
    """Waits for all runs, stops those that are late, and returns the names of the failed ones."""
    failed = []
    while pids and time.perf_counter() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            name = pids.pop(pid)
            print(f"{name} {'failed' if status else 'done'}", flush=True)
            failed += [name] * bool(status)
        time.sleep(0.2)
    for pid, name in pids.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        print(f"{name} stopped", flush=True)
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Runs, and writes the file; exit status 1 where a run failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=3600.0, help="then runs are stopped")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; logs go to the folder beside it")
    own, options = parser.parse_args(given[:cut]), given[cut + 1 :]
    deadline = time.perf_counter() + own.seconds
    from grpo.curves import print_summary, read, write_json
    from grpo_reasoning_gym import parse

    folder = own.out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.jsonl"):
        old.unlink()
    prepare(parse(["--replicated", *options]).model)
    pids = {start(way, seed, options, folder): f"{way} {seed}" for seed in own.seeds for way in WAYS}
    failed = wait(pids, deadline)
    logs = [log for log in sorted(folder.glob("*.jsonl")) if len(log.read_text().splitlines()) > 1]
    if logs:
        runs = [read(log) for log in logs]
        print_summary(runs)
        write_json(runs, own.out)
    return int(bool(failed) or not logs)


if __name__ == "__main__":
    sys.exit(main())
