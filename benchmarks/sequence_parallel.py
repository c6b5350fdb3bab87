"""Times one attention layer over several GPUs: a shared prompt spread over them, and the replicated batch.

    torchrun --nproc-per-node 2 benchmarks/sequence_parallel.py --out benchmarks/results/nvidia_h200/FILE.json
    python benchmarks/sequence_parallel.py --num-ranks 2 --cpu --prompt-lens 64,128 --response-len 16 ...

For each prompt length and number of GPUs (--sizes): milliseconds of forward and of forward and backward
(slowest rank, median), peak memory of a GPU, and the share that is not the attention kernel itself.
Providers: `ours` on one GPU, `ulysses-C` in C chunks of heads, `context` (keys travel), `fa2-replicated`
(torch's FlashAttention-2 over whole sequences, spread by heads). JSON is written after every cell.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from cases import Case  # noqa: E402
from records import write_rows  # noqa: E402
from run import environment  # noqa: E402
from sharded_fa2 import fa2_attention  # noqa: E402

from flash_attn import backend, flash_attn_shared_prompt_func  # noqa: E402
from flash_attn.shared_prompt import SharedPromptLayout, ulysses  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GIB = 2**30


@dataclass(frozen=True)
class Cell:
    """One measurement: a case, on how many ranks, which way."""

    case: Case
    size: int
    provider: str
    repeats: int  # 0: the first call is the one that counts, and only forward and backward together

    def lengths(self) -> tuple[list[int], list[list[int]]]:
        c = self.case
        if self.provider == "fa2-replicated":
            return [c.prompt_len] * c.num_responses, [[c.response_len]] * c.num_responses
        return [c.prompt_len], [[c.response_len] * c.num_responses]


class Timer:
    """Milliseconds of calls that all ranks of a group make, the slowest rank's."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self.device, self.group = device, group

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, times: list[float]) -> list[float]:
        all_times = torch.tensor(times, dtype=torch.float64, device=self.device)
        dist.all_reduce(all_times, dist.ReduceOp.MAX, group=self.group)
        return all_times.tolist()

    def measure(self, call: Callable[[], object], repeats: int) -> list[float]:
        """One call to warm up, then `repeats`, each behind a barrier; with 0 repeats the first counts."""
        times = []
        for _ in range(repeats + 1):
            dist.barrier(group=self.group)
            self.wait()
            begin = time.perf_counter()
            call()
            self.wait()
            times.append((time.perf_counter() - begin) * 1e3)
        return self.slowest(times[1:] or times)

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float | None:
        """Most memory that a rank had allocated since `reset_peak`."""
        if self.device.type != "cuda":
            return None
        return self.slowest([torch.cuda.max_memory_allocated(self.device) / GIB])[0]


def attention_of(
    cell: Cell, group: dist.ProcessGroup, device: torch.device
) -> tuple[Callable[..., Tensor], int]:
    """The layer as a function of this rank's q, k, v, and how many rows they have."""
    layout = SharedPromptLayout.from_lengths(*cell.lengths(), device=device, boundary="shared")
    if cell.provider == "fa2-replicated":
        sharded = ulysses.shard_layout(layout, group)
        length = cell.case.prompt_len + cell.case.response_len
        return (lambda q, k, v: fa2_attention(q, k, v, sharded, length)), sharded.num_rows
    if cell.provider == "ours":
        return (lambda q, k, v: flash_attn_shared_prompt_func(q, k, v, layout)), layout.num_rows
    method, _, chunks = cell.provider.partition("-")
    sharded = ulysses.shard_layout(layout, group, method, int(chunks or 1))  # type: ignore[arg-type]
    return (lambda q, k, v: flash_attn_shared_prompt_func(q, k, v, sharded)), sharded.num_rows


def rows(cell: Cell, num_rows: int, heads: tuple[int, int], device: torch.device) -> list[Tensor]:
    """q, k, v (leaves) and dout."""
    dtype, dim = DTYPES[cell.case.dtype], cell.case.head_dim
    counts = (heads[0], heads[1], heads[1], heads[0])
    found = [torch.randn(num_rows, n, dim, device=device, dtype=dtype) for n in counts]
    return [x.requires_grad_() for x in found[:3]] + found[3:]


def measure(cell: Cell, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Times and memory of one cell."""
    timer, case = Timer(device, group), cell.case
    attend, num_rows = attention_of(cell, group, device)
    q, k, v, dout = rows(cell, num_rows, (case.num_heads, case.num_heads_k), device)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v), (q, k, v), dout)

    timer.reset_peak()
    times = timer.measure(both, cell.repeats)
    found: dict[str, Any] = {"time_ms": statistics.median(times), "times_ms": times, "warm": cell.repeats > 0}
    found["peak_gib"] = timer.peak_gib()
    found["fwd_ms"] = statistics.median(timer.measure(forward, cell.repeats)) if cell.repeats else None
    flops = 3.5 * case.forward_flops()
    found["tflops_per_gpu"] = flops / cell.size / found["time_ms"] / 1e9
    if cell.provider.startswith("ulysses"):
        del q, k, v, dout
        found["attention_ms"] = attention_alone(cell, timer, device)
        found["communication_share"] = 1 - found["attention_ms"] / found["time_ms"]
    return found


def attention_alone(cell: Cell, timer: Timer, device: torch.device) -> float:
    """Forward and backward of a rank's heads on all rows, without any exchange."""
    case, size = cell.case, cell.size
    whole = Cell(case, 1, "ours", cell.repeats)
    attend, num_rows = attention_of(whole, timer.group, device)
    heads = (case.num_heads // size, max(case.num_heads_k // size, 1))
    q, k, v, dout = rows(cell, num_rows, heads, device)
    times = timer.measure(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), dout), cell.repeats)
    return statistics.median(times)


