"""Where sharing the prompt pays: time of the replicated batch over the shared one, for N responses and P / R.

    python benchmarks/break_even.py --out benchmarks/results/nvidia_h200/break_even.json
    python benchmarks/break_even.py --responses 8 --ratios 4

Attention alone, forward and backward, on the same kernels: shared (one prompt, N responses) and replicated (N
sequences of P + R rows, as flash_attn_func runs them). Both as CUDA graphs, so that launches from Python do
not count; copying the prompt is not timed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from cases import Case  # noqa: E402
from needs_gpu import require_gpu  # noqa: E402
from providers import PROVIDERS, Pair, Problem, ours_replicated  # noqa: E402
from records import earlier, merged, write_rows  # noqa: E402
from run import clean, environment, short  # noqa: E402
from timing import as_graph, interleaved  # noqa: E402

RESPONSES = (1, 2, 4, 8, 16, 32)
RATIOS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16)  # P / R
RESPONSE_LEN = 512


def both(pair: Pair) -> object:
    return pair[0](), pair[1]()


def cell(case: Case, provider: str, repeats: int) -> dict[str, Any]:
    problem = Problem(case)
    shared, replicated = PROVIDERS[provider](problem), ours_replicated(problem)
    pairs = {"shared": shared, "replicated": replicated}
    calls = {name: as_graph(lambda pair=pair: both(pair)) for name, pair in pairs.items()}  # type: ignore[misc]
    times = interleaved(calls, repeats)
    row: dict[str, Any] = {"case": case.row(), "provider": provider, "graph": True}
    row |= {f"{name}_ms": timing.time_ms for name, timing in times.items()}
    return row | {"speedup": row["replicated_ms"] / row["shared_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Where sharing the prompt pays.")
    parser.add_argument("--out", help="JSON file; make report draws it")
    parser.add_argument("--responses", type=int, nargs="+", default=list(RESPONSES), metavar="N")
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS), metavar="P/R")
    parser.add_argument("--provider", default="ours-sm90a")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--resume", action="store_true", help="leave out the cells that --out holds already")
    args = parser.parse_args()
    require_gpu()
    facts = environment()
    rows, others = earlier(args.out, facts) if args.resume else ([], [])
    for count in args.responses:
        for ratio in args.ratios:
            case = Case(count, int(ratio * RESPONSE_LEN), RESPONSE_LEN)
            if any(row["case"] == case.row() for row in rows):
                continue
            try:
                row = cell(case, args.provider, args.repeats)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                row = {"case": case.row(), "provider": args.provider, "error": short(error)}
            rows.append(facts | row)
            print({k: row[k] for k in row if k != "case"}, count, ratio, flush=True)
            clean()
            write_rows(args.out, merged(others, rows))  # a run cut short is not lost


if __name__ == "__main__":
    main()
