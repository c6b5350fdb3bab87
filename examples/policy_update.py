"""One GRPO update of a real model, with prompts replicated and with prompts stored once: equal, and faster.

    python examples/policy_update.py [--num-responses 8] [--prompt-length 1100] [--model PATH] [--json FILE]

Samples responses from the model to few-shot tasks, scores them with the tasks' verifier, runs the update
twice and compares. Exit status: 0, or 1 where the two disagree or the rewards teach nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from grpo.compare import TOLERANCES, compare, problems, reward_problems
from grpo.measure import busy, machine
from grpo.options import add_sampling, add_task_and_model, check_sampling, new_parser, require_at_least_one
from grpo.report import as_record, plot, print_table
from grpo.sampling import load_policy, sample, stop_tokens
from grpo.tasks import TaskSource
from grpo.update import VARIANTS, Group, run_update
from tqdm import tqdm

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
WARM_UP_TOKENS = 32


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--num-groups", type=int, default=2, help="prompts")
    add_sampling(parser)
    add_task_and_model(parser)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, default=Path("out/policy_update.png"), help="write a PNG there"
    )
    options = parser.parse_args(arguments)
    require_at_least_one(parser, options, "num_groups", "num_responses", "prompt_length")
    check_sampling(parser, options)
    return options


def roll_out(model: torch.nn.Module, tokenizer: object, options: argparse.Namespace) -> list[Group]:
    """Samples and scores the responses of every prompt."""
    source = TaskSource(options.task, tokenizer, options.prompt_length, options.num_groups, options.seed)
    tasks, stop = source.tasks(), stop_tokens(model, tokenizer)
    print(f"{len(tasks)} {options.task} prompts with {source.num_examples} worked examples each")
    groups = []
    for task in tqdm(tasks, desc="sampling responses", unit="prompt"):
        responses = sample(
            model,
            task.prompt,
            options.num_responses,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            stop_ids=stop,
        )
        groups.append(Group(task.prompt, responses, [source.reward(task, r) for r in responses]))
    for group in groups:
        print(f"  prompt {len(group.prompt)} tokens, rewards {' '.join(f'{r:.2f}' for r in group.rewards)}")
    return groups


def warm_up(model: torch.nn.Module, groups: list[Group], temperature: float) -> None:
    """Both variants once on a few tokens, so that neither pays for first calls."""
    short = [Group(groups[0].prompt[:WARM_UP_TOKENS], groups[0].responses, groups[0].rewards)]
    for name in VARIANTS:
        run_update(name, model, short, temperature, quiet=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs the demonstration and returns the exit status."""
    options = parse(arguments)
    torch.manual_seed(options.seed)
    dtype, device = DTYPES[options.dtype], torch.device(options.device)
    runs_on = machine(device)  # before any work of this program: its load is that of others
    if warning := busy(runs_on):
        print(warning)
    print("loading the model")
    model, tokenizer, name = load_policy(options.model, dtype, device)
    begin = time.perf_counter()
    groups = roll_out(model, tokenizer, options)
    sampling_seconds = time.perf_counter() - begin
    if found := reward_problems(groups):
        return failed(found)
    warm_up(model, groups, options.temperature)
    updates = [run_update(variant, model, groups, options.temperature) for variant in VARIANTS]
    differences, tolerance = compare(*updates), TOLERANCES[dtype]
    case = {k: v for k, v in vars(options).items() if k not in ("json", "plot", "model", "device")} | {
        "model": name
    }
    record = as_record(case, runs_on, groups, updates, differences, tolerance, sampling_seconds)
    print_table(record)
    plot(record, options.plot)
    print(f"plot: {options.plot}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"figures: {options.json}")
    if found := problems(groups, differences, tolerance):
        return failed(found)
    print(f"equal within rounding, and the shared update was {record['speedup']:.1f} times as fast")
    return 0


def failed(found: list[str]) -> int:
    for problem in found:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
