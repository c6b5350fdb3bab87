"""Tables and plots of the TRL runs: training both ways (examples/grpo_reasoning_gym.py), and times of the
policy update (trl_updates.py). report.py puts them into the documents."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from built_from import library_of

Rows = list[dict[str, Any]]
Table = Callable[[list[tuple[str, ...]]], str]

MODELS = {"smollm2-135m": "SmolLM2-135M", "qwen3-1.7b": "Qwen3-1.7B"}
NAMES = {
    "reward": "Reward",
    "loss": "Loss (of on-policy steps: 0 up to rounding)",
    "grad_norm": "Gradient norm",
}
REPLICATED = ("trl-replicated-sdpa", "trl-replicated-flash_attention_2")


def cells(rows: Rows) -> list[dict[str, dict[str, Any]]]:
    """provider -> row of every cell, by model, groups, R, P and N."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        c = row["case"]
        found.setdefault((c["model"], -c["groups"], -c["R"], c["P"], c["N"]), {})[row["provider"]] = row
    return [found[key] for key in sorted(found)]


def best_replicated(cell: dict[str, dict[str, Any]]) -> float | None:
    """ms of the faster replicated update."""
    times = [cell[name]["time_ms"] for name in REPLICATED if cell.get(name, {}).get("time_ms")]
    return min(times) if times else None


def speedup(cell: dict[str, dict[str, Any]]) -> float | None:
    """Of the shared update over the faster replicated one."""
    best, shared = best_replicated(cell), cell["trl-shared"].get("time_ms")
    return best / shared if best and shared else None


def above_best(cell: dict[str, dict[str, Any]]) -> float | None:
    """What following the planner's verdict costs, relative to the better way."""
    best, shared = best_replicated(cell), cell["trl-shared"].get("time_ms")
    if not best or not shared:
        return None
    chosen = shared if cell["trl-shared"]["verdict"] == "share" else best
    return chosen / min(best, shared) - 1


def _ms(row: dict[str, Any] | None) -> str:
    if row is None or not row.get("time_ms"):
        return "-"
    mark = "*" if row["timed_rows"] < row["case"]["N"] * row["case"]["groups"] else ""
    mark += "†" if row["repeats"] == 1 else ""
    return f"{row['time_ms']:,.0f}{mark}"


def _gib(row: dict[str, Any] | None) -> str:
    return "-" if row is None or row.get("peak_gib") is None else f"{row['peak_gib']:.1f}"


def host_bound(cell: dict[str, dict[str, Any]]) -> bool:
    """Whether the host takes longer to launch the shared update than the predicted speed-up leaves it."""
    best, shared = best_replicated(cell), cell["trl-shared"]
    if best is None or not shared.get("time_ms") or shared.get("least_call_ms") is None:
        return False
    num_calls = shared["case"]["N"] * shared["case"]["groups"] / shared["rows_per_call"]
    return shared["least_call_ms"] * num_calls > best / shared["predicted_speedup"]


def _verdict(row: dict[str, Any]) -> str:
    """Of the planner; by FLOPs where it was not calibrated."""
    return row["verdict"] + ("" if row["cost_model"]["unit"] == "seconds" else " (FLOPs)")


def updates(rows: Rows, table: Table) -> str:
    """A table per model."""
    parts = []
    for model in dict.fromkeys(row["case"]["model"] for row in rows):
        own = [cell for cell in cells(rows) if cell["trl-shared"]["case"]["model"] == model]
        lines: list[tuple[str, ...]] = [(
            f"{MODELS.get(model, model)}: prompts, P, N, R", "shared ms", "SDPA ms", "flash_attention_2 ms",
            "speed-up", "of predicted", "planner", "peak GiB", "replicated",
        )]  # fmt: skip
        for cell in own:
            shared, case = cell["trl-shared"], cell["trl-shared"]["case"]
            gain = speedup(cell)
            relative = "-" if gain is None else f"{gain / shared['predicted_speedup']:.0%}"
            relative += " (host)" if host_bound(cell) else ""
            sdpa, flash = (cell.get(name) for name in REPLICATED)
            lines.append((
                "{groups}, {P}, {N}, {R}".format(**case), _ms(shared), _ms(sdpa), _ms(flash),
                "-" if gain is None else f"{gain:.2f}x", relative, _verdict(shared),
                _gib(shared), _gib(flash),
            ))  # fmt: skip
        parts.append(table(lines))
    tables = "\n\n".join(parts)
    return f"""\
Medians of interleaved rounds. Both ways run in micro-batches of as many tokens at most, replicated rows or
whole shared groups (*: some of the equal micro-batches were run, and the time scaled; †: one round). The
prediction is the ratio of executed FLOPs; Qwen3 runs with checkpointing. "(host)": launching the shared
update takes the host longer than the prediction leaves it. "planner" is the verdict of the calibrated cost
model (FLOPs: not calibrated).

{tables}"""


