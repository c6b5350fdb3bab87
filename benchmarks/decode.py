"""Decoding: one query token a sequence on its cache, against the time that reading the cache takes.

    python benchmarks/decode.py --out benchmarks/results/nvidia_h200/decode.json

The floor of a call is the bytes it must read and write over the bandwidth of a copy in the same process. Each
call is one of `layers` in a CUDA graph, every layer with caches of its own, so that L2 holds nothing of them
(a step of a model is such a graph); "eager": the same calls from Python. "copy": torch copies half of a
call's bytes, which reads and writes as many, in such graphs too: what a call of this size can reach. Shared
prompts: G prompts, N sequences each; floors count a prompt once. Providers are checked against fp32 first.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from needs_gpu import require_gpu  # noqa: E402
from records import write_rows  # noqa: E402
from run import clean, environment, short  # noqa: E402
from timing import as_graph, interleaved  # noqa: E402

from flash_attn import _decode, flash_attn_with_kvcache  # noqa: E402

TOLERANCE = 2e-2
GRAPH_BYTES = 2**31  # of the caches of a graph's calls: many times L2, and enough calls to hide its launch
MAX_LAYERS = 16
MOST_COPIED = 10**9  # bytes; more are copied in graphs at two thirds of the rate, and the floor says enough


@dataclass(frozen=True)
class DecodeCase:
    """B sequences of S keys; with `prompt`, B sequences of S keys of their own behind prompts of that length,
    `responses` on each."""

    batch: int
    seqlen: int
    prompt: int = 0
    responses: int = 1
    num_heads: int = 32
    num_heads_k: int = 4
    head_dim: int = 128

    @property
    def bytes(self) -> int:
        keys = self.batch * self.seqlen + self.batch // self.responses * self.prompt
        return 2 * self.head_dim * 2 * (keys * self.num_heads_k + self.batch * self.num_heads)

    @property
    def layers(self) -> int:
        return max(1, min(MAX_LAYERS, -(-GRAPH_BYTES // self.bytes)))

    def row(self) -> dict[str, Any]:
        names = dict(batch="B", seqlen="S", prompt="P", responses="N")
        names |= dict(num_heads="H", num_heads_k="Hk", head_dim="d")
        return {names[k]: v for k, v in asdict(self).items()}


CASES = [DecodeCase(b, s) for s in (8192, 32768, 131072) for b in (1, 8, 32, 128)]
SHARED = [DecodeCase(16, 1024, 32768, 16), DecodeCase(64, 1024, 8192, 16), DecodeCase(32, 512, 65536, 32)]


@dataclass
class Layer:
    q: Tensor
    k: Tensor
    v: Tensor
    k_prompt: Tensor | None
    v_prompt: Tensor | None


Call = Callable[[Layer], Tensor]


def make_layers(case: DecodeCase, count: int) -> list[Layer]:
    generator = torch.Generator("cuda").manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)

    layers = []
    for _ in range(count):
        own = (case.batch, case.seqlen, case.num_heads_k, case.head_dim)
        layer = Layer(make(case.batch, 1, case.num_heads, case.head_dim), make(*own), make(*own), None, None)
        if case.prompt:
            shape = (case.batch // case.responses, case.prompt, case.num_heads_k, case.head_dim)
            layer.k_prompt, layer.v_prompt = make(*shape), make(*shape)
        layers.append(layer)
    return layers


def providers(case: DecodeCase) -> dict[str, Call]:
    seqlens = torch.full((case.batch,), case.seqlen, dtype=torch.int32, device="cuda")
    if case.prompt:
        return {"ours-shared": lambda x: shared(case, x, seqlens)} | whole(case)
    return {
        "ours": lambda x: flash_attn_with_kvcache(x.q, x.k, x.v, cache_seqlens=seqlens, causal=True),
        "ours-op-sm90a": lambda x: through_the_op(x, seqlens, "90"),
        "ours-op-sm80": lambda x: through_the_op(x, seqlens, "80"),
        "sdpa": sdpa,
    }


def through_the_op(x: Layer, seqlens: Tensor, arch: str) -> Tensor:
    os.environ["FLASH_ATTN_FORCE_ARCH"], os.environ["FLASH_ATTN_DECODE"] = arch, "op"
    try:
        return flash_attn_with_kvcache(x.q, x.k, x.v, cache_seqlens=seqlens, causal=True)
    finally:
        os.environ["FLASH_ATTN_FORCE_ARCH"] = os.environ["FLASH_ATTN_DECODE"] = ""


def sdpa(x: Layer) -> Tensor:
    q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def shared(case: DecodeCase, x: Layer, seqlens: Tensor) -> Tensor:
    prompt = _decode.Keys(x.k_prompt, x.v_prompt, None, case.prompt)
    return _decode.decode(x.q, _decode.Keys(x.k, x.v, seqlens, 0), case.head_dim**-0.5, 0.0, prompt=prompt)[0]


def whole(case: DecodeCase) -> dict[str, Call]:
    """The prompt copied before each sequence's keys."""
    joined: dict[int, tuple[Tensor, Tensor]] = {}

    def join(x: Layer) -> tuple[Tensor, Tensor]:
        if id(x) not in joined:
            pairs = ((x.k_prompt, x.k), (x.v_prompt, x.v))
            joined[id(x)] = tuple(  # type: ignore[assignment]
                torch.cat((prompt.repeat_interleave(case.responses, 0), own), 1)  # type: ignore[union-attr]
                for prompt, own in pairs
            )
        return joined[id(x)]

    return {"ours-replicated": lambda x: flash_attn_with_kvcache(x.q, *join(x), causal=True)}


