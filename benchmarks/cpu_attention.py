"""Time and memory of the CPU implementation against F.scaled_dot_product_attention, per useful FLOP.

    python benchmarks/cpu_attention.py [--threads N] [--json FILE]

Useful FLOPs: 4 D H per visible (row, key) pair forward, 2.5x that backward; a shared prompt counts once.
`ratio` is our time per useful FLOP over SDPA's (is_causal, same heads and dtype, replicated rows for shared
prompts). Providers alternate; each time is the smallest of the repetitions. Memory: growth of the peak
resident size of a fresh process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

from grpo.measure import machine  # noqa: E402
from records import write_record  # noqa: E402

import flash_attn  # noqa: E402
from flash_attn.shared_prompt import SharedPromptLayout  # noqa: E402

torch.manual_seed(0)


@dataclass(frozen=True)
class Case:
    name: str
    prompt: int  # 0: plain causal attention of the responses
    responses: tuple[int, ...]
    num_heads: int = 9
    num_heads_k: int = 3
    head_dim: int = 64
    dtype: str = "float32"
    window: int = -1
    softcap: float = 0.0


CASES = [
    Case("causal 2048", 0, (2048,)),
    Case("causal 2048, 8 heads of 128", 0, (2048,), 8, 8, 128),
    Case("causal 8 x 512", 0, (512,) * 8),
    Case("causal 2048 bf16", 0, (2048,), dtype="bfloat16"),
    Case("causal 1024 fp64", 0, (1024,), dtype="float64"),
    Case("demo: prompt 1200, 8 x ~150", 1200, (97, 203, 150, 128, 171, 110, 189, 152)),
    Case("prompt 512, 64 x ~32", 512, tuple(24 + i % 17 for i in range(64))),
    Case("varlen 64 x ~32", 0, tuple(24 + i % 17 for i in range(64))),
    Case("causal 2048, window 256", 0, (2048,), window=256),
    Case("causal 1024, softcap 50", 0, (1024,), softcap=50.0),
]


def useful_pairs(case: Case) -> float:
    """Visible (row, key) pairs."""

    def causal(length: int) -> float:
        width = length if case.window < 0 else min(length, case.window + 1)
        return width * (width + 1) / 2 + (length - width) * width

    if not case.prompt:
        return sum(causal(r) for r in case.responses)
    return causal(case.prompt - 1) + sum(
        causal(case.prompt + r) - causal(case.prompt - 1) for r in case.responses
    )


def tensors(case: Case, *rows: int) -> list[Tensor]:
    dtype = getattr(torch, case.dtype)
    heads = (case.num_heads, case.num_heads_k, case.num_heads_k)
    return [torch.randn(*rows, h, case.head_dim).to(dtype).requires_grad_() for h in heads]


def ours(case: Case) -> tuple[Callable[[], Tensor], list[Tensor]]:
    window = (case.window, 0 if case.window >= 0 else -1)
    if case.prompt:
        layout = SharedPromptLayout.from_lengths(
            prompt_lens=[case.prompt], response_lens=[list(case.responses)], device="cpu"
        )
        q, k, v = tensors(case, layout.num_rows)
        return lambda: flash_attn.flash_attn_shared_prompt_func(q, k, v, layout), [q, k, v]  # type: ignore[return-value]
    q, k, v = tensors(case, sum(case.responses))
    cu = torch.tensor([0, *case.responses]).cumsum(0).int()
    longest = max(case.responses)
    return lambda: flash_attn.flash_attn_varlen_func(  # type: ignore[return-value]
        q, k, v, cu, cu, longest, longest, causal=True, window_size=window, softcap=case.softcap
    ), [q, k, v]


def sdpa(case: Case) -> tuple[Callable[[], Tensor], list[Tensor], float]:
    """One causal call per (prompt + response), or per run of equal lengths; and its useful pairs."""
    lengths = [max(0, case.prompt - 1) + (r + 1 if case.prompt else r) for r in case.responses]
    batches = {length: lengths.count(length) for length in lengths}
    inputs = [tensors(case, count, length) for length, count in batches.items()]
    heads = [[x.transpose(1, 2) for x in batch] for batch in inputs]

    def run() -> Tensor:
        outs = [
            torch.nn.functional.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=True)
            for batch in heads
        ]
        return torch.cat([x.flatten(0, 2) for x in outs])

    return run, [x for batch in inputs for x in batch], sum(n * (n + 1) / 2 for n in lengths)


def seconds(
    functions: list[tuple[Callable[[], Tensor], list[Tensor]]], repetitions: int
) -> list[tuple[float, float]]:
    """Smallest forward and backward time of each function, taking turns."""
    best = [(float("inf"), float("inf"))] * len(functions)
    for _ in range(repetitions):
        for i, (function, inputs) in enumerate(functions):
            begin = time.perf_counter()
            out = function()
            middle = time.perf_counter()
            torch.autograd.grad(out, inputs, torch.ones_like(out))
            end = time.perf_counter()
            best[i] = (min(best[i][0], middle - begin), min(best[i][1], end - middle))
    return best


def measure(case: Case, repetitions: int) -> dict[str, object]:
    function, inputs = ours(case)
    other, other_inputs, other_pairs = sdpa(case)
    (fwd, bwd), (other_fwd, other_bwd) = seconds([(function, inputs), (other, other_inputs)], repetitions)
    flops = 4 * case.num_heads * case.head_dim
    pairs = useful_pairs(case)
    row = {
        **asdict(case),
        "fwd_ms": fwd * 1e3,
        "bwd_ms": bwd * 1e3,
        "gflops_fwd": flops * pairs / fwd / 1e9,
        "gflops_bwd": 2.5 * flops * pairs / bwd / 1e9,
        "sdpa_fwd_ms": other_fwd * 1e3,
        "sdpa_bwd_ms": other_bwd * 1e3,
        "ratio": (fwd + bwd) / pairs / ((other_fwd + other_bwd) / other_pairs),
        "speedup": (other_fwd + other_bwd) / (fwd + bwd),
    }
    print(
        f"{case.name:30s} fwd {row['fwd_ms']:8.2f} ms {row['gflops_fwd']:5.1f} GF/s   "
        f"bwd {row['bwd_ms']:8.2f} ms {row['gflops_bwd']:5.1f} GF/s   "
        f"sdpa {row['sdpa_fwd_ms']:8.2f} {row['sdpa_bwd_ms']:8.2f} ms   "
        f"SDPA / ours {row['speedup']:.2f}",
        flush=True,
    )
    return row


MEMORY_CASE = Case("memory: prompt 16384, 8 x 512", 16384, (512,) * 8, num_heads=4, num_heads_k=2)


def peak_growth() -> dict[str, float]:
    """GiB by which forward + backward of MEMORY_CASE raise this process's peak (Linux), and GiB of tensors
    and gradients."""

    def status_gib(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**20

    function, inputs = ours(MEMORY_CASE)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status_gib("VmRSS")
    out = function()
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    tensors_gib = 2 * sum(x.numel() * x.element_size() for x in (*inputs, out)) / 2**30
    return {"extra_gib": status_gib("VmHWM") - before, "tensors_gib": tensors_gib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory:
        print(json.dumps(peak_growth()))
        return
    rows = [measure(case, args.repetitions) for case in CASES if args.only in case.name]
    if args.only in MEMORY_CASE.name:
        command = [sys.executable, __file__, "--memory", "--threads", str(args.threads)]
        memory = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"{MEMORY_CASE.name:30s} {memory['extra_gib']:.2f} GiB more at the peak "
            f"(tensors and gradients: {memory['tensors_gib']:.2f})"
        )
        rows.append({**asdict(MEMORY_CASE), **memory})
    if args.json:
        report = {"machine": machine(torch.device("cpu")), "rows": rows}
        write_record(args.json, report)


if __name__ == "__main__":
    main()
