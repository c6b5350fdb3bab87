"""Times one policy update (loss and backward of some groups) in TRL's GRPO trainer, shared and replicated.

    python benchmarks/trl_updates.py --model smollm2-135m --prompt-lens 1024 4096 --out FILE

Real trainers on a random model of the named shape and random tokens; all providers in one process,
interleaved. Both ways run in micro-batches, all of one size, of at most `--max-tokens` tokens: replicated
ones of rows, shared ones of whole groups. Of an update that needs many, `--timed-tokens` are run and the time
is scaled to all rows. Beside each time stands what the planner says after measuring this machine
(`--calibrate SECONDS`; 0: FLOPs).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from needs_gpu import require_gpu  # noqa: E402
from records import read_rows, write_rows  # noqa: E402
from run import environment  # noqa: E402

from flash_attn.shared_prompt.cost_model import CostModel  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128,
    },
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
# Provider -> (trainer, attention).
PROVIDERS = {
    "shared": ("shared", "dualkv"),
    "replicated-sdpa": ("replicated", "sdpa"),
    "replicated-flash_attention_2": ("replicated", "flash_attention_2"),
    "replicated-dualkv": ("replicated", "dualkv"),
}


@dataclass(frozen=True)
class Cell:
    """`num_groups` prompts of `prompt_len` tokens with `num_responses` responses of `response_len` each."""

    prompt_len: int
    num_responses: int
    response_len: int
    num_groups: int = 1

    @property
    def num_rows(self) -> int:
        """Responses of the update."""
        return self.num_groups * self.num_responses


def executed_flops(counted: CostModel, gradient_checkpointing: bool) -> CostModel:
    """FLOPs that run: TRL's LM head computes its logits again in backward (8 per parameter and token instead
    of 6), and so do the layers with checkpointing (attention: 18 H D per pair instead of 14)."""
    layers, pairs = (8 / 6, 18 / 14) if gradient_checkpointing else (1.0, 1.0)
    return dataclasses.replace(
        counted,
        token=counted.token * layers,
        label=counted.label * 8 / 6,
        pair_shared=counted.pair_shared * pairs,
        pair_replicated=counted.pair_replicated * pairs,
    )


class Bench:
    """Both trainers on one model."""

    def __init__(self, options: argparse.Namespace) -> None:
        from tokenizers import Tokenizer, models
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer

        from flash_attn.integrations.trl import SharedPromptGRPOTrainer

        values = dict(SHAPES[options.model])
        config = AutoConfig.for_model(
            values.pop("model_type"), **values, max_position_embeddings=65536, pad_token_id=0, eos_token_id=1
        )
        self.device, self.options = torch.device(options.device), options
        self.vocab_size = config.vocab_size
        with self.device:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
        self.model = model.to(self.device)
        if options.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
        self.folder = tempfile.TemporaryDirectory()
        common = {
            "model": self.model, "reward_funcs": lambda completions, **_: [0.0] * len(completions),
            "processing_class": tokenizer,
        }  # fmt: skip
        arguments = {
            "output_dir": self.folder.name, "report_to": "none", "beta": 0.0, "bf16": False,
            "use_cpu": self.device.type == "cpu", "per_device_train_batch_size": 2, "num_generations": 2,
            "gradient_checkpointing": False,
        }  # fmt: skip
        from datasets import Dataset

        data = Dataset.from_dict({"prompt": ["x"] * 2})
        self.trainers = {
            "replicated": GRPOTrainer(args=GRPOConfig(**arguments), train_dataset=data, **common),
            "shared": SharedPromptGRPOTrainer(args=GRPOConfig(**arguments), train_dataset=data, **common),
        }
        for trainer in self.trainers.values():
            trainer.current_gradient_accumulation_steps = 1
        self.model.train()
        self.cost_model = self.trainers["shared"]._cost_model
        self._least: dict[str, float | None] = {}
        self.flop_model = executed_flops(self.cost_model, options.gradient_checkpointing)

    def calibrate(self, seconds: float) -> None:
        """Measures the planner's cost model."""
        self.model.set_attn_implementation("dualkv")
        self.cost_model = self.trainers["shared"].calibrate(
            max_tokens=self.options.max_tokens, max_seconds=seconds
        )
        # The bench times what it is asked to time: the verdict is only written down.
        self.trainers["shared"]._cost_model = self.flop_model

    def inputs(self, cell: Cell) -> dict[str, torch.Tensor]:
        """The rows of the groups as TRL's trainer has them."""
        generator = torch.Generator().manual_seed(0)

        def ids(*shape: int) -> torch.Tensor:
            return torch.randint(3, self.vocab_size, shape, generator=generator).to(self.device)

        prompt = ids(cell.num_groups, cell.prompt_len).repeat_interleave(cell.num_responses, 0)
        completions = ids(cell.num_rows, cell.response_len)
        return {
            "prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "completion_ids": completions,
            "completion_mask": torch.ones_like(completions),
            "advantages": torch.linspace(-1, 1, cell.num_rows, device=self.device),
            "num_items_in_batch": torch.tensor(float(completions.numel()), device=self.device),
        }  # fmt: skip

    def rows_per_call(self, provider: str, cell: Cell) -> int:
        """Rows of a micro-batch: the most that fit and divide the update's, of a shared one in whole
        groups."""
        rows, tokens = 1, cell.prompt_len + cell.response_len
        if PROVIDERS[provider][0] == "shared":
            rows = cell.num_responses
            tokens = cell.prompt_len - 1 + cell.num_responses * (cell.response_len + 1)
        parts = cell.num_rows // rows
        most = max(self.options.max_tokens // tokens, 1)
        return rows * max(n for n in range(1, parts + 1) if parts % n == 0 and n <= most)

    def timed_rows(self, provider: str, cell: Cell) -> int:
        """Rows of whole micro-batches that are run; the others are as many again of the same shape."""
        rows = self.rows_per_call(provider, cell)
        groups = rows / cell.num_responses if PROVIDERS[provider][0] == "shared" else rows
        calls = max(
            1, round(self.options.timed_tokens / (groups * cell.prompt_len + rows * cell.response_len))
        )
        return min(cell.num_rows, calls * rows)

    def update(self, provider: str, cell: Cell) -> Callable[..., None]:
        """Loss and backward of the timed rows, `update(1)` of its first micro-batch alone."""
        trainer_name, attention = PROVIDERS[provider]
        trainer, inputs = self.trainers[trainer_name], self.inputs(cell)
        rows = self.rows_per_call(provider, cell)
        parts = [
            {k: v[i : i + rows] if v.dim() else v for k, v in inputs.items()}
            for i in range(0, self.timed_rows(provider, cell), rows)
        ]

        def run(num_parts: int | None = None) -> None:
            if self.model.config._attn_implementation != attention:  # a walk over all modules
                self.model.set_attn_implementation(attention)
            for part in parts[:num_parts]:
                trainer._compute_loss(self.model, part).backward()
            self.model.zero_grad(set_to_none=True)
            if trainer_name == "shared" and trainer.sharing.fallbacks:
                raise RuntimeError(f"not shared: {next(iter(trainer.sharing.fallbacks))}")

        return run

    def least_ms(self, provider: str) -> float | None:
        """The time of a micro-batch too small for the GPU to matter: what the host takes to launch one."""
        if provider not in self._least:
            call = self.update(provider, Cell(32, 2, 8))
            try:
                self.model.set_attn_implementation(PROVIDERS[provider][1])
                times = sorted(seconds_of(call, self.device) for _ in range(6))
                self._least[provider] = times[2] * 1e3
            except (RuntimeError, NotImplementedError, ImportError, ValueError):
                self._least[provider] = None  # `measure` says why
        return self._least[provider]


def seconds_of(call: Callable[[], None], device: torch.device) -> float:
    """Wall time of a call with an idle GPU before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def measure(bench: Bench, cell: Cell, providers: list[str]) -> dict[str, dict[str, Any]]:
    """Times of every provider, rounds interleaved; a provider that fails says why instead."""
    found: dict[str, dict[str, Any]] = {name: {"error": None} for name in providers}
    calls = {}
    on_gpu = bench.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    for name in providers:
        call = bench.update(name, cell)
        try:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(bench.device)
            call(1)
            if on_gpu:
                found[name]["peak_gib"] = torch.cuda.max_memory_allocated(bench.device) / 2**30
            calls[name] = call
        except (RuntimeError, NotImplementedError, ImportError, ValueError) as error:
            found[name]["error"] = f"{type(error).__name__}: {error}"[:300]
            bench.model.zero_grad(set_to_none=True)
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()  # as timeit does
    begin = time.perf_counter()
    try:
        for round_ in range(bench.options.repeats):
            for name, call in calls.items():
                bench.model.set_attn_implementation(PROVIDERS[name][1])
                scale = cell.num_rows / bench.timed_rows(name, cell)
                times[name].append(seconds_of(call, bench.device) * scale)
            spent = time.perf_counter() - begin
            if round_ >= 2 and spent * (round_ + 2) / (round_ + 1) > bench.options.cell_seconds:
                break
    finally:
        gc.enable()
    for name, values in times.items():
        ordered = sorted(values)
        at = [ordered[round(share * (len(ordered) - 1))] * 1e3 for share in (0.5, 0.2, 0.8)]
        found[name].update(time_ms=at[0], p20_ms=at[1], p80_ms=at[2], repeats=len(values))
        found[name]["times_ms"] = [round(value * 1e3, 2) for value in values]
        found[name]["timed_rows"] = bench.timed_rows(name, cell)
        found[name]["rows_per_call"] = bench.rows_per_call(name, cell)
    return found


def rows_of(
    bench: Bench, cell: Cell, found: dict[str, dict[str, Any]], about: dict[str, Any]
) -> list[dict[str, Any]]:
    """JSON rows: times beside what FLOPs predict and what the planner says."""
    from flash_attn.shared_prompt.cost_model import GroupLens

    groups = [GroupLens(cell.prompt_len, (cell.response_len,) * cell.num_responses)] * cell.num_groups
    calls = {name: cell.num_rows // bench.rows_per_call(name, cell) for name in ("shared", "replicated-sdpa")}
    flops = {shared: bench.flop_model.cost(groups, shared=shared) for shared in (True, False)}
    config, o = bench.model.config, bench.options
    case = {
        "model": o.model, "N": cell.num_responses, "P": cell.prompt_len, "R": cell.response_len,
        "groups": cell.num_groups,
        "H": config.num_attention_heads, "Hk": config.num_key_value_heads, "dtype": o.dtype,
        "gradient_checkpointing": o.gradient_checkpointing,
    }  # fmt: skip
    common = {
        **about, "case": case, "pass": "update", "predicted_speedup": flops[False] / flops[True],
        "verdict": verdict(bench.cost_model, groups, calls["shared"], calls["replicated-sdpa"]),
        "cost_model": bench.cost_model.as_dict(),
    }  # fmt: skip
    rows = []
    for name, values in found.items():
        shared = PROVIDERS[name][0] == "shared"
        entry = {**common, "provider": f"trl-{name}", "flops": flops[shared], "peak_gib": None, **values}
        entry["least_call_ms"] = bench.least_ms(name)
        if values.get("time_ms"):
            entry["tflops"] = flops[shared] / values["time_ms"] / 1e9
        rows.append(entry)
    return rows


def verdict(cost_model: Any, groups: list[Any], shared_calls: int, replicated_calls: int) -> str:
    """The planner's word on this update, of equal micro-batches."""
    per_call = groups[: len(groups) // shared_calls]
    pays = cost_model.pays(per_call, num_calls=max(1, round(replicated_calls / shared_calls)))
    return "share" if pays else "replicate"


def print_cell(cell: Cell, found: dict[str, dict[str, Any]], row: dict[str, Any]) -> None:
    """One line: times, speed-up, its share of the prediction, and what following the planner costs."""
    times = {name: v["time_ms"] for name, v in found.items() if "time_ms" in v}
    shown = " ".join(f"{name} {ms:.1f} ms" for name, ms in times.items())
    shown += "".join(f" {name}: {v['error'][:60]}" for name, v in found.items() if v["error"])
    name = f"P {cell.prompt_len} N {cell.num_responses} R {cell.response_len} groups {cell.num_groups}"
    line = f"{name}: {shown}"
    replicated = [ms for name, ms in times.items() if name.startswith("replicated")]
    if "shared" in times and replicated:
        speedup = min(replicated) / times["shared"]
        chosen = times["shared"] if row["verdict"] == "share" else min(replicated)
        loss = chosen / min(times["shared"], *replicated) - 1
        line += f" | {speedup:.2f}x, {speedup / row['predicted_speedup']:.0%} of predicted"
        line += f"; planner: {row['verdict']}, {loss:.1%} above the best"
    print(line, flush=True)


def grid(options: argparse.Namespace) -> list[Cell]:
    """All prompt lengths with all numbers of responses."""
    return [
        Cell(p, n, options.response_len, options.groups)
        for p in options.prompt_lens
        for n in options.num_responses
    ]


def as_cell(text: str) -> Cell:
    """P:N:R, or P:N:R:groups."""
    return Cell(*map(int, text.split(":")))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=list(SHAPES), default="smollm2-135m")
    parser.add_argument("--prompt-lens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--num-responses", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--response-len", type=int, default=512)
    parser.add_argument(
        "--cells", type=as_cell, nargs="+", metavar="P:N:R[:G]", help="these instead of the grid"
    )
    parser.add_argument("--groups", type=int, default=1, help="prompts of an update")
    default = ["shared", "replicated-sdpa", "replicated-flash_attention_2"]
    parser.add_argument("--providers", nargs="+", choices=list(PROVIDERS), default=default)
    parser.add_argument(
        "--max-tokens", type=int, default=67584, help="of a micro-batch of either way, at most"
    )
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=7, help="rounds, at most; three at least")
    parser.add_argument("--cell-seconds", type=float, default=60.0, help="of rounds")
    parser.add_argument(
        "--timed-tokens", type=int, default=2**20, help="of an update that run, in whole micro-batches"
    )
    parser.add_argument(
        "--cost-model", type=Path, metavar="FILE", help="calibration: read if there, else made and written"
    )
    parser.add_argument("--calibrate", type=float, default=60.0, metavar="SECONDS", help="0: count FLOPs")
    parser.add_argument("--out", type=Path, help="JSON file; other cells in it stay")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Times every cell; writes and returns the rows."""
    options = parse(arguments)
    if options.device.startswith("cuda"):
        require_gpu("--model tiny --device cpu --dtype float32")
    bench = Bench(options)
    about = environment(bench.device)
    if options.cost_model is not None and options.cost_model.exists():
        bench.cost_model = type(bench.cost_model).from_dict(json.loads(options.cost_model.read_text()))
    elif options.calibrate:
        bench.calibrate(options.calibrate)
        print(f"cost model: {bench.cost_model}")
        if options.cost_model is not None:
            options.cost_model.write_text(json.dumps(bench.cost_model.as_dict()))
    rows: list[dict[str, Any]] = []
    others = read_rows(options.out)
    for cell in options.cells or grid(options):
        found = measure(bench, cell, options.providers)
        new = rows_of(bench, cell, found, about)
        print_cell(cell, found, new[0])
        rows += new
        if options.out:  # after every cell: a run that is stopped keeps what it measured
            new_cases = [row["case"] for row in rows]
            write_rows(options.out, [row for row in others if row["case"] not in new_cases] + rows)
    return rows


if __name__ == "__main__":
    main()
