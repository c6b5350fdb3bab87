"""GRPO or DAPO training with TRL on reasoning-gym tasks, prompts shared or replicated, and their curves.

    python examples/grpo_reasoning_gym.py --shared-prompt --seeds 0 1 2
    python examples/grpo_reasoning_gym.py --replicated --seeds 0 1 2
    python examples/grpo_reasoning_gym.py --plot out/grpo/*.jsonl

One run per seed, one JSON line per optimizer step. The two ways differ in the trainer class alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from grpo.curves import draw, print_summary, read, write_json
from grpo.options import add_sampling, add_task_and_model, check_sampling, new_parser, require_at_least_one


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shared-prompt", action="store_true", help="train with SharedPromptGRPOTrainer")
    what.add_argument("--replicated", action="store_true", help="train with TRL's own GRPOTrainer")
    what.add_argument("--plot", nargs="+", type=Path, metavar="LOG", help="draw these logs on one figure")
    parser.add_argument("--figure", type=Path, default=Path("out/grpo/curves.png"), help="where --plot draws")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where --plot puts the logs together")
    parser.add_argument("--loss-type", choices=("grpo", "dapo"), default="grpo")
    add_task_and_model(parser)
    parser.add_argument("--num-prompts", type=int, default=4, help="prompts in an optimizer step")
    add_sampling(parser)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run each")
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument(
        "--word-credit", type=float, default=0.0, help="part of the reward for the right words in any order"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of --replicated")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/grpo"), help="folder of the logs")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    require_at_least_one(parser, options, "num_prompts", "prompt_length", "steps")
    check_sampling(parser, options)
    if not 0 <= options.word_credit <= 1:
        parser.error(f"--word-credit must be in [0, 1], got {options.word_credit}")
    return options


def train(options: argparse.Namespace) -> list[Path]:
    """One run per seed; the logs."""
    from grpo.training import RunSettings, build_trainer

    names = {field.name for field in dataclasses.fields(RunSettings)}
    common = {name: value for name, value in vars(options).items() if name in names - {"seed", "shared"}}
    variant = "shared" if options.shared_prompt else "replicated"
    logs = []
    for seed in options.seeds:
        log = options.out / f"{variant}-{options.loss_type}-seed{seed}.jsonl"
        trainer = build_trainer(
            RunSettings(shared=options.shared_prompt, seed=seed, **common), log, quiet=options.quiet
        )
        trainer.train()
        print(f"log: {log}")
        logs.append(log)
    return logs


def main(arguments: list[str] | None = None) -> None:
    """Trains, or draws."""
    options = parse(arguments)
    if options.plot is None:
        print_summary([read(log) for log in train(options)])
        return
    runs = [read(path) for path in options.plot if path.suffix == ".jsonl"]  # not the folder of checkpoints
    if not runs:
        sys.exit(f"--plot: no .jsonl file among {', '.join(map(str, options.plot))}")
    print_summary(runs)
    draw(runs, options.figure)
    print(f"plot: {options.figure}")
    if options.json is not None:
        write_json(runs, options.json)


if __name__ == "__main__":
    main()
