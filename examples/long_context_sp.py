"""One GRPO update at long context: N responses of one prompt, the pack spread over the GPUs of a group.

    torchrun --nproc-per-node 8 examples/long_context_sp.py --shape llama-3.1-8b --prompt-length 65536
    torchrun --nproc-per-node 2 examples/long_context_sp.py --device cpu --shape tiny-llama \
        --prompt-length 200 --response-length 24 --num-responses 4 --dtype float32

Any number of GPUs: --sp of them (default all) share a pack, the others take other packs; FSDP2 shards the
weights over all. Weights, tokens and rewards are random (lengths are what counts). Prints seconds and peak
memory of each phase and what the memory holds; --json adds the figures to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.distributed as dist
from grpo.measure import machine, peak_bytes, reset_peak
from grpo.options import new_parser, require_at_least_one
from grpo.update import policy_loss
from long_context.policy import Policy, build
from long_context.shapes import SHAPES, config_of
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from flash_attn.shared_prompt import pack, ulysses

GIB = 2**30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--prompt-length", type=int, default=65536)
    parser.add_argument("--num-responses", type=int, default=16)
    parser.add_argument("--response-length", type=int, default=2048)
    parser.add_argument("--sp", type=int, help="ranks that share a pack (default: all)")
    parser.add_argument("--method", choices=["ulysses", "context"], default="ulysses")
    parser.add_argument(
        "--num-chunks", type=int, default=1, help="of heads, to overlap exchange and attention"
    )
    parser.add_argument("--boundary", choices=["fork", "shared"], default="fork")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of weights and optimizer")
    parser.add_argument("--optimizer", choices=["adamw", "sgd", "none"], default="adamw")
    parser.add_argument("--steps", type=int, default=2, help="updates; the last is reported")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures to this list")
    options = parser.parse_args(arguments)
    require_at_least_one(parser, options, "prompt_length", "num_responses", "response_length", "steps")
    return options


class Meter:
    """Seconds and peak GiB (the process's, or the GPU's allocated) of phases, the largest of all ranks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phases: dict[str, dict[str, float | None]] = {}

    def measure(self, name: str, run: Callable[[], Any]) -> Any:
        """Runs one phase on all ranks together."""
        reset_peak(self.device)
        dist.barrier()
        begin = time.perf_counter()
        result = run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds, peak = time.perf_counter() - begin, peak_bytes(self.device)
        found = torch.tensor([seconds, (peak or 0) / GIB], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        self.phases[name] = {"seconds": float(found[0]), "peak_gib": float(found[1]) if peak else None}
        return result


class Progress:
    """A bar over layers, forward and recomputed ones, on rank 0."""

    def __init__(self, policy: Policy, num_steps: int) -> None:
        layers = policy.model.model.layers
        self.bar = tqdm(
            total=3 * num_steps * len(layers), unit="layer", disable=dist.get_rank() != 0, mininterval=1.0
        )
        for layer in layers:
            layer.self_attn.register_forward_hook(self.count)  # runs again where a layer is recomputed

    def count(self, *_: Any) -> None:
        self.bar.update()


def make_batch(options: argparse.Namespace, vocab_size: int, replica: int, device: torch.device) -> Any:
    """A pack of random ids, and each response token's advantage, the same on the ranks that share it."""
    generator = torch.Generator().manual_seed(options.seed + 1000 * replica)
    n, length = options.num_responses, options.response_length
    prompt = torch.randint(3, vocab_size, (options.prompt_length,), generator=generator)
    responses = torch.randint(3, vocab_size, (n, length), generator=generator)
    rewards = torch.rand(n, generator=generator)
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    packed = pack(prompt.expand(n, -1), responses, boundary=options.boundary, device=device)
    return packed, advantages.repeat_interleave(length).to(device)


def update(
    policy: Policy,
    batch: Any,
    advantages: torch.Tensor,
    optimizer: Any,
    options: argparse.Namespace,
    replicas: int,
) -> tuple[Meter, float, float]:
    """One update: its phases, loss and gradient norm."""
    meter = Meter(batch.input_ids.device)
    with torch.no_grad():
        old = meter.measure("old log-probs", lambda: policy(batch, options.temperature))
    # FSDP2 averages gradients over all ranks; here they are parts of one sum, so the loss is scaled up.
    scale = dist.get_world_size()
    num_tokens = replicas * advantages.numel()

    def forward() -> torch.Tensor:
        return policy_loss(policy(batch, options.temperature), old, advantages, num_tokens)

    loss = meter.measure("forward", forward)
    meter.measure("backward", lambda: (loss * scale).backward())
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), float("inf"))
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if optimizer is not None:
        meter.measure("optimizer step", optimizer.step)
    policy.zero_grad(set_to_none=True)
    return meter, float(loss.detach()), float(norm)


