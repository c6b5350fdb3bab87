"""One decoder layer of Qwen3-8B's shape, forward and backward: the prompt once, or once for each response.

    python benchmarks/decoder_layer.py --out benchmarks/results/nvidia_h200/decoder_layer.json [--resume]
    python benchmarks/decoder_layer.py --prompts 8192 --micro-batches 4 8 --providers ours

bf16, random weights; RMSNorm, projections with RMSNorm of heads and RoPE, attention, SwiGLU. A micro-batch is
one prompt and that many responses of U(131, 2048) tokens (fixed seed). FLOPs are those that a provider
executes: 6 per weight and token, 3.5 x 4 H d per visible pair. Ways that come close to each other run in
turn, --rounds times after one that warms up. Where memory runs out, no larger prompt or micro-batch is tried.
Every provider's gradients are first compared with fp32 on a small micro-batch.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from cases import uniform_lens  # noqa: E402
from decoder_attention import ATTENTION, Attention, Batch  # noqa: E402
from needs_gpu import require_gpu  # noqa: E402
from records import merged, read_rows, write_rows  # noqa: E402
from run import clean, environment, short  # noqa: E402
from timing import once, summary  # noqa: E402

# In the order of measurement: a run that is cut short has what says most.
PROMPTS = (8192, 16384, 32768, 4096, 65536, 2048, 1024, 131072, 262144)
MICRO_BATCHES = (8, 1, 32, 4, 16, 2)
LONGEST = 2048
TOLERANCE = 3e-2
ROUNDS = 5
SLOW_MS, ENOUGH_MS = 1000.0, 150.0  # of a step alone: one above the first is timed once, without a warm-up
CLOSE = ("ours", "fa4-two-call")  # neither repeats nor copies the prompt
PLANNED = {"cudnn-padded": 3000.0}  # in place of SLOW_MS: cuDNN chooses kernels in its first run
SLOW_IN_TURN_MS = 3000.0  # in place of SLOW_MS where several run in turn: a prompt of 256K


@dataclass(frozen=True)
class Shape:
    hidden: int = 4096
    intermediate: int = 12288
    num_heads: int = 32
    num_heads_k: int = 8
    head_dim: int = 128

    def flops(self, batch: Batch) -> float:
        """Of forward and backward, as executed."""
        heads = self.num_heads + self.num_heads_k
        weights = self.hidden * (2 * self.head_dim * heads + 3 * self.intermediate)
        return 6.0 * weights * batch.num_tokens + 3.5 * 4 * self.num_heads * self.head_dim * batch.num_pairs


class Layer(torch.nn.Module):
    """A pre-norm layer on packed rows (tokens, hidden)."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        own = dict(device=device, dtype=dtype)
        rows, keys = shape.num_heads * shape.head_dim, shape.num_heads_k * shape.head_dim
        sizes = dict(
            q=(shape.hidden, rows), k=(shape.hidden, keys), v=(shape.hidden, keys), o=(rows, shape.hidden),
            gate=(shape.hidden, shape.intermediate), up=(shape.hidden, shape.intermediate),
            down=(shape.intermediate, shape.hidden),
        )  # fmt: skip
        self.linear = torch.nn.ModuleDict(
            {name: torch.nn.Linear(*size, bias=False, **own) for name, size in sizes.items()}
        )
        widths = dict(attention=shape.hidden, mlp=shape.hidden, q=shape.head_dim, k=shape.head_dim)
        self.norm = torch.nn.ModuleDict(
            {name: torch.nn.RMSNorm(width, eps=1e-6, **own) for name, width in widths.items()}
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attention) -> Tensor:
        linear, norm = self.linear, self.norm
        hidden = norm["attention"](x)
        q, k, v = (linear[name](hidden).unflatten(-1, (-1, self.shape.head_dim)) for name in "qkv")
        out = attend(rotate(norm["q"](q), cos, sin), rotate(norm["k"](k), cos, sin), v)
        x = x + linear["o"](out.flatten(-2))
        hidden = norm["mlp"](x)
        return x + linear["down"](F.silu(linear["gate"](hidden)) * linear["up"](hidden))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of (tokens, heads, d)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def angles(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inverse = 1e6 ** (-torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    both = torch.outer(positions.float(), inverse).repeat(1, 2)[:, None]
    return both.cos().to(dtype), both.sin().to(dtype)


class Step:
    """Forward and backward of a layer on one micro-batch by one provider."""

    def __init__(self, layer: Layer, batch: Batch, name: str, device: str, dtype: torch.dtype) -> None:
        self.layer, self.batch = layer, batch
        self.attend = ATTENTION[name](batch, layer.shape.head_dim**-0.5)
        self.angles = angles(batch.positions.to(device), layer.shape.head_dim, dtype)
        generator = torch.Generator(device).manual_seed(0)
        size = (2, batch.packed_tokens, layer.shape.hidden)  # in bf16 whatever dtype runs: equal values
        packed = torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator).to(dtype)
        rows = batch.rows.to(device)
        self.x = packed[0, rows].requires_grad_()
        self.dout = packed[1, rows] * batch.counts.to(device, dtype)[:, None]

    def __call__(self) -> None:
        self.layer(self.x, *self.angles, self.attend).backward(self.dout)

    def reset(self) -> None:
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None


def gradients(layer: Layer, batch: Batch, name: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    step = Step(layer, batch, name, device, dtype)
    step()
    found = [p.grad.float() for p in layer.parameters() if p.grad is not None]
    step.reset()
    return found


def what_is_wrong(name: str, device: str, dtype: torch.dtype) -> str | None:
    """None where a small layer's gradients are near those of fp32 with an explicit mask."""
    torch.manual_seed(0)
    shape = Shape(256, 512)
    layer, exact = Layer(shape, device, dtype), Layer(shape, device, torch.float32)
    exact.load_state_dict(layer.state_dict())
    lens = [200, 131, 170]
    try:
        batch = Batch.of(name, 300, lens, device)
        got = gradients(layer, batch, name, device, dtype)
        want = gradients(exact, Batch.of("reference", 300, lens, device), "reference", device, torch.float32)
    except Exception as error:  # a provider that does not run here is a result
        return short(error)
    worst = max(float((x - y).norm() / y.norm()) for x, y in zip(got, want, strict=True))
    return None if worst < TOLERANCE else f"a gradient is wrong: relative rms error {worst:.1e}"


def map_memory() -> None:
    """What the allocator maps now it need not map while a step runs."""
    free, _ = torch.cuda.mem_get_info()
    with suppress(torch.OutOfMemoryError):
        torch.empty(max(free - 4 * 2**30, 0), dtype=torch.uint8, device="cuda")


def measure(steps: dict[str, Step], held: dict[str, int], rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds and peak memory: of several steps in turn in all rounds, of one alone until it is enough.

    `held`: bytes of each step's own tensors, which are no part of another's peak.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    peaks, left, in_turn = dict.fromkeys(steps, 0), list(steps), len(steps) > 1
    for index in range(1 + rounds):
        for name in random.Random(index).sample(left, len(left)):
            torch.cuda.reset_peak_memory_stats()
            times[name].append(once(steps[name]))
            peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
            steps[name].reset()
            slow = times[name][-1] > (SLOW_IN_TURN_MS if in_turn else PLANNED.get(name, SLOW_MS))
            if slow or (sum(times[name][1:]) > ENOUGH_MS and not in_turn):
                left.remove(name)
    found = {}
    for name, own in times.items():
        timing = summary(own[1:] or own)  # the first warms up; a slow one stands
        row: dict[str, Any] = dict(time_ms=timing.time_ms, p20_ms=timing.p20_ms, p80_ms=timing.p80_ms)
        others = sum(held.values()) - held[name]
        row |= dict(rounds=timing.rounds, warmed=len(own) > 1, peak_gib=(peaks[name] - others) / 2**30)
        found[name] = row
    return found


def measured(layer: Layer, batches: dict[str, Batch], rounds: int = ROUNDS) -> dict[str, dict[str, Any]]:
    """What the steps of a micro-batch take, or why they do not run; where memory does not hold all of them,
    one by one.
    """
    steps: dict[str, Step] = {}
    held: dict[str, int] = {}
    error = None
    try:
        for name, batch in batches.items():
            before = torch.cuda.memory_allocated()
            steps[name] = Step(layer, batch, name, "cuda", torch.bfloat16)
            held[name] = torch.cuda.memory_allocated() - before
        return measure(steps, held, rounds)
    except Exception as raised:
        error = dict(error=short(raised), out_of_memory=isinstance(raised, torch.OutOfMemoryError))
    steps.clear()
    layer.zero_grad(set_to_none=True)
    clean()
    map_memory()
    if len(batches) > 1:
        return {name: measured(layer, {name: batch}, rounds)[name] for name, batch in batches.items()}
    return {name: {k: v for k, v in error.items() if v} for name in batches}


def cells(prompts: list[int], micro_batches: list[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Larger micro-batches hold the smaller ones' responses."""
    lens = uniform_lens(max(micro_batches), LONGEST)
    for prompt in prompts:
        for count in micro_batches:
            yield prompt, count, lens[:count]


def is_close(name: str, count: int) -> bool:
    """Whether a way comes within a few percent of ours: with one response nothing is repeated, and cuDNN's
    rectangle has no padding.
    """
    return name in CLOSE or (name == "cudnn-padded" and count == 1)


def in_turn(names: list[str], count: int) -> list[list[str]]:
    """The ways that come close together, the others one by one."""
    close = [name for name in names if is_close(name, count)]
    return ([close] if close else []) + [[name] for name in names if name not in close]


def runs_out(rows: list[dict[str, Any]], name: str, prompt: int, count: int) -> bool:
    """Whether a smaller micro-batch ran out of memory already."""
    return any(
        row["provider"] == name and row.get("out_of_memory")
        and row["case"]["P"] <= prompt and row["case"]["mb"] <= count
        for row in rows
    )  # fmt: skip


def still_holds(row: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Peers' rows stand while GPU, driver and torch do; ours, and what runs in turn with it, for this library
    and commit only.
    """
    again = is_close(row["provider"], row["case"]["mb"])
    same = ("gpu", "driver", "torch", *(("library", "commit") if again else ()))
    return all(row[key] == facts[key] for key in same)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--prompts", type=int, nargs="+", default=list(PROMPTS))
    parser.add_argument("--micro-batches", type=int, nargs="+", default=list(MICRO_BATCHES))
    known = [name for name in ATTENTION if name != "reference"]
    parser.add_argument("--providers", nargs="+", choices=known, default=known)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="that are timed, at most")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new measurement after this time")
    parser.add_argument("--resume", action="store_true", help="leave out what --out holds already")
    args = parser.parse_args()
    require_gpu()
    begin, facts, shape = time.monotonic(), environment(), Shape()
    facts["gpu_uuid"] = str(torch.cuda.get_device_properties(0).uuid)[:8]
    before = read_rows(args.out) if args.resume else []
    rows = [row for row in before if still_holds(row, facts)]
    wrong = {name: what_is_wrong(name, "cuda", torch.bfloat16) for name in args.providers}
    print(facts, {name: text or "right" for name, text in wrong.items()}, flush=True)
    layer = Layer(shape, "cuda", torch.bfloat16)
    gc.collect()
    gc.freeze()  # modules and compiled code: collecting between cells then takes no time
    map_memory()
    for prompt, count, lens in cells(args.prompts, args.micro_batches):
        case = {"P": prompt, "mb": count, "tokens": sum(lens)}
        done = {row["provider"] for row in rows if row["case"] == case}
        for names in in_turn([name for name in args.providers if name not in done], count):
            if time.monotonic() - begin > args.seconds:
                continue
            batches = {name: Batch.of(name, prompt, lens, "cuda") for name in names}
            own = {
                name: {"case": case, "provider": name, "rows": batch.num_tokens, "flops": shape.flops(batch)}
                for name, batch in batches.items()
            }
            for name in names:
                if wrong[name]:
                    own[name]["error"] = wrong[name]
                elif runs_out(rows, name, prompt, count):
                    own[name] |= dict(error="out of memory with fewer rows", out_of_memory=True)
            fine = {name: batch for name, batch in batches.items() if "error" not in own[name]}
            for name, found in (measured(layer, fine, args.rounds) if fine else {}).items():
                own[name] |= found
                if "time_ms" in found:
                    own[name]["tflops"] = own[name]["flops"] / found["time_ms"] / 1e9
            gc.collect()
            rows += [facts | row for row in own.values()]
            for row in own.values():
                print({k: v for k, v in row.items() if k not in ("p20_ms", "p80_ms", "flops")}, flush=True)
            write_rows(args.out, merged([row for row in before if row not in rows], rows))


if __name__ == "__main__":
    main()
