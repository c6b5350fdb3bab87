"""Where sharing the prompt pays: time of the replicated batch over the shared one, for N responses and P / R.

    python benchmarks/break_even.py --out benchmarks/results/h200/break_even.json

Attention alone, forward and backward, on the same kernels: shared (one prompt, N responses) and replicated (N
sequences of P + R rows, as flash_attn_func runs them). Copying the prompt is not timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from cases import Case  # noqa: E402
from providers import PROVIDERS, Pair, Problem, ours_replicated  # noqa: E402
from run import clean, environment, short  # noqa: E402
from timing import interleaved  # noqa: E402

RESPONSES = (1, 2, 4, 8, 16, 32)
RATIOS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16)  # P / R
RESPONSE_LEN = 512


def both(pair: Pair) -> object:
    return pair[0](), pair[1]()


def cell(case: Case, provider: str, repeats: int) -> dict[str, Any]:
    problem = Problem(case)
    shared, replicated = PROVIDERS[provider](problem), ours_replicated(problem)
    calls = {"shared": lambda: both(shared), "replicated": lambda: both(replicated)}
    times = interleaved(calls, repeats)
    row: dict[str, Any] = {"case": case.row(), "provider": provider}
    row |= {f"{name}_ms": timing.time_ms for name, timing in times.items()}
    return row | {"speedup": row["replicated_ms"] / row["shared_ms"]}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A map: N upwards, P / R to the right; the speed-up in each cell."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "speedup" in row]
    counts = sorted({row["case"]["N"] for row in rows})
    ratios = sorted({row["case"]["P"] / row["case"]["R"] for row in rows})
    figure, axis = plt.subplots(figsize=(1.5 + 0.75 * len(ratios), 1 + 0.5 * len(counts)))
    values = [[float("nan")] * len(ratios) for _ in counts]
    for row in rows:
        c = row["case"]
        values[counts.index(c["N"])][ratios.index(c["P"] / c["R"])] = row["speedup"]
    norm = matplotlib.colors.TwoSlopeNorm(vcenter=1.0, vmin=0.5, vmax=max(8.0, *map(max, values)))
    axis.imshow(values, origin="lower", aspect="auto", cmap="RdYlGn", norm=norm)
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            axis.text(x, y, f"{value:.2g}", ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
    axis.set_yticks(range(len(counts)), [str(count) for count in counts])
    axis.set_xlabel("prompt length / response length")
    axis.set_ylabel("responses")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def text(rows: list[dict[str, Any]]) -> str:
    """The map as a table of replicated time / shared time."""
    from report import markdown_table

    first = rows[0]
    c = first["case"]
    ratios = sorted({row["case"]["P"] / row["case"]["R"] for row in rows})
    found = {(row["case"]["N"], row["case"]["P"] / row["case"]["R"]): row.get("speedup") for row in rows}
    lines: list[tuple[str, ...]] = [("N", *(f"P/R = {ratio:g}" for ratio in ratios))]
    for count in sorted({row["case"]["N"] for row in rows}):
        values = [found.get((count, ratio)) for ratio in ratios]
        lines.append((str(count), *("-" if v is None else f"{v:.2f}" for v in values)))
    return f"""\
Forward and backward of attention, replicated time / shared time on the same kernels ({first["provider"]}):
{first["gpu"]}, CUDA {first["cuda"]}, torch {first["torch"]}, {first["date"]}; R={c["R"]}, H={c["H"]},
Hk={c["Hk"]}, d={c["d"]}, {c["dtype"]}. Below 1 sharing does not pay.

{markdown_table(lines)}"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Where sharing the prompt pays.")
    parser.add_argument("--out", required=True, help="JSON file; the plot stands beside it as .png")
    parser.add_argument("--provider", default="ours-sm90a")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    facts = environment()
    rows: list[dict[str, Any]] = []
    path = Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    for count in RESPONSES:
        for ratio in RATIOS:
            case = Case(count, int(ratio * RESPONSE_LEN), RESPONSE_LEN)
            try:
                row = cell(case, args.provider, args.repeats)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                row = {"case": case.row(), "provider": args.provider, "error": short(error)}
            rows.append(facts | row)
            print({k: row[k] for k in row if k != "case"}, count, ratio, flush=True)
            clean()
        path.write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