def bytes_of(tensors: Any) -> int:
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors if isinstance(t, torch.Tensor))


def print_report(record: dict[str, Any]) -> None:
    """Phases and memory as two tables."""
    case = record["case"]
    lengths = f"P={case['prompt_length']}, N={case['num_responses']}, R={case['response_length']}"
    ranks = f"{record['world']} ranks, {record['sp']} a pack, {case['method']}"
    print(f"\n{case['shape']}, {record['num_layers']} layers, {lengths}; {ranks}:")
    print(f"{record['packed_tokens']:,} tokens a pack instead of {record['replicated_tokens']:,}")
    print(f"loss {record['loss']:.6f}, gradient norm {record['grad_norm']:.6f}\n")
    print(f"{'phase':<16}{'seconds':>10}{'peak GiB':>10}")
    for name, phase in record["phases"].items():
        peak = "-" if phase["peak_gib"] is None else f"{phase['peak_gib']:.2f}"
        print(f"{name:<16}{phase['seconds']:>10.3f}{peak:>10}")
    print(f"{'update':<16}{record['update_seconds']:>10.3f}\n\n{'memory of a rank':<28}{'GiB':>8}")
    for name, gib in record["memory_gib"].items():
        print(f"{name:<28}{gib:>8.3f}")


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All updates; the record of the last."""
    world = dist.get_world_size()
    sp = options.sp or world
    if world % sp:
        raise SystemExit(f"--sp must divide the {world} ranks, got {sp}")
    mesh = init_device_mesh(device.type, (world // sp, sp), mesh_dim_names=("pack", "sp"))
    length = options.prompt_length + options.response_length
    config = config_of(options.shape, options.layers, length)
    dtype = DTYPES[options.dtype]
    policy = build(
        config, init_device_mesh(device.type, (world,)), device, dtype,
        torch.bfloat16 if device.type == "cuda" else dtype, options.seed,
    )  # fmt: skip
    replica = mesh.get_local_rank("pack")
    packed, advantages = make_batch(options, config.vocab_size, replica, device)
    batch = ulysses.shard(packed, mesh.get_group("sp"), method=options.method, num_chunks=options.num_chunks)
    optimizer = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-6, fused=device.type == "cuda"),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-6),
        "none": lambda p: None,
    }[options.optimizer](policy.parameters())
    progress = Progress(policy, options.steps)
    with ulysses.fail_together(dist.group.WORLD):
        for _ in range(options.steps):
            meter, loss, norm = update(policy, batch, advantages, optimizer, options, world // sp)
    progress.bar.close()
    parameters = bytes_of(policy.parameters()) / GIB
    state = 0.0
    if optimizer is not None:
        state = bytes_of(t for s in optimizer.state.values() for t in s.values()) / GIB
    memory = {"weights": parameters, "gradients": parameters, "optimizer state": state}
    peaks = [phase["peak_gib"] for phase in meter.phases.values() if phase["peak_gib"] is not None]
    if peaks and device.type == "cuda":
        memory["activations and buffers"] = max(peaks) - sum(memory.values())
        memory["peak"] = max(peaks)
    facts = machine(device)
    return {
        "commit": facts["commit"],
        "case": {k: v for k, v in vars(options).items() if k not in ("json", "device", "seed", "sp")},
        "machine": facts,
        "world": world,
        "sp": sp,
        "num_layers": config.num_hidden_layers,
        "num_parameters": sum(p.numel() for p in policy.parameters()),
        "packed_tokens": packed.num_packed_tokens,
        "replicated_tokens": packed.num_replicated_tokens,
        "rows_per_rank": batch.layout.num_rows,
        "loss": loss,
        "grad_norm": norm,
        "phases": meter.phases,
        "update_seconds": sum(phase["seconds"] or 0.0 for phase in meter.phases.values()),
        "memory_gib": memory,
    }


def main(arguments: list[str] | None = None) -> int:
    """One rank under torchrun."""
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("long_context_sp.py needs NVIDIA GPUs (on a CPU: --device cpu --shape tiny-llama)")
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start with torchrun --nproc-per-node N examples/long_context_sp.py ...")
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    try:
        record = run(options, device)
        if dist.get_rank() == 0:
            print_report(record)
            if options.json:
                before = json.loads(options.json.read_text()) if options.json.exists() else []
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps([*before, record], indent=1) + "\n")
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