def summary(rows: Rows) -> str:
    """What was run, and what holds over all cells."""
    first = rows[0]
    date = f"{first['date']}{library_of(rows)}"
    head = f"{first['gpu']}, driver {first['driver']}, CUDA {first['cuda']}, torch {first['torch']}, {date}: "
    head += "loss and backward in TRL's trainer, random weights and tokens, bf16; predicted: the ratio of "
    head += "executed FLOPs. `benchmarks/README.md` has every cell."
    return f"{textwrap.fill(head, 110, break_on_hyphens=False)}\n\n{_summary(rows)}"


def _summary(rows: Rows) -> str:
    timed = [(cell, gain) for cell in cells(rows) if (gain := speedup(cell)) is not None]
    large = [(cell, gain) for cell, gain in timed if (best_replicated(cell) or 0) > 200]
    parts = []
    for num_groups in sorted({cell["trl-shared"]["case"]["groups"] for cell, _ in large}, reverse=True):
        kinds = []
        for bound, name in ((False, "launched in time"), (True, "bound by the host")):
            shares = [
                gain / cell["trl-shared"]["predicted_speedup"]
                for cell, gain in large
                if host_bound(cell) is bound and cell["trl-shared"]["case"]["groups"] == num_groups
            ]
            if shares:
                enough = sum(share >= 0.92 for share in shares)
                span = f"{min(shares):.0%} to {max(shares):.0%}" if len(shares) > 1 else f"{shares[0]:.0%}"
                kinds.append(f"{len(shares)} {name}: {span}, {enough} of them at least 92%")
        prompts = f"{num_groups} prompt{'s' * (num_groups > 1)}"
        parts.append(f"- updates of {prompts}: {'; '.join(kinds)}.")
    losses = [loss for cell, _ in timed if (loss := above_best(cell)) is not None]
    slower = sum(gain < 1 for _, gain in timed)
    return (
        "Share of the predicted speed-up, over the faster replicated way, where that takes more than\n"
        f"200 ms ({len(large)} cells):\n\n" + "\n".join(parts) + "\n\n"
        f"Following the planner costs at most {max(losses):.1%} over the better way of each cell;\n"
        f"sharing is slower in {slower} of {len(losses)} cells."
    )


