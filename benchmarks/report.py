"""Fills the documents' measured blocks and plots from the JSON in benchmarks/results; none is typed by hand.

    python benchmarks/report.py [--check]

A block lies between `<!-- begin NAME -->` and `<!-- end NAME -->`; `BLOCKS` says what fills it. --check
changes nothing and fails where a block is out of date. Figures must come from an unchanged checkout of an
ancestor commit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
os.environ["SOURCE_DATE_EPOCH"] = "0"  # no date in SVG files: equal plots are equal files

import attention_report  # noqa: E402
import checks_report  # noqa: E402
import decode_report  # noqa: E402
import decoder_layer_report  # noqa: E402
import gains_report  # noqa: E402
import gemma4_stack as gemma4  # noqa: E402
import kernel_report  # noqa: E402
import long_context_report  # noqa: E402
import sequence_parallel_report as sp_report  # noqa: E402
import trl_report  # noqa: E402
import verl_report  # noqa: E402
from plotting import pyplot  # noqa: E402


@dataclass(frozen=True)
class Block:
    """One generated block: for each JSON file `pattern` of the results its `text(data)` and its plot."""

    name: str
    pattern: str
    text: Callable[[Any], str]
    draw: Callable[[Any, Path], None] | None
    document: str = "README.md"

    def sources(self) -> list[Path]:
        """The measured files, one a machine."""
        return sorted(RESULTS.glob(self.pattern))


def markdown_table(rows: list[tuple[str, ...]]) -> str:
    """Rows as a table, the first as its head; columns after the first are right-aligned."""
    head, *body = rows
    rule = [":--", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])


def gains(record: dict[str, Any]) -> str:
    """A line from each kind of measurement."""
    return gains_report.text(record, RESULTS, markdown_table)


def policy_update(record: dict[str, Any]) -> str:
    """`make demo`: what was run, the table, how equal both updates are."""
    from grpo.report import table_rows

    machine, case, differences = record["machine"], record["case"], record["differences"]
    lengths = [group["prompt"] for group in record["groups"]]
    rows = [("", "replicated", "shared", "replicated / shared"), *table_rows(record)]
    busy = machine["load_average"] > machine["num_threads"] + 0.5
    threads = f"{machine['num_threads']} thread" + "s" * (machine["num_threads"] > 1)
    return f"""\
One GRPO update of {case["model"]}: {case["num_groups"]} prompts of {min(lengths)} to {max(lengths)} tokens,
{case["num_responses"]} responses each, {case["dtype"]}, {threads} of {machine["cpu"]}
(torch {machine["torch"]}, transformers {machine["transformers"]}, {machine["date"]}\
{f"; other work ran beside it, load average {machine['load_average']}" if busy else ""}).

{markdown_table(rows)}

Largest difference of a log-prob: {differences["log_prob"]:.1e}. Largest relative difference of a gradient:
{differences["gradient"]:.1e}, over {differences["num_parameters"]} parameter tensors."""


def draw_policy_update(record: dict[str, Any], path: Path) -> None:
    """The demo's own plot."""
    from grpo.report import plot

    plot(record, path)


def kernels(rows: list[dict[str, Any]]) -> str:
    """`make bench`: a line a problem."""
    return kernel_report.summary(rows, markdown_table)


def kernel_tables(rows: list[dict[str, Any]]) -> str:
    """`make bench` and `make bench-full`: every provider on every case."""
    return kernel_report.text(rows, markdown_table)


def error_growth(rows: list[dict[str, Any]]) -> str:
    """`benchmarks/error_growth.py`: the prompt's gradients against fp64."""
    return attention_report.error_growth(rows, markdown_table)


def break_even(rows: list[dict[str, Any]]) -> str:
    """`benchmarks/break_even.py`: where sharing pays."""
    return attention_report.break_even(rows, markdown_table)


def decoder_layer(rows: list[dict[str, Any]]) -> str:
    """`benchmarks/decoder_layer.py`: a layer of Qwen3-8B's shape, and its memory."""
    return decoder_layer_report.text(rows, markdown_table)


