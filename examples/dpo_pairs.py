"""DPO with TRL on pairs of answers to few-shot prompts, replicated and shared: equal losses, fewer tokens.

    python examples/dpo_pairs.py [--prompt-length 1100] [--steps 4] [--model PATH]

A pair is the right answer to a reasoning-gym task and the answer to another task. Both responses share their
prompt, and all prompts of a batch share their worked examples.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset
from grpo.options import add_task_and_model, new_parser, require_at_least_one
from grpo.sampling import load_policy
from grpo.tasks import TaskSource
from grpo.training import unmark_quantized
from transformers import PrinterCallback
from trl import DPOConfig, DPOTrainer

from flash_attn.integrations.trl import SharedPromptDPOTrainer

TRAINERS = {"replicated": DPOTrainer, "shared": SharedPromptDPOTrainer}
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    add_task_and_model(parser)
    parser.add_argument("--num-pairs", type=int, default=2, help="pairs in an optimizer step")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    require_at_least_one(parser, options, "prompt_length", "num_pairs", "steps")
    return options


def pairs(options: argparse.Namespace, tokenizer: Any) -> Dataset:
    """Prompts as text, with the right answer and that of the next task."""
    num_pairs = options.num_pairs * options.steps
    source = TaskSource(options.task, tokenizer, options.prompt_length, num_pairs, options.seed)
    tasks = source.tasks()
    answers = [task.entry["answer"] for task in tasks]
    return Dataset.from_dict({
        "prompt": [tokenizer.decode(task.prompt) for task in tasks],
        "chosen": answers,
        "rejected": [answers[i - 1] if len(answers) > 1 else answers[i][::-1] for i in range(len(answers))],
    })  # fmt: skip


def run(name: str, options: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Trains a copy of `model`; losses and margins per step, tokens and seconds."""
    policy = copy.deepcopy(model)
    arguments = DPOConfig(
        output_dir="out/dpo", save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1,
        max_steps=options.steps, per_device_train_batch_size=options.num_pairs, max_length=None,
        seed=options.seed, learning_rate=options.learning_rate, bf16=options.dtype == "bfloat16",
        use_cpu=options.device == "cpu", gradient_checkpointing=False,
    )  # fmt: skip
    trainer = TRAINERS[name](
        model=policy, ref_model=copy.deepcopy(model), args=arguments, train_dataset=pairs(options, tokenizer),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    begin = time.perf_counter()
    trainer.train()
    if options.device != "cpu":
        torch.cuda.synchronize()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    sharing = getattr(trainer, "sharing", None)
    return {
        "seconds": time.perf_counter() - begin,
        "losses": [entry["loss"] for entry in logs],
        "margins": [entry["rewards/margins"] for entry in logs],
        "tokens": sharing.num_packed_tokens if sharing else None,
        "replicated_tokens": sharing.num_replicated_tokens if sharing else None,
        "fallbacks": dict(sharing.fallbacks) if sharing else {},
    }


def main(arguments: list[str] | None = None) -> int:
    """Trains both ways; exit status 1 where they disagree."""
    options = parse(arguments)
    model, tokenizer, _ = load_policy(
        options.model, getattr(torch, options.dtype), torch.device(options.device)
    )
    unmark_quantized(model)
    results = {name: run(name, options, model, tokenizer) for name in TRAINERS}
    for name, result in results.items():
        losses = " ".join(f"{loss:.5f}" for loss in result["losses"])
        print(
            f"{name:>10}: {result['seconds']:.1f} s, last margin {result['margins'][-1]:.5f}, losses {losses}"
        )
    a, b = results["replicated"], results["shared"]
    if b["fallbacks"]:
        print(f"FAILED: not shared: {b['fallbacks']}", file=sys.stderr)
        return 1
    print(f"tokens through the models: {b['replicated_tokens']:,} replicated, {b['tokens']:,} shared")
    difference = max(abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=True))
    if difference > TOLERANCE[options.dtype]:
        print(f"FAILED: losses differ by {difference:.1e}", file=sys.stderr)
        return 1
    print(f"losses equal within {difference:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
