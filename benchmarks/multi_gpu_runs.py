"""The runs that need several GPUs of one host, one after the other; each adds its JSON as soon as it is done.

    python benchmarks/multi_gpu_runs.py --out benchmarks/results/nvidia_h200_x8 [--only gemma,layer,update]
    python benchmarks/multi_gpu_runs.py --tiny --num-gpus 4 --out out/runs     # the same in gloo processes

gemma: a GRPO update of a Gemma-4-31B-shaped model at P = 16K, 32K, 64K, a pack on all GPUs.
layer: one attention layer at P = 128K on 1, 2, 4, ... GPUs (and shorter prompts, for the memory model).
update: a whole update of a Llama-3.1-8B-shaped model at P = 128K on 1, 2, 4, ... GPUs.
verl: veRL's worker, Qwen3-8B's shape on FSDP2, groups of 32 rows in micro-batches of 4, 8, 16, shared and
    replicated; then the largest micro-batch each way.
moe: Qwen3-30B-A3B's shape, shared without sequence parallelism, replicated with the smallest degree of it
    that fits.

gemma and update write long_context.json, layer sequence_parallel.json, verl and moe verl_updates.json: the
names that `make report` makes tables and plots of. verl and moe need the environment of `make test-verl`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
UPDATE, LAYER = ROOT / "examples" / "long_context_sp.py", ROOT / "benchmarks" / "sequence_parallel.py"
VERL = ROOT / "benchmarks" / "verl_updates.py"
KINDS = ("gemma", "layer", "update", "verl", "moe")
REPLICATED = ("verl-flash_attention_2", "verl-torch-fa2")


@dataclass(frozen=True)
class Run:
    """One torchrun."""

    kind: str
    num_gpus: int
    script: Path
    arguments: list[str]

    def command(self) -> list[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*launcher, "--nproc-per-node", str(self.num_gpus), str(self.script), *self.arguments]


def sizes(num_gpus: int) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({2**i for i in range(num_gpus.bit_length()) if 2**i <= num_gpus} | {num_gpus})


def runs(options: argparse.Namespace) -> Iterator[Run]:
    """Every run asked for, with the sizes of a real model or tiny ones."""
    makers = (gemma_runs, layer_runs, update_runs, verl_runs, moe_runs)
    for kind in options.only.split(","):
        yield from makers[KINDS.index(kind)](options)


def pack_arguments(options: argparse.Namespace) -> list[str]:
    """Of long_context_sp.py: responses, place, file."""
    tiny = options.tiny
    batch = ["--num-responses", "4" if tiny else "16", "--response-length", "24" if tiny else "2048"]
    place = ["--device", "cpu", "--dtype", "float32"] if tiny else []
    return [*batch, *place, "--json", str(options.out / "long_context.json")]


def gemma_runs(options: argparse.Namespace) -> Iterator[Run]:
    n, tiny = options.num_gpus, options.tiny
    # 60 layers of bf16 weights, gradients and AdamW's state are 245 GB: fewer layers on fewer than 4 GPUs
    layers = "6" if tiny else str(options.layers or min(60, 15 * n))
    for prompt_len in (64, 128, 256) if tiny else (16384, 32768, 65536):
        shape = ["--shape", "tiny-gemma-4" if tiny else "gemma-4-31b", "--layers", layers]
        yield Run("gemma", n, UPDATE, [*shape, "--prompt-length", str(prompt_len), *pack_arguments(options)])


def layer_runs(options: argparse.Namespace) -> Iterator[Run]:
    arguments = ["--prompt-lens", "131072,65536,16384", "--no-replicated"]
    if options.tiny:
        arguments = ["--prompt-lens", "128,64", "--num-responses", "4", "--response-len", "24", "--num-heads"]
        arguments += ["8", "--num-heads-k", "4", "--head-dim", "16", "--dtype", "fp32", "--cpu"]
    counts = ",".join(map(str, sizes(options.num_gpus)))
    out = ["--out", str(options.out / "sequence_parallel.json")]
    yield Run("layer", options.num_gpus, LAYER, [*arguments, "--sizes", counts, *out])


def update_runs(options: argparse.Namespace) -> Iterator[Run]:
    tiny = options.tiny
    for count in reversed(sizes(options.num_gpus)):
        shape = ["--shape", "tiny-llama" if tiny else "llama-3.1-8b"]
        shape += [] if tiny else ["--layers", str(options.layers or 8)]
        lengths = ["--prompt-length", "256" if tiny else "131072"]
        yield Run("update", count, UPDATE, [*shape, *lengths, *pack_arguments(options)])


def verl_arguments(options: argparse.Namespace, model: str, tiny_model: str) -> list[str]:
    """Of verl_updates.py: the model and the file."""
    out = ["--out", str(options.out / "verl_updates.json")]
    if options.tiny:
        return ["--model", tiny_model, "--prompt-len", "64", "--responses", "8", "24", "--repeats", "1", *out]
    return ["--model", model, *out]


def replicated(options: argparse.Namespace) -> list[str]:
    """Without a GPU transformers refuses flash_attention_2: there the replicated rows run "dualkv"."""
    return ["verl-dualkv"] if options.tiny else list(REPLICATED)


def verl_runs(options: argparse.Namespace) -> Iterator[Run]:
    n, arguments = options.num_gpus, verl_arguments(options, "qwen3-8b", "tiny")
    providers = ["--providers", "shared", *replicated(options)]
    group = 8 if options.tiny else 32
    for rows in (4, 8) if options.tiny else (4, 8, 16):
        batch = ["--micro-batches", str(rows), "--num-micro-batches", str(group // rows)]
        yield Run("verl", n, VERL, [*arguments, *providers, *batch])
    # Each in processes of its own: where one rank alone runs out of memory, the others never answer again.
    for provider in ("shared", replicated(options)[0]):
        for rows in {"shared": (128, 96, 64)}.get(provider, (24, 20, 16)):
            rows = rows // 8 if options.tiny else rows
            largest = ["--micro-batches", "--largest", f"{provider}:{rows}"]
            yield Run("verl", n, VERL, [*arguments, *largest])
            if fitted(options, arguments[1], provider, 1, rows):
                break


def moe_runs(options: argparse.Namespace) -> Iterator[Run]:
    n, arguments = options.num_gpus, verl_arguments(options, "qwen3-30b-a3b", "tiny-moe")
    if not options.tiny:  # weights, gradients and AdamW are 8 bytes a parameter: 6 layers are 30 GB
        arguments += ["--layers", str(options.layers or min(48, max(12, 6 * n)))]
    arguments += ["--num-micro-batches", "2" if options.tiny else "4"]
    for rows in (4,) if options.tiny else (4, 8):
        batch = [*arguments, "--micro-batches", str(rows), "--providers"]
        yield Run("moe", n, VERL, [*batch, "shared"])
        for degree in sizes(n):
            yield Run("moe", n, VERL, [*batch, *replicated(options), "--sp", str(degree)])
            if all(fitted(options, arguments[1], each, degree, rows) for each in replicated(options)):
                break


def fitted(options: argparse.Namespace, model: str, provider: str, degree: int, rows: int) -> bool:
    """Whether a policy update found room."""
    path = options.out / "verl_updates.json"
    found = json.loads(path.read_text()) if path.exists() else []
    same = {"model": model, "provider": provider, "sp": degree, "micro_batch": rows, "pass": "policy_update"}
    own = [row for row in found if all(row[key] == value for key, value in same.items())]
    return bool(own) and "seconds" in own[-1]


def main(arguments: list[str] | None = None) -> int:
    """Runs all of them, whatever happens to one, and prints what is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-gpus", type=int, help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--layers", type=int, help="of the models, instead of the defaults")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of one run")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes in gloo processes on the CPU")
    options = parser.parse_args(arguments)
    if options.num_gpus is None:
        import torch

        options.num_gpus = torch.cuda.device_count()
        if options.num_gpus < 1:
            sys.exit("multi_gpu_runs.py needs NVIDIA GPUs (or --tiny --num-gpus 8)")
    if options.num_gpus < 1 or set(options.only.split(",")) - set(KINDS):
        parser.error(
            f"--num-gpus must be at least 1 and --only of {KINDS}, got {options.num_gpus}, {options.only}"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    environment: dict[str, Any] = {**os.environ, **({"OMP_NUM_THREADS": "1"} if options.tiny else {})}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    failed = 0
    for run in runs(options):
        begin = time.monotonic()
        print(f"== {run.kind}, {run.num_gpus} GPUs: {' '.join(run.arguments)}", flush=True)
        try:
            code: int | str = subprocess.run(run.command(), env=environment, timeout=options.limit).returncode
        except subprocess.TimeoutExpired:
            code = "out of time"
        failed += code != 0
        print(
            f"== {run.kind}, {run.num_gpus} GPUs: exit {code}, {time.monotonic() - begin:.0f} s", flush=True
        )
    print(f"tables and plots of {options.out}: make report")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