def model_update(rows: list[dict[str, Any]]) -> str:
    """`benchmarks/verl_updates.py`: utilisation of the GPU in a whole model's update."""
    return decoder_layer_report.model_update(rows, markdown_table)


def cpu_attention(report: dict[str, Any]) -> str:
    """`benchmarks/cpu_attention.py`: the CPU implementation beside SDPA."""
    return attention_report.cpu_attention(report, markdown_table)


def gpu_tests(report: dict[str, Any]) -> str:
    """`make test-gpu`."""
    return checks_report.gpu_tests(report, markdown_table)


def sanitizer(rows: list[dict[str, Any]]) -> str:
    """`tests/gpu/run_sanitizer.py`."""
    return checks_report.sanitizer(rows, markdown_table)


def build_time(rows: list[dict[str, Any]]) -> str:
    """`benchmarks/build_time.py`: the library's build."""
    return checks_report.build_time(rows, markdown_table)


def trl_training(data: dict[str, Any]) -> str:
    """`examples/grpo_reasoning_gym.py --plot --json`: both ways of training."""
    return trl_report.training(data, markdown_table)


def trl_agreement(data: dict[str, Any]) -> str:
    """How far both ways of training agree."""
    return trl_report.agreement_text(data)


def trl_updates(rows: list[dict[str, Any]]) -> str:
    """`benchmarks/trl_updates.py`: speed of the policy update against what FLOPs predict."""
    return trl_report.summary(rows)


def trl_update_tables(rows: list[dict[str, Any]]) -> str:
    """Every cell of it."""
    return trl_report.updates(rows, markdown_table)


def gemma4_layers(rows: list[dict[str, Any]]) -> str:
    """`benchmarks/run.py --cases gemma4`: global and sliding layers."""
    return kernel_report.layers_text(rows, markdown_table)


def gemma4_stack(record: dict[str, Any]) -> str:
    """`benchmarks/gemma4_stack.py`: a Gemma-4-31B-shaped stack on a long prompt."""
    return gemma4.text(record, markdown_table)


def sequence_parallel(rows: list[dict[str, Any]]) -> str:
    """`benchmarks/sequence_parallel.py`: an attention layer over several GPUs."""
    return sp_report.summary(rows, markdown_table)


def sequence_parallel_tables(rows: list[dict[str, Any]]) -> str:
    """Every way of it, and the memory model."""
    return sp_report.text(rows, markdown_table)


def long_context(rows: list[dict[str, Any]]) -> str:
    """`examples/long_context_sp.py --json`: whole updates over several GPUs."""
    return long_context_report.text(rows, markdown_table)


def verl_updates(rows: list[dict[str, Any]]) -> str:
    """`benchmarks/verl_updates.py`: policy updates of veRL's worker."""
    return verl_report.text(rows, markdown_table)


def verl_passes(rows: list[dict[str, Any]]) -> str:
    """Every pass of it."""
    return verl_report.passes(rows, markdown_table)


def decode(rows: list[dict[str, Any]]) -> str:
    """`benchmarks/decode.py`: decoding against the memory's bandwidth."""
    return decode_report.text(rows, markdown_table)


