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

import attention_report as attention  # noqa: E402
import checks_report  # noqa: E402
import decode_report  # noqa: E402
import decoder_layer_report as layer_report  # noqa: E402
import gains_report  # noqa: E402
import gemma4_stack as gemma4  # noqa: E402
import kernel_plot  # noqa: E402
import kernel_report  # noqa: E402
import long_context_report  # noqa: E402
import model_update_report as model_report  # noqa: E402
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
    suffix: str = ""  # of the plot's name, where another block draws the same file

    def sources(self) -> list[Path]:
        """The measured files, one a machine."""
        return sorted(RESULTS.glob(self.pattern))

    def plot(self, source: Path, kind: str = ".png") -> Path:
        """The picture of one measured file."""
        return source.with_name(f"{source.stem}{self.suffix}{kind}")


def markdown_table(rows: list[tuple[str, ...]]) -> str:
    """Rows as a table, the first as its head; columns after the first are right-aligned."""
    head, *body = rows
    rule = [":--", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])


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


def of(text: Callable[..., str]) -> Callable[[Any], str]:
    """`text(data, markdown_table)` as a block wants it."""
    return lambda data: text(data, markdown_table)


def gains(demo: dict[str, Any]) -> str:
    """A line from each kind of measurement."""
    return gains_report.text(demo, RESULTS, markdown_table)


def kernels(rows: list[dict[str, Any]]) -> str:
    """The first kernel table, and how the other files' cases of the same GPU ended."""
    others = {}
    for kind, words in (("full", "With fp16 and longer prompts"), ("head_dims", "With other head dims")):
        for path in sorted(RESULTS.glob(f"*/kernels_{kind}.json")):
            found = json.loads(path.read_text())
            if found[0]["gpu"] == rows[0]["gpu"]:
                others[words] = found
    return kernel_report.summary(rows, markdown_table, others)


OWN = "benchmarks/README.md"
BLOCKS = {
    block.name: block
    for block in (
        Block("gains", "cpu/policy_update.json", gains, None),
        # make demo
        Block("policy_update", "cpu/policy_update.json", policy_update, draw_policy_update),
        # run.py (make bench, make bench-full)
        Block("kernels", "*/kernels.json", kernels, kernel_plot.draw),
        Block("kernel_tables", "*/kernels*.json", of(kernel_report.text), kernel_plot.draw, OWN),
        Block("gemma4_layers", "*/gemma4_layers.json", of(kernel_report.layers_text), kernel_plot.draw, OWN),
        # error_growth.py, break_even.py, cpu_attention.py
        Block(
            "error_growth",
            "*/error_growth.json",
            of(attention.error_growth),
            attention.draw_error_growth,
            OWN,
        ),
        Block("break_even", "*/break_even.json", of(attention.break_even), attention.draw_break_even, OWN),
        Block("cpu_attention", "cpu/attention.json", of(attention.cpu_attention), None, OWN),
        # decoder_layer.py, verl_updates.py
        Block("decoder_layer", "*/decoder_layer.json", of(layer_report.text), layer_report.draw, OWN),
        Block("model_update", "*/verl_updates.json", of(model_report.text), model_report.draw, OWN, "_flops"),
        # gemma4_stack.py, decode.py
        Block("gemma4_stack", "*/gemma4_stack.json", of(gemma4.text), gemma4.draw),
        Block("decode", "*/decode.json", of(decode_report.text), None),
        # make test-gpu, tests/gpu/run_sanitizer.py, build_time.py
        Block("gpu_tests", "*/tests*.json", of(checks_report.gpu_tests), None, OWN),
        Block("sanitizer", "*/sanitizer.json", of(checks_report.sanitizer), None, OWN),
        Block("build_time", "cpu/build.json", of(checks_report.build_time), None, OWN),
        # sequence_parallel.py, examples/long_context_sp.py
        Block("sequence_parallel", "*/sequence_parallel.json", of(sp_report.summary), sp_report.draw),
        Block("sequence_parallel_tables", "*/sequence_parallel.json", of(sp_report.text), None, OWN),
        Block(
            "long_context", "*/long_context.json", of(long_context_report.text), long_context_report.draw, OWN
        ),
        # trl_training.py, trl_updates.py
        Block("trl_training", "*/trl_training.json", of(trl_report.training), trl_report.draw_training),
        Block("trl_agreement", "*/trl_training.json", trl_report.agreement_text, None, OWN),
        Block("trl_updates", "*/trl_updates.json", trl_report.summary, trl_report.draw_updates),
        Block("trl_update_tables", "*/trl_updates.json", of(trl_report.updates), None, OWN),
        # verl_updates.py
        Block("verl_updates", "*/verl_updates.json", of(verl_report.text), verl_report.draw),
        Block("verl_passes", "*/verl_updates.json", of(verl_report.passes), None, OWN),
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
            image = block.plot(source).relative_to((ROOT / block.document).parent).as_posix()
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
        block.draw(json.loads(source.read_text()), block.plot(source, suffix))


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
