"""What the command lines of the examples have in common: options of tasks and models, and their checks."""

from __future__ import annotations

import argparse

from .tasks import GENERATORS


def new_parser(docstring: str) -> argparse.ArgumentParser:
    """A parser that says what the script's docstring begins with, and every default."""
    return argparse.ArgumentParser(
        description=docstring.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )


def add_task_and_model(parser: argparse.ArgumentParser) -> None:
    """--task, --prompt-length, --model, --device."""
    parser.add_argument(
        "--task", choices=list(GENERATORS), default="word_sorting", help="generator of reasoning-gym"
    )
    parser.add_argument("--prompt-length", type=int, default=1100, help="tokens of a few-shot prompt, about")
    parser.add_argument(
        "--model", metavar="PATH", help="local Hugging Face folder instead of SmolLM2-135M-Instruct"
    )
    parser.add_argument("--device", default="cpu")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """--num-responses, --max-new-tokens, --temperature."""
    parser.add_argument("--num-responses", type=int, default=8, help="responses to each prompt (N)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="longest response")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="of the samples and of their log-probs"
    )


def require_at_least_one(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """Ends the program, saying why, where one of these options is below 1."""
    for name in names:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")


def check_sampling(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """The options of `add_sampling`."""
    require_at_least_one(parser, options, "max_new_tokens")
    if options.num_responses < 2:
        parser.error(
            f"--num-responses must be at least 2 (advantages compare them), got {options.num_responses}"
        )
    if options.temperature <= 0:
        parser.error(f"--temperature must be above 0, got {options.temperature}")
