"""The result of a run as JSON, as a table on the terminal and as a plot."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # drawing from JSON needs no model
    from .compare import Differences, Tolerance
    from .update import Group, Update


def as_record(
    case: dict[str, Any],
    machine: dict[str, Any],
    groups: list[Group],
    updates: list[Update],
    differences: Differences,
    tolerance: Tolerance,
    sampling_seconds: float,
) -> dict[str, Any]:
    """All that a reader of the figures may ask for; table, plot and README are drawn from it."""
    replicated, shared = updates
    return {
        "machine": machine,
        "case": case,
        "groups": [
            {"prompt": len(g.prompt), "responses": [len(r) for r in g.responses], "rewards": g.rewards}
            for g in groups
        ],
        "sampling_seconds": sampling_seconds,
        "variants": {
            u.name: {
                "tokens": u.num_tokens,
                "seconds": u.phases.seconds,
                "total_seconds": u.phases.total_seconds,
                "peak_mib": u.phases.peak_mib,
                "loss": u.loss,
            }
            for u in updates
        },
        "speedup": replicated.phases.total_seconds / shared.phases.total_seconds,
        "differences": differences.as_dict(),
        "tolerance": asdict(tolerance),
    }


def table_rows(record: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what, replicated, shared, replicated / shared) of every figure."""
    a, b = record["variants"]["replicated"], record["variants"]["shared"]
    rows = [
        (
            "tokens through the model",
            f"{a['tokens']:,}",
            f"{b['tokens']:,}",
            f"{a['tokens'] / b['tokens']:.1f}x",
        )
    ]
    for phase, seconds in a["seconds"].items():
        other = b["seconds"][phase]
        rows.append((f"{phase}, s", f"{seconds:.2f}", f"{other:.2f}", f"{seconds / other:.1f}x"))
    rows.append(
        ("update, s", f"{a['total_seconds']:.2f}", f"{b['total_seconds']:.2f}", f"{record['speedup']:.1f}x")
    )
    for phase, peak in a["peak_mib"].items():
        other = b["peak_mib"][phase]
        if peak is not None and other is not None:
            rows.append((f"{phase}, peak MiB", f"{peak:.0f}", f"{other:.0f}", ""))
    rows.append(
        ("loss", f"{a['loss']:.6f}", f"{b['loss']:.6f}", f"differ by {record['differences']['loss']:.1e}")
    )
    return rows


def print_table(record: dict[str, Any]) -> None:
    """The table, and under it how equal the two updates are."""
    rows = [("", "replicated", "shared", ""), *table_rows(record)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    print()
    for row in rows:
        cells = [f"{row[0]:<{widths[0]}}", *(f"{row[i]:>{widths[i]}}" for i in (1, 2, 3))]
        print("  ".join(cells).rstrip())
    d, t = record["differences"], record["tolerance"]
    print(f"\nlargest difference of a log-prob        {d['log_prob']:.1e}  (tolerance {t['log_prob']:.0e})")
    print(f"largest relative difference, gradients  {d['gradient']:.1e}  (tolerance {t['gradient']:.0e}),")
    print(f"  that of {d['gradient_of']}; all together {d['gradient_total']:.1e}")
    print(f"gradient norm {d['gradient_norm']:.3f} over {d['num_parameters']} parameter tensors")


def plot(record: dict[str, Any], path: Path) -> None:
    """Bars of tokens and of seconds by phase, replicated beside shared."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(record["variants"])
    variants = [record["variants"][name] for name in names]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), width_ratios=[1, 1.4], layout="constrained")
    bars = left.bar(names, [v["tokens"] for v in variants], color=["#b0b7c3", "#1f4e9c"])
    left.bar_label(bars, [f"{v['tokens']:,}" for v in variants])
    left.set_title("tokens through the model")
    base = [0.0, 0.0]
    for phase, color in zip(variants[0]["seconds"], ("#5b8fd6", "#1f4e9c", "#e0a030"), strict=True):
        seconds = [v["seconds"][phase] for v in variants]
        bars = right.bar(names, seconds, bottom=base, label=phase, color=color)
        base = [b + s for b, s in zip(base, seconds, strict=True)]
    right.bar_label(bars, [f"{v['total_seconds']:.1f} s" for v in variants])
    right.set_title(f"one GRPO update: {record['speedup']:.1f} times as fast")
    right.set_ylabel("seconds")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