def reference(case: DecodeCase, x: Layer, b: int) -> Tensor:
    """Sequence b's output in fp32."""
    k, v = x.k[b], x.v[b]
    if x.k_prompt is not None and x.v_prompt is not None:
        g = b // case.responses
        k, v = torch.cat((x.k_prompt[g], k)), torch.cat((x.v_prompt[g], v))
    group = case.num_heads // case.num_heads_k
    k, v = (y.float().transpose(0, 1).repeat_interleave(group, 0) for y in (k, v))
    scores = (x.q[b, 0].float()[:, None] @ k.transpose(1, 2)) * case.head_dim**-0.5
    return (scores.softmax(-1) @ v)[:, 0]


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 4 GB."""
    x = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / interleaved({"copy": lambda: y.copy_(x)}, 9)["copy"].time_ms * 1e3


def time_case(case: DecodeCase, bandwidth: float, repeats: int, names: list[str], save: Any) -> None:
    layers = make_layers(case, case.layers)
    calls: dict[str, Call] = {}
    for name, call in providers(case).items():
        if names and name not in names:
            continue
        try:
            got, want = call(layers[0])[-1, 0].float(), reference(case, layers[0], case.batch - 1)
            error = float((got - want).norm() / want.norm())
            if not error < TOLERANCE:
                raise ValueError(f"out is wrong: relative rms error {error:.1e}")
            calls[name] = call
        except Exception as error:  # a provider that does not run here is a result
            save(dict(case=case.row(), provider=name, error=short(error)))
    copied = not case.prompt and case.bytes < MOST_COPIED and (not names or "copy" in names)
    copies = [torch.empty_like(x.k) for x in layers] if copied else None
    for graph in (True, False):
        runs: dict[str, Any] = {}
        if graph and copies is not None:
            runs["copy"] = as_graph(lambda: [y.copy_(x.k) for x, y in zip(layers, copies, strict=True)])
        for name, call in calls.items():
            run = lambda call=call: [call(layer) for layer in layers]  # noqa: E731
            try:
                runs[name] = as_graph(run) if graph else run
            except Exception as error:
                save(dict(case=case.row(), provider=name, graph=graph, error=short(error)))
        for name, timing in interleaved(runs, repeats).items():
            times = {k: v / len(layers) for k, v in asdict(timing).items()}
            floor_ms = case.bytes / bandwidth * 1e3
            row = dict(case=case.row(), provider=name, graph=graph, layers=len(layers), **times)
            save(row | dict(floor_ms=floor_ms, of_floor=floor_ms / times["time_ms"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding against the bandwidth of memory.")
    parser.add_argument("--out", default=None, help="JSON file")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--providers", default="", help="only these, by commas")
    parser.add_argument("--cases", default="", help="only these, as B:S[:P:N] by commas")
    args = parser.parse_args()
    require_gpu()
    facts = environment()
    bandwidth = copy_bandwidth()
    facts["copy_tb_s"] = round(bandwidth / 1e12, 3)
    print(facts, flush=True)
    rows: list[dict[str, Any]] = []

    def save(row: dict[str, Any]) -> None:
        rows.append(facts | row)
        case = " ".join(f"{k}={v}" for k, v in row["case"].items() if k in "BSPN" and v)
        text = row.get("error") or f"{row['time_ms'] * 1e3:9.1f} us {100 * row['of_floor']:6.1f} %"
        graph = "graph" if row.get("graph") else "eager"
        print(f"{case:30s} {row['provider']:16s} {graph} {text}", flush=True)
        if args.out:
            write_rows(args.out, rows)

    asked = [DecodeCase(*map(int, x.split(":"))) for x in args.cases.split(",") if x]
    for case in asked or [*CASES, *SHARED]:
        clean()
        time_case(case, bandwidth, args.repeats, [x for x in args.providers.split(",") if x], save)


if __name__ == "__main__":
    main()
