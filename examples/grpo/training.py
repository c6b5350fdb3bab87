"""One training run with TRL on reasoning-gym tasks: the trainer, its reward, and a log line for every step.

`shared` picks the trainer class; data, seeds, micro-batches and hyperparameters are the same for both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from flash_attn.integrations.trl import GroupShuffleMixin, SharedPromptGRPOTrainer

from .measure import MIB, machine, peak_bytes, reset_peak
from .sampling import attention, generate_behind_prefix, load_policy
from .tasks import TaskSource

# DAPO: the upper clip is higher, every token weighs the same, no KL, truncated responses teach nothing.
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.2},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "mask_truncated_completions": True},
}
KEPT = (
    "reward", "reward_std", "loss", "grad_norm", "entropy", "completions/mean_length", "num_tokens",
    "shared_prompt/packed_tokens", "shared_prompt/replicated_tokens", "shared_prompt/fallbacks",
)  # fmt: skip


@dataclass(frozen=True)
class RunSettings:
    """What a run depends on. `num_prompts` groups of `num_responses` make an optimizer step.

    Parameters are float32; `dtype` bfloat16 is autocast's, TRL's default on GPUs.
    """

    shared: bool
    loss_type: str = "grpo"
    task: str = "word_sorting"
    prompt_length: int = 1100
    num_prompts: int = 4
    num_responses: int = 8
    max_new_tokens: int = 24
    steps: int = 60
    seed: int = 0
    learning_rate: float = 3e-5
    temperature: float = 1.0
    word_credit: float = 0.0
    model: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    attention: str = "sdpa"
    gradient_checkpointing: bool = False


class PhaseTimes:
    """Mixin: seconds of each phase of a step, waiting for the GPU at its end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = dict.fromkeys(("sampling", "scoring", "rollout", "training"), 0.0)
        super().__init__(*args, **kwargs)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[name] += time.perf_counter() - begin

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self._phase("sampling"):
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self._phase("scoring"):
            return super()._calculate_rewards(*args, **kwargs)

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        with self._phase("rollout"):
            return super()._prepare_inputs(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._phase("training"):
            return super().training_step(*args, **kwargs)


class ReplicatedTrainer(PhaseTimes, GroupShuffleMixin, GRPOTrainer):
    """TRL's own trainer; whole groups in each micro-batch, as the other one has them."""


class SharedTrainer(PhaseTimes, SharedPromptGRPOTrainer):
    """The same with shared prompts."""


class StepLog(TrainerCallback):
    """A progress bar, and one JSON line per optimizer step: metrics, seconds of each phase, tokens/s, peak
    memory."""

    def __init__(self, path: Path, header: dict[str, Any], num_steps: int, quiet: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._write({"run": header})
        self._bar = tqdm(total=num_steps, unit="step", disable=quiet)
        self.trainer: Any = None
        self._begin = 0.0
        self._step: dict[str, Any] = {}
        self._num_tokens = 0.0

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name in self.trainer.seconds:
            self.trainer.seconds[name] = 0.0
        self._peak_before = reset_peak(self.trainer.accelerator.device)
        self._begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        device = self.trainer.accelerator.device
        if device.type == "cuda":
            torch.cuda.synchronize()
        total, seconds = time.perf_counter() - self._begin, self.trainer.seconds
        phases = {
            "sampling": seconds["sampling"],
            "scoring": seconds["scoring"],
            "other rollout": seconds["rollout"] - seconds["sampling"] - seconds["scoring"],
            "policy update": seconds["training"] - seconds["rollout"],
            "optimizer and other": total - seconds["training"],
        }
        peak = peak_bytes(device)
        self._step = {"step": state.global_step, "seconds": total, "phases": phases}
        self._step["peak_mib"] = None if peak is None else peak / MIB

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if not logs or "loss" not in logs:
            return
        entry = {**self._step, **{name: logs[name] for name in KEPT if name in logs}}
        if "num_tokens" in entry:
            entry["tokens_per_second"] = (entry["num_tokens"] - self._num_tokens) / entry["seconds"]
            self._num_tokens = entry["num_tokens"]
        self._write(entry)
        shown = {"reward": f"{entry['reward']:.2f}"} if "reward" in entry else {}
        if "tokens_per_second" in entry:
            shown["tokens/s"] = f"{entry['tokens_per_second']:.0f}"
        shown |= {
            name: f"{s:.1f}s" for name, s in entry["phases"].items() if name in ("sampling", "policy update")
        }
        self._bar.set_postfix(shown)
        self._bar.update()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.close()
        self._file.close()


def unmark_quantized(model: Any) -> None:
    """GGUF weights became plain tensors when they were read, but the model still counts as quantized."""
    if getattr(model, "is_quantized", False) and all(p.is_floating_point() for p in model.parameters()):
        model.is_quantized = False
        model.hf_quantizer = None
        del model.config.quantization_config


def sample_behind_prefix(model: Any) -> None:
    """Both ways sample alike: by SDPA, and what all prompts of a step begin with passes through the model
    once."""
    generate = model.generate

    def sampled(input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        with attention(model, "sdpa"):
            return generate_behind_prefix(generate, model, input_ids, attention_mask, **options)

    model.generate = sampled


def as_dataset(source: TaskSource, tokenizer: Any) -> Dataset:
    """Prompts as text, which TRL encodes again; `entry` is what the verifier needs."""
    tasks = source.tasks()
    texts = [tokenizer.decode(task.prompt) for task in tasks]
    for task, text in zip(tasks, texts, strict=True):
        if tuple(tokenizer(text)["input_ids"]) != task.prompt:
            raise SystemExit("This tokenizer does not give a prompt's tokens back from its text.")
    return Dataset.from_dict({"prompt": texts, "task": list(range(len(tasks)))})


def build_trainer(settings: RunSettings, log: Path, *, quiet: bool = False) -> Any:
    """The trainer of one run, which logs to `log`."""
    device = torch.device(settings.device)
    model, tokenizer, name = load_policy(settings.model, torch.float32, device)
    unmark_quantized(model)
    model.set_attn_implementation(settings.attention)
    sample_behind_prefix(model)
    num_tasks = settings.steps * settings.num_prompts
    source = TaskSource(settings.task, tokenizer, settings.prompt_length, num_tasks, settings.seed)
    tasks = source.tasks()

    def verifier(completion_ids: list[list[int]], task: list[int], **kwargs: Any) -> list[float]:
        rows = zip(task, completion_ids, strict=True)
        return [source.reward(tasks[i], ids, settings.word_credit) for i, ids in rows]

    arguments = GRPOConfig(
        output_dir=str(log.parent / "checkpoints"), save_strategy="no", report_to="none", disable_tqdm=True,
        seed=settings.seed, max_steps=settings.steps, learning_rate=settings.learning_rate,
        lr_scheduler_type="constant", per_device_train_batch_size=settings.num_responses,
        num_generations=settings.num_responses, gradient_accumulation_steps=settings.num_prompts,
        max_completion_length=settings.max_new_tokens, temperature=settings.temperature, logging_steps=1,
        bf16=settings.dtype == "bfloat16", beta=0.0, gradient_checkpointing=settings.gradient_checkpointing,
        use_cpu=device.type == "cpu", **LOSSES[settings.loss_type],
    )  # fmt: skip
    header = {**asdict(settings), "model": name, "machine": machine(device)}
    steps = StepLog(log, header, settings.steps, quiet)
    trainer = (SharedTrainer if settings.shared else ReplicatedTrainer)(
        model=model, args=arguments, reward_funcs=verifier, train_dataset=as_dataset(source, tokenizer),
        processing_class=tokenizer, callbacks=[steps],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    steps.trainer = trainer
    return trainer