OWN = "benchmarks/README.md"
BLOCKS = {
    block.name: block
    for block in (
        Block("gains", "cpu/policy_update.json", gains, None),
        Block("policy_update", "cpu/policy_update.json", policy_update, draw_policy_update),
        Block("kernels", "*/kernels.json", kernels, kernel_report.draw),
        Block("kernel_tables", "*/kernels*.json", kernel_tables, kernel_report.draw, OWN),
        Block("error_growth", "*/error_growth.json", error_growth, attention_report.draw_error_growth, OWN),
        Block("break_even", "*/break_even.json", break_even, attention_report.draw_break_even, OWN),
        Block("decoder_layer", "*/decoder_layer.json", decoder_layer, decoder_layer_report.draw, OWN),
        Block("model_update", "*/verl_updates.json", model_update, None, OWN),
        Block("cpu_attention", "cpu/attention.json", cpu_attention, None, OWN),
        Block("gpu_tests", "*/tests*.json", gpu_tests, None, OWN),
        Block("sanitizer", "*/sanitizer.json", sanitizer, None, OWN),
        Block("build_time", "cpu/build.json", build_time, None, OWN),
        Block("gemma4_layers", "*/gemma4_layers.json", gemma4_layers, kernel_report.draw, OWN),
        Block("gemma4_stack", "*/gemma4_stack.json", gemma4_stack, gemma4.draw),
        Block("decode", "*/decode.json", decode, None),
        Block("sequence_parallel", "*/sequence_parallel.json", sequence_parallel, sp_report.draw),
        Block("sequence_parallel_tables", "*/sequence_parallel.json", sequence_parallel_tables, None, OWN),
        Block("long_context", "*/long_context.json", long_context, long_context_report.draw, OWN),
        Block("trl_training", "*/trl_training.json", trl_training, trl_report.draw_training),
        Block("trl_agreement", "*/trl_training.json", trl_agreement, None, OWN),
        Block("trl_updates", "*/trl_updates.json", trl_updates, trl_report.draw_updates),
        Block("trl_update_tables", "*/trl_updates.json", trl_update_tables, None, OWN),
        Block("verl_updates", "*/verl_updates.json", verl_updates, verl_report.draw),
        Block("verl_passes", "*/verl_updates.json", verl_passes, None, OWN),
    )
}


def commits(data: Any) -> set[str | None]:
    """Commits that the figures of one file were measured on."""
    if isinstance(data, list):
        return {row.get("commit") for row in data}
    return {data.get("machine", data)["commit"]}


def check_commit(commit: str | None, source: Path) -> None:
    """Refuses figures that this checkout cannot have produced (unknown without git, in shallow clones)."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)

    name = source.relative_to(ROOT)
    if commit is None or not re.fullmatch("[0-9a-f]{7,40}", commit):
        raise ValueError(f"{name} must be measured on a commit without changes, got {commit}")
    whole = git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
    if whole and git("merge-base", "--is-ancestor", commit, "HEAD").returncode != 0:
        raise ValueError(f"{name} must be measured on an ancestor of this commit, got {commit}")


def content(block: Block) -> str:
    """What stands between the block's markers."""
    parts = []
    for source in block.sources():
        data = json.loads(source.read_text())
        for commit in commits(data):
            check_commit(commit, source)
        parts.append(block.text(data))
        if block.draw:
            image = source.with_suffix(".png").relative_to((ROOT / block.document).parent).as_posix()
            parts.append(f"![{block.name}, {source.parent.name}]({image})")
    return "\n\n".join(parts) or "Not measured yet."


def filled(text: str, block: Block) -> str:
    """`text` with the block's content put between its markers."""
    begin, end = f"<!-- begin {block.name} -->", f"<!-- end {block.name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{block.document} must have one {begin} and one {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content(block)}\n{end}{rest.split(end)[1]}"


def draw_both(block: Block, source: Path) -> None:
    """The plot as PNG, which documents show, and as SVG."""
    assert block.draw is not None
    pyplot()  # its settings, for plots of the examples too
    for suffix in (".png", ".svg"):
        block.draw(json.loads(source.read_text()), source.with_suffix(suffix))


def support_states(text: str) -> str:
    """The README's rows on tests/gpu as the committed runs of `make test-gpu` have them."""
    runs = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/tests.json"))]
    return checks_report.support_states(text, runs)


def main(arguments: list[str] | None = None) -> int:
    """Rewrites (or checks) every block whose JSON is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail where a block is out of date"
    )
    check = parser.parse_args(arguments).check
    stale = []
    for document in dict.fromkeys(block.document for block in BLOCKS.values()):
        old = new = (ROOT / document).read_text()
        for block in BLOCKS.values():
            if block.document == document:
                new = filled(new, block)
                drawn = block.sources() if block.draw and not check else []
                for source in drawn:
                    draw_both(block, source)
        new = support_states(new)
        if new != old:
            stale.append(document)
        if not check:
            (ROOT / document).write_text(new)
    if check:
        print(f"out of date: {', '.join(stale)}: run make report" if stale else "up to date")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
