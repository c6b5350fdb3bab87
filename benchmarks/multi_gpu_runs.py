"""The runs that need several GPUs of one host, one after the other; each adds its JSON as soon as it is done.

    python benchmarks/multi_gpu_runs.py --out benchmarks/results/nvidia_h200_x8 [--only gemma,layer,update]
    python benchmarks/multi_gpu_runs.py --tiny --num-gpus 4 --out out/runs   # the same in gloo processes

gemma: a GRPO update of a Gemma-4-31B-shaped model at P = 16K, 32K, 64K, a pack on all GPUs (gemma.json).
layer: one attention layer at P = 128K on 1, 2, 4, ... GPUs (layer.json, as of sequence_parallel.py).
update: a whole update of a Llama-3.1-8B-shaped model at P = 128K on 1, 2, 4, ... GPUs (update.json).
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
KINDS = ("gemma", "layer", "update")


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
    n, out, tiny = options.num_gpus, options.out, options.tiny
    batch = ["--num-responses", "4" if tiny else "16"]
    batch += ["--response-length", "24" if tiny else "2048"]
    place = ["--device", "cpu", "--dtype", "float32"] if tiny else []
    kinds = options.only.split(",")
    if "gemma" in kinds:
        # 60 layers of bf16 weights, gradients and AdamW's state are 245 GB: fewer layers on fewer than 4 GPUs
        layers = ["--layers", "6"] if tiny else ["--layers", str(options.layers or min(60, 15 * n))]
        for prompt_len in (64, 128, 256) if tiny else (16384, 32768, 65536):
            shape = ["--shape", "tiny-gemma-4" if tiny else "gemma-4-31b", *layers]
            lengths = ["--prompt-length", str(prompt_len), *batch]
            yield Run("gemma", n, UPDATE, [*shape, *lengths, *place, "--json", str(out / "gemma.json")])
    if "layer" in kinds:
        small = ["--prompt-lens", "128", "--num-responses", "4", "--response-len", "24", "--num-heads", "8",
                 "--num-heads-k", "4", "--head-dim", "16", "--dtype", "fp32", "--cpu"]  # fmt: skip
        arguments = small if tiny else ["--prompt-lens", "131072", "--no-replicated"]
        counts = ",".join(map(str, sizes(n)))
        yield Run("layer", n, LAYER, [*arguments, "--sizes", counts, "--out", str(out / "layer.json")])
    if "update" in kinds:
        for count in reversed(sizes(n)):
            shape = ["--shape", "tiny-llama" if tiny else "llama-3.1-8b"]
            shape += [] if tiny else ["--layers", str(options.layers or 8)]
            lengths = ["--prompt-length", "256" if tiny else "131072", *batch]
            yield Run("update", count, UPDATE, [*shape, *lengths, *place, "--json", str(out / "update.json")])


def table(path: Path) -> Iterator[str]:
    """Lines of what long_context_sp.py wrote."""
    for row in json.loads(path.read_text()):
        case, phases = row["case"], row["phases"]
        peak = max((p["peak_gib"] or 0.0) for p in phases.values())
        times = "  ".join(f"{name} {phase['seconds']:.2f} s" for name, phase in phases.items())
        yield (
            f"{case['shape']}, {row['num_layers']} layers, P={case['prompt_length']}, {row['sp']} GPUs: "
            f"{times}, update {row['update_seconds']:.2f} s, peak {peak:.1f} GiB"
        )


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
    for name in ("gemma.json", "update.json"):
        if (options.out / name).exists():
            print("\n".join(table(options.out / name)))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
