"""Tiny models with a tokenizer on disk, prompts, rewards, and runs of real TRL trainers that the tests
compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

VOCAB = 61
BASE: dict[str, Any] = {
    "vocab_size": VOCAB + 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"attention_dropout": 0.0},
    "dropout": {"model_type": "llama", "attention_dropout": 0.1},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    # Linear attention mixes rows: refused.
    "qwen3_next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention",
        "full_attention"],
    },
}  # fmt: skip


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
    """The folder of a saved model, made on first use with fixed weights."""
    path = folder / kind
    if not path.exists():
        values = {**BASE, **KINDS[kind]}
        config = AutoConfig.for_model(values.pop("model_type", kind), **values)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            AutoModelForCausalLM.from_config(config).save_pretrained(path)
        tokenizer().save_pretrained(path)
    return str(path)


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