def cells(options: argparse.Namespace, world: int) -> Iterator[Cell]:
    """Most important first: the paper's cells, then memory of other lengths, then the replicated batch."""
    sizes = [n for n in options.sizes if n <= world]

    def case(prompt_len: int, num_responses: int) -> Case:
        return Case(
            num_responses, prompt_len, options.response_len, options.num_heads, options.num_heads_k,
            options.head_dim, options.dtype,
        )  # fmt: skip

    for prompt_len in options.prompt_lens if not options.only_replicated else []:
        repeats = max(3, min(options.repeats, options.repeats * 16384 // prompt_len))
        for size in sizes:
            if size == 1:
                yield Cell(case(prompt_len, options.num_responses), 1, "ours", repeats)
                continue
            for provider in options.providers.split(","):
                yield Cell(case(prompt_len, options.num_responses), size, provider, repeats)
    for prompt_len in options.prompt_lens[:2] if not options.only_replicated else []:
        for size in sizes:  # memory: other numbers of responses
            few = case(prompt_len, max(options.num_responses // 4, 1))
            yield Cell(few, size, "ours" if size == 1 else "ulysses-1", 1)
    for prompt_len in options.prompt_lens:
        for size in sizes[-1:] if options.replicated else []:
            repeats = 3 if prompt_len <= 16384 else int(prompt_len <= 65536)
            yield Cell(case(prompt_len, options.num_responses), size, "fa2-replicated", repeats)


def run(rank: int, world: int, options: argparse.Namespace) -> None:
    """All cells on this rank; rank 0 writes."""
    device = torch.device("cpu") if options.cpu else torch.device("cuda", rank)
    begin = time.perf_counter()
    groups = {
        n: dist.group.WORLD if n == world else dist.new_group(list(range(n)))
        for n in options.sizes
        if n <= world
    }
    place = environment(device) | {"backend": backend(device)}
    found: list[dict[str, Any]] = []
    for cell in cells(options, world):
        dist.barrier()
        late = torch.tensor(
            [time.perf_counter() - begin > options.max_seconds], dtype=torch.int32, device=device
        )
        dist.all_reduce(late, dist.ReduceOp.MAX)
        row = place | {"case": cell.case.row(), "sp": cell.size, "provider": cell.provider, "pass": "fwd+bwd"}
        if late.item():
            row["error"] = f"not measured: --max-seconds {options.max_seconds:g} were over"
        elif rank < cell.size:
            row |= guarded(cell, groups[cell.size], device)
        if rank == 0:
            found.append(row)
            print(line(row), flush=True)
            if options.out:
                write_rows(options.out, found)


def guarded(cell: Cell, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """`measure`, or why not. All ranks do the same work, so that they run out of memory together."""
    try:
        return measure(cell, group, device)
    except (torch.OutOfMemoryError, NotImplementedError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def line(row: dict[str, Any]) -> str:
    c = row["case"]
    text = f"P={c['P']:>6} N={c['N']:>2} SP={row['sp']} {row['provider']:<15}"
    if "error" in row:
        return f"{text} {row['error']}"
    memory = "" if row["peak_gib"] is None else f"{row['peak_gib']:7.2f} GiB"
    share = f"  communication {row['communication_share']:.1%}" if "communication_share" in row else ""
    forward = f"{row['fwd_ms']:9.2f}" if row["fwd_ms"] else " " * 9
    return f"{text} fwd {forward} ms  fwd+bwd {row['time_ms']:9.2f} ms {memory}{share}"


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-lens", type=integers, default=[16384, 65536, 131072])
    parser.add_argument("--num-responses", type=int, default=16)
    parser.add_argument("--response-len", type=int, default=2048)
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--num-heads-k", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--sizes", type=integers, default=[1, 2, 4, 8], help="numbers of GPUs")
    parser.add_argument("--providers", default="ulysses-1,ulysses-2,context", help="on several GPUs")
    parser.add_argument("--replicated", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only-replicated", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--max-seconds", type=float, default=600.0, help="no new cell after these")
    parser.add_argument("--num-ranks", type=int, help="start so many processes here, instead of torchrun")
    parser.add_argument("--cpu", action="store_true", help="gloo processes on the CPU")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def start(rank: int, world: int, options: argparse.Namespace, address: str | None) -> None:
    """One rank: joins the others, runs, leaves."""
    if options.cpu:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    where: dict[str, Any] = {"rank": rank, "world_size": world, "init_method": address} if address else {}
    dist.init_process_group("gloo" if options.cpu else "nccl", timeout=timedelta(seconds=120), **where)
    try:
        run(rank, world, options)
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    """Under torchrun this process is one rank; with --num-ranks it starts them."""
    options = parse(arguments)
    if options.num_ranks is None:
        if "LOCAL_RANK" not in os.environ:
            raise SystemExit("start it with torchrun, or with --cpu --num-ranks 2")
        start(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), options, None)
        return
    address = "tcp://127.0.0.1:29517"
    torch.multiprocessing.start_processes(
        start, (options.num_ranks, options, address), options.num_ranks, start_method="spawn"
    )


if __name__ == "__main__":
    main()
