"""Tiny models with a tokenizer on disk, prompts, rewards, and runs of real TRL trainers that the tests
compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_models
import torch
from datasets import Dataset
from tiny_models import BASE
from transformers import PreTrainedTokenizerFast, TrainerCallback

VOCAB = 61
KINDS = {**tiny_models.KINDS, "dropout": {"model_type": "llama", "attention_dropout": 0.1}}


def tokenizer() -> PreTrainedTokenizerFast:
    """One word, one token: w0 ... w60."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(VOCAB)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model_path(folder: Path, kind: str = "qwen3") -> str:
    """The folder of a saved model and its tokenizer, made on first use with fixed weights."""
    return tiny_models.saved(folder, kind, {**BASE, **KINDS[kind]}, tokenizer())


def prompts(num_prompts: int = 8, longest: int = 24) -> Dataset:
    """Prompts of different lengths; the first two words differ, so no prompt is another's."""
    generator = torch.Generator().manual_seed(3)
    texts = []
    for i in range(num_prompts):
        length = int(torch.randint(6, longest + 1, (), generator=generator))
        texts.append(
            " ".join(f"w{j}" for j in [i, *torch.randint(VOCAB, (length,), generator=generator).tolist()])
        )
    return Dataset.from_dict({"prompt": texts})


def even_words(completions: list[str], **kwargs: Any) -> list[float]:
    """Share of even words, and a little for length: every response earns another reward."""
    rewards = []
    for text in completions:
        numbers = [int(word[1:]) for word in text.split() if word[1:].isdigit()]
        rewards.append(sum(n % 2 == 0 for n in numbers) / max(len(numbers), 1) + 0.01 * len(numbers))
    return rewards


class Steps(TrainerCallback):
    """Keeps the logs of every optimizer step."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.logs.append(dict(logs))


def arguments(out: Path, config_class: type, **changes: Any) -> Any:
    """Six optimizer steps of two micro-batches; dropout 0, KL on, logs at every step. None: left out."""
    values = {
        "output_dir": str(out),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 8,
        "max_steps": 6,
        "learning_rate": 1e-2,
        # Adam divides by |gradient| + epsilon: with 1e-8 a gradient that is 0 but for rounding moves its
        # weight by the whole learning rate, in a random direction.
        "adam_epsilon": 1e-4,
        "beta": 0.05,
        "temperature": 0.9,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 7,
        "gradient_checkpointing": False,
        "bf16": False,
        **changes,
    }
    return config_class(**{name: value for name, value in values.items() if value is not None})


def make(trainer_class: type, args: Any, path: str, **options: Any) -> Any:
    """A trainer on the tiny model, prompts and rewards."""
    return trainer_class(
        model=options.pop("model", path),
        args=args,
        reward_funcs=options.pop("reward", even_words),
        train_dataset=options.pop("dataset", None) or prompts(),
        processing_class=tokenizer(),
        **options,
    )


def train(trainer_class: type, args: Any, path: str, *, resume: Any = None, **options: Any) -> Any:
    """(trainer, logs per step, parameters) after training."""
    steps = Steps()
    trainer = make(trainer_class, args, path, callbacks=[steps], **options)
    trainer.train(resume_from_checkpoint=resume)
    state = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return trainer, steps.logs, state
