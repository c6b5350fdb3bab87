"""Error of the prompt's dK and dV against fp64, over the number of responses and the GQA ratio.

    python benchmarks/error_growth.py --out benchmarks/results/nvidia_h200/error_growth.json
    python benchmarks/error_growth.py --providers ours-sm90a fa2-two-call --responses 64 --ratios

Relative rms error over the prompt's rows, bf16. Ours sums in fp32 over all rows and query heads and rounds
once; "two-call" rounds the parts to bf16 and adds them, "replicated" rounds every copy and sums N of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from cases import Case  # noqa: E402
from needs_gpu import require_gpu  # noqa: E402
from providers import PROVIDERS, Problem  # noqa: E402
from records import write_rows  # noqa: E402
from run import environment, packed, short  # noqa: E402

OURS = ("ours-sm90a", "ours-sm80", "ours-deterministic")
NAMES = (*OURS, "fa2-two-call", "fa2-replicated", "cudnn-two-call", "cudnn-replicated")
GATHERED = ("gather-varlen", "prefix-grouper")
# Compiled anew for every ratio: over N only.
FA4 = ("fa4-two-call", "fa4-replicated", "fa4-gather", "fa4-block-sparse")
ALL = (*NAMES, *GATHERED, *FA4, "flex")
RESPONSES, RATIOS = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16)
BASE = dict(prompt_len=256, response_len=128, head_dim=128)


def exact(problem: Problem) -> tuple[Tensor, Tensor]:
    """dK and dV of the prompt in fp64, one query head at a time."""
    _, p, r = problem.one_group()
    index = torch.arange(problem.case.total, device="cuda")
    owner = torch.where(index < p, -1, (index - p) // r)
    mask = (index[None] <= index[:, None]) & ((index[None] < p) | (owner[None] == owner[:, None]))
    ratio = problem.case.num_heads // problem.case.num_heads_k
    dk, dv = (torch.zeros(x[:p].shape, dtype=torch.float64, device="cuda") for x in (problem.k, problem.v))
    for head in range(problem.case.num_heads):
        q, dout = problem.q[:, head].double(), problem.dout[:, head].double()
        k, v = (x[:, head // ratio].double() for x in (problem.k, problem.v))
        weights = (q @ k.T * problem.scale).masked_fill(~mask, -torch.inf).softmax(-1)
        dp = dout @ v.T
        ds = weights * (dp - (dp * weights).sum(-1, keepdim=True))
        dk[:, head // ratio] += (ds[:, :p].T @ q) * problem.scale
        dv[:, head // ratio] += weights[:, :p].T @ dout
    return dk, dv


def rows_of(case: Case, axis: str, names: Iterable[str]) -> list[dict[str, Any]]:
    problem = Problem(case)
    want = exact(problem)
    rows = []
    for name in names:
        row: dict[str, Any] = dict(axis=axis, case=case.row(), provider=name)
        try:
            _, _, dk, dv = packed(PROVIDERS[name](problem))
            for label, x, y in (("dk", dk, want[0]), ("dv", dv, want[1])):
                row[label] = float((x[: case.prompt_len].double() - y).norm() / y.norm())
        except Exception as error:
            row["error"] = short(error)
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Error of the prompt's gradients against fp64.")
    parser.add_argument("--out", help="JSON file; make report draws it")
    parser.add_argument("--providers", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--responses", type=int, nargs="+", default=list(RESPONSES))
    parser.add_argument("--ratios", type=int, nargs="*", default=list(RATIOS))
    args = parser.parse_args()
    require_gpu()
    facts = environment()
    rows: list[dict[str, Any]] = []
    points = [("N", n, (*NAMES, *GATHERED)) for n in args.responses]
    points += [("ratio", ratio, (*NAMES, *GATHERED)) for ratio in args.ratios]
    points += [("N", n, FA4) for n in args.responses] if FA4[0] in PROVIDERS else []
    points += [("N", n, ("flex",)) for n in sorted(args.responses, reverse=True)]  # compiled for every shape
    for axis, point, names in points:
        n, ratio = (point, 2) if axis == "N" else (8, point)
        case = Case(num_responses=n, num_heads=2 * ratio, num_heads_k=2, **BASE)
        asked = [name for name in names if name in args.providers]
        rows += [facts | row for row in rows_of(case, axis, asked)] if asked else []
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