def draw_updates(rows: Rows, path: Path) -> None:
    """Speed-up, measured and predicted, of every cell."""
    from plotting import pyplot

    plt = pyplot()
    models = list(dict.fromkeys(row["case"]["model"] for row in rows))
    figure, axes = plt.subplots(
        1, len(models), figsize=(6.5 * len(models), 3.6), squeeze=False, layout="constrained"
    )
    for axis, model in zip(axes[0], models, strict=True):
        own = [c for c in cells(rows) if c["trl-shared"]["case"]["model"] == model and speedup(c) is not None]
        names = ["{groups}: {P},{N},{R}".format(**c["trl-shared"]["case"]) for c in own]
        at = range(len(own))
        gains = [speedup(c) or 0.0 for c in own]
        for bound, colour, label in ((False, "#1f4e9c", "measured"), (True, "#a9c6ec", "bound by the host")):
            found = [i for i in at if host_bound(own[i]) is bound]
            if found:
                axis.bar(found, [gains[i] for i in found], color=colour, label=label)
        predicted = [c["trl-shared"]["predicted_speedup"] for c in own]
        axis.plot(at, predicted, "_", color="black", markersize=14, label="predicted by FLOPs")
        axis.set_ylim(0, 1.25 * max(gains + predicted))
        axis.axhline(1, color="#888888", linewidth=0.8)
        axis.set_xticks(at, names, rotation=60, ha="right", fontsize=7)
        axis.set_title(f"{MODELS.get(model, model)}: policy update, prompts: P,N,R")
        axis.set_ylabel("times as fast as replicated")
        axis.legend(frameon=False, ncols=3, loc="upper left", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def training(data: dict[str, Any], table: Table) -> str:
    """Rewards and seconds of the runs of `write_json`."""
    from grpo.curves import from_json, summary

    runs, machine = from_json(data), data["machine"]
    s = runs[0].settings
    lines: list[tuple[str, ...]] = [(
        "", "reward, first 10 steps", "last 10 steps", "policy update s", "step s", "peak GiB",
    )]  # fmt: skip
    for variant, found in summary(runs).items():
        first, last = found["first_rewards"], found["last_rewards"]
        peak = max(step["peak_mib"] for run in runs if run.variant == variant for step in run.steps) / 1024
        lines.append((
            variant, " ".join(f"{x:.2f}" for x in first), " ".join(f"{x:.2f}" for x in last),
            f"{found['median_update_seconds']:.2f}", f"{found['median_step_seconds']:.2f}", f"{peak:.1f}",
        ))  # fmt: skip
    seeds = ", ".join(str(x) for x in sorted({run.settings["seed"] for run in runs}))
    counts = {v: [len(run.steps) for run in runs if run.variant == v] for v in summary(runs)}
    steps = ", ".join(f"{_span(own)} steps {variant}" for variant, own in counts.items())
    date = f"{machine['date']}{library_of([machine])}"
    head = f"{s['loss_type'].upper()} training of {s['model']} on reasoning-gym's {s['task']}, {steps}, "
    head += f"{s['num_prompts']} x {s['num_responses']} responses a step to prompts of about "
    head += f"{s['prompt_length']} tokens, seeds {seeds} each way with the same prompts, bf16 autocast; "
    head += f"{machine['device']}, torch {machine['torch']}, transformers {machine['transformers']}, {date}. "
    head += "All runs shared the GPU until the faster ones had ended: seconds say roughly how the two ways "
    head += "compare, no more."
    return f"{textwrap.fill(head, 110, break_on_hyphens=False)}\n\n{table(lines)}"


def agreement_text(data: dict[str, Any]) -> str:
    """How far the two ways of training agree, beside how far seeds do."""
    from grpo.curves import agreement, from_json, summary

    runs = from_json(data)
    s = runs[0].settings
    sentences = []
    for name in ("reward", "loss", "grad_norm"):
        values = agreement(runs, name)
        if values is not None:
            sentences.append(
                f"- {NAMES[name]}: two runs of a seed differ by {values['same_seed']:.2g} on average,\n"
                f"  replicated runs of two seeds by {values['other_seed']:.2g}; the mean of the shared runs\n"
                f"  lies between the replicated runs at {values['inside']:.0%} of the steps."
            )
    if sentences and len({run.settings["seed"] for run in runs}) == 3:
        sentences.append(
            "- Where chance alone makes the difference, the mean of three lies between three others at 63%\n"
            "  of the steps (normally distributed values)."
        )
    for variant, found in summary(runs).items():
        first, last = found["first_rewards"], found["last_rewards"]
        gain = sum(last) / len(last) - sum(first) / len(first)
        sentences.append(
            f"- Learning, {variant}: the mean reward rises by {gain:.2f}, seeds end within\n"
            f"  {max(last) - min(last):.2f} of each other."
        )
    credit = s.get("word_credit", 0.0)
    reward = f", {credit:.0%} of the reward for the right words in any order" if credit else ""
    head = f"Temperature {s['temperature']:g}, learning rate {s['learning_rate']:g}{reward}."
    return head + "\n\n" + "\n".join(sentences)


def _span(values: list[int]) -> str:
    """Lowest to highest."""
    return str(max(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def draw_training(data: dict[str, Any], path: Path) -> None:
    """Reward, loss and seconds of the policy update over the steps."""
    from grpo.curves import draw, from_json

    draw(from_json(data), path)
