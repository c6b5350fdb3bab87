"""Times a policy update and the log-prob passes of veRL's real TrainingWorker, shared and replicated.

    python benchmarks/verl_updates.py --model qwen3-8b --micro-batches 4 8 --out FILE
    torchrun --nproc-per-node 2 benchmarks/verl_updates.py --sp 2 ...  (without --sp: data parallel)

One worker on a model of the named shape and random weights (nothing is read from disk); a mini-batch is
`--num-micro-batches` groups of as many rows as the micro-batch holds, per data-parallel rank. Providers are
this plug-in, and veRL's own path with the attention named. FLOPs are counted from the shapes: `flop_ratio`
is what a replicated pass executes over what the shared one does. --out adds to a file: rows of what is
measured again take the old ones' places.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from needs_gpu import require_gpu  # noqa: E402
from records import merged, read_rows, write_rows  # noqa: E402
from run import environment  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    },
    "tiny-moe": {
        "model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 24,
        "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "rope_theta": 1000000.0,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "rope_theta": 1000000.0,
    },
}  # fmt: skip
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
# Provider -> (shares prompts, attention, FLASH_ATTN_BACKEND).
PROVIDERS = {
    "shared": (True, "dualkv", ""),
    "verl-flash_attention_2": (False, "flash_attention_2", ""),
    "verl-torch-fa2": (False, "flash_attention_2", "composed"),
    "shared-composed": (True, "dualkv", "composed"),
    "verl-dualkv": (False, "dualkv", ""),
    "verl-sdpa": (False, "sdpa", ""),
}
PASSES = ("policy_update", "old_log_prob", "ref_log_prob")


class Cell(NamedTuple):
    """Rows of each micro-batch: a prompt of its own and that prompt's responses."""

    prompt_len: int
    response_lens: tuple[tuple[int, ...], ...]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--prompt-len", type=int, default=8192)
    parser.add_argument("--responses", type=int, nargs=2, default=(131, 2048), help="least and most tokens")
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--num-micro-batches", type=int, default=1, help="per mini-batch and rank")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS)[:3])
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument(
        "--largest",
        nargs="+",
        default=[],
        metavar="PROVIDER:MICRO_BATCH,...",
        help="at the end, of each list, one policy update each until one fits into memory: largest first",
    )
    parser.add_argument("--sp", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new measurement after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def start_processes() -> None:
    """The process group, and the CPU platform where there is no GPU. Before veRL is imported."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "29517"}
    for name, value in {**defaults, "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.set_num_threads(1)  # what Ray and torchrun give a worker
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Where one process alone runs out of memory the others wait for it: not for longer than this.
    limit = timedelta(minutes=5)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=limit)
    if not on_gpu:
        sys.path.insert(0, str(ROOT / "examples" / "verl"))
        import cpu_platform  # noqa: F401


@contextmanager
def random_weights(device: torch.device) -> Iterator[None]:
    """veRL's engine reads its model from disk; here it gets one of random weights, made on the device."""
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.__dict__["from_pretrained"]

    def make(*_: Any, config: Any, torch_dtype: torch.dtype, **__: Any) -> torch.nn.Module:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=torch_dtype)

    AutoModelForCausalLM.from_pretrained = staticmethod(make)
    try:
        yield
    finally:
        AutoModelForCausalLM.from_pretrained = original


class Bench:
    """One worker, whose engine runs veRL's own path or the plug-in's."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device: torch.device | str = "cpu"
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        from transformers import AutoConfig
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import (
            ActorConfig,
            FSDPEngineConfig,
            FSDPOptimizerConfig,
            HFModelConfig,
            TrainingWorkerConfig,
        )
        from verl.workers.engine_workers import TrainingWorker
        from verl.workers.utils.losses import ppo_loss

        values = dict(SHAPES[options.model])
        if options.layers:
            values["num_hidden_layers"] = options.layers
        kind = values.pop("model_type")
        self.config = AutoConfig.for_model(
            kind, **values, max_position_embeddings=65536, tie_word_embeddings=False,
            architectures=[ARCHITECTURES[kind]],
        )  # fmt: skip
        on_gpu = self.device != "cpu"
        low = "bf16" if on_gpu else "fp32"
        self.folder = tempfile.TemporaryDirectory()
        self.config.save_pretrained(self.folder.name)
        model = HFModelConfig(
            path=self.folder.name, load_tokenizer=False, external_lib="flash_attn.integrations.verl",
            override_config={"attn_implementation": "dualkv"}, enable_gradient_checkpointing=True,
        )  # fmt: skip
        engine = FSDPEngineConfig(
            strategy="fsdp2", use_dynamic_bsz=False, use_torch_compile=False, model_dtype=low,
            ulysses_sequence_parallel_size=options.sp, entropy_from_logits_with_chunking=True,
            mixed_precision={"param_dtype": low, "reduce_dtype": low, "buffer_dtype": low},
        )  # fmt: skip
        # States in the weights' own bf16, and a step too small to matter: time is measured, not training.
        optimizer = FSDPOptimizerConfig(
            lr=1e-9, total_training_steps=1000, weight_decay=0.0, override_optimizer_config={"fused": on_gpu}
        )
        with random_weights(torch.device(self.device)):
            self.worker = TrainingWorker(
                TrainingWorkerConfig(
                    model_type="language_model", model_config=model, engine_config=engine,
                    optimizer_config=optimizer, checkpoint_config=CheckpointConfig(),
                )
            )  # fmt: skip
            self.worker.reset()
        gc.collect()
        actor = ActorConfig(strategy="fsdp2", rollout_n=4, ppo_micro_batch_size_per_gpu=4)
        self.worker.set_loss_fn(partial(ppo_loss, config=actor))
        self.engine = self.worker.engine
        self.shared_attention = self.engine.module.config._attn_implementation
        self.num_dp = self.engine.get_data_parallel_size()

    def provider(self, name: str) -> None:
        """What runs from now on."""
        shares, attention, backend = PROVIDERS[name]
        self.engine._shares = shares
        if attention == "dualkv":
            attention = self.shared_attention
        self.engine.module.config._attn_implementation = attention
        os.environ["FLASH_ATTN_BACKEND"] = backend if self.device != "cpu" else ""

    def cells(self, num_rows: int) -> list[Cell]:
        """Response lengths, uniform between the bounds, of each data-parallel rank."""
        low, high = self.options.responses
        shape, found = (self.options.num_micro_batches, num_rows), []
        for rank in range(self.num_dp):
            generator = torch.Generator().manual_seed(self.options.seed + rank)
            lens = torch.randint(low, high + 1, shape, generator=generator).tolist()
            found.append(Cell(self.options.prompt_len, tuple(map(tuple, lens))))
        return found

    def batch(self, cell: Cell) -> Any:
        """Rows as veRL's driver hands them to a worker."""
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu

        generator = torch.Generator().manual_seed(0)

        def ids(n: int) -> torch.Tensor:
            return torch.randint(3, self.config.vocab_size, (n,), generator=generator)

        def nested(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

        pairs = [
            (prompt, ids(r)) for lens in cell.response_lens for prompt in [ids(cell.prompt_len)] for r in lens
        ]
        advantages = [torch.full((len(r),), 1.0 if i % 2 else -1.0) for i, (_, r) in enumerate(pairs)]
        data = TensorDict(
            {
                "prompts": nested([p for p, _ in pairs]),
                "responses": nested([r for _, r in pairs]),
                "input_ids": nested([torch.cat(pair) for pair in pairs]),
                "position_ids": nested([torch.arange(len(p) + len(r)) for p, r in pairs]),
                "response_mask": nested([torch.ones_like(r) for _, r in pairs]),
                "loss_mask": nested([torch.ones_like(r) for _, r in pairs]),
                "advantages": nested(advantages),
                "old_log_probs": nested([torch.full((len(r),), -12.0) for _, r in pairs]),
            },
            batch_size=[len(pairs)],
        )
        rows = len(cell.response_lens[0])
        tu.assign_non_tensor(data, temperature=1.0, micro_batch_size_per_gpu=rows)
        return data

    def passes(self, cell: Cell) -> dict[str, Callable[[], Any]]:
        """Each pass, ready to run: what veRL's driver asks of its actor and reference workers."""
        from verl.utils import tensordict_utils as tu

        batch = self.batch(cell)

        def update() -> None:
            data, rows = batch.copy(), len(batch) * self.num_dp
            tu.assign_non_tensor(
                data, calculate_entropy=False, global_batch_size=rows, mini_batch_size=rows, epochs=1, seed=0,
                dataloader_kwargs={"shuffle": False},
            )  # fmt: skip
            self.worker.train_mini_batch(data)

        def log_probs(entropy: bool) -> None:
            data = batch.copy()
            tu.assign_non_tensor(data, calculate_entropy=entropy, compute_loss=False)
            self.worker.infer_batch(data)

        return {
            "policy_update": update,
            "old_log_prob": lambda: log_probs(True),
            "ref_log_prob": lambda: log_probs(False),
        }

    def timed(self, run: Callable[[], Any]) -> tuple[float, float]:
        """(seconds, peak GiB) of the slowest process."""
        on_gpu = self.device != "cpu"
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        torch.distributed.barrier()
        begin = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        worst = torch.tensor([seconds, peak], device=self.device)
        torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
        return worst[0].item(), worst[1].item()

    def flops(self, cells: list[Cell], name: str, shared: bool) -> float:
        """Executed in one pass by the data-parallel rank with the most, for which the others wait. Forward: 2
        per weight and token, 4 H D per pair of query and key. An update adds backward (2 and 2.5 times as
        much) and runs the layers again (gradient checkpointing). All tokens pass through the LM head."""
        return max(self._flops(cell, name, shared) for cell in cells)

    def _flops(self, cell: Cell, name: str, shared: bool) -> float:
        from flash_attn.shared_prompt.cost_model import GroupLens, num_pairs, num_tokens

        c = self.config
        attention = c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
        mlp = 3 * c.hidden_size * c.intermediate_size
        if getattr(c, "num_experts", 0):
            mlp = c.hidden_size * (3 * c.moe_intermediate_size * c.num_experts_per_tok + c.num_experts)
        groups = [GroupLens(cell.prompt_len, lens) for lens in cell.response_lens]
        tokens = sum(num_tokens(g, shared=shared) for g in groups)
        pairs = sum(num_pairs(g, shared=shared) for g in groups)
        layers, head = c.num_hidden_layers * (attention + mlp) * tokens, c.hidden_size * c.vocab_size * tokens
        scores = c.num_hidden_layers * c.num_attention_heads * c.head_dim * pairs
        if name == "policy_update":
            return 8.0 * layers + 6.0 * head + 18.0 * scores
        return 2.0 * (layers + head) + 4.0 * scores


def plan(
    options: argparse.Namespace, rows: list[dict[str, Any]]
) -> Iterator[tuple[int, str, list[str], int]]:
    """(rows of a micro-batch, provider, passes, repeats) of every measurement, in order. `rows`: what was
    measured so far, which tells whether a micro-batch of `--largest` fitted."""
    for num_rows in options.micro_batches:
        for provider in options.providers:
            yield num_rows, provider, options.passes, options.repeats
    for pair in options.largest:
        provider, _, sizes = pair.partition(":")
        for num_rows in sizes.split(","):
            yield int(num_rows), provider, ["policy_update"], 0
            if "error" not in rows[-1]:
                break


def measure(
    bench: Bench, num_rows: int, provider: str, passes: list[str], repeats: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """A row per pass; `error` instead of a time where memory ran out."""
    options, cells = bench.options, bench.cells(num_rows)
    own = cells[bench.engine.get_data_parallel_rank()]
    bench.provider(provider)
    shares = PROVIDERS[provider][0]
    for name in passes:
        row: dict[str, Any] = {
            "model": options.model, "num_layers": bench.config.num_hidden_layers, "provider": provider,
            "pass": name, "micro_batch": num_rows, "num_micro_batches": options.num_micro_batches,
            "prompt_len": own.prompt_len, "response_lens": [lens for c in cells for lens in c.response_lens],
            "dp": bench.num_dp, "sp": options.sp, "flops": bench.flops(cells, name, shares),
            "flop_ratio": bench.flops(cells, name, False) / bench.flops(cells, name, True),
        }  # fmt: skip
        run, times, peak = bench.passes(own)[name], [], 0.0
        try:
            cold, peak = bench.timed(run)
            while len(times) < repeats and agreed(bench, time.perf_counter() + cold < deadline):
                seconds, peak = bench.timed(run)
                times.append(seconds)
        except torch.OutOfMemoryError as error:
            row["error"] = str(error)[:100]
            yield row
            return
        row.update(
            seconds=statistics.median(times or [cold]), cold_seconds=cold, num_repeats=len(times),
            peak_gib=peak,
        )  # fmt: skip
        yield row


def measured(row: dict[str, Any]) -> str:
    """What a row is a measurement of."""
    names: tuple[str, ...] = ("model", "num_layers", "provider", "pass", "micro_batch", "num_micro_batches")
    names += ("prompt_len", "dp", "sp")
    return json.dumps([row[name] for name in names])


def agreed(bench: Bench, verdict: bool) -> bool:
    """Process 0's verdict, for all."""
    flag = torch.tensor([verdict], dtype=torch.int32, device=bench.device)
    torch.distributed.broadcast(flag, 0)
    return bool(flag.item())


def release(bench: Bench) -> None:
    bench.engine.optimizer_zero_grad()
    gc.collect()
    if bench.device != "cpu":
        torch.cuda.empty_cache()


def print_row(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    label = f"{row['pass']:14} mb {row['micro_batch']:2} dp {row['dp']} sp {row['sp']} {row['provider']:24}"
    if "error" in row:
        print(f"{label} {row['error']}", flush=True)
        return
    same = ("pass", "micro_batch", "num_micro_batches")
    shared = next((r for r in rows if r["provider"] == "shared" and all(r[k] == row[k] for k in same)), None)
    text = f"{label} {row['seconds']:8.3f} s {row['peak_gib']:7.1f} GiB {row['num_repeats']} repeats"
    if shared and "seconds" in shared and not PROVIDERS[row["provider"]][0]:
        ratio = row["seconds"] / shared["seconds"]
        text += f"   {ratio:.2f}x of shared, FLOPs {row['flop_ratio']:.2f}x: {ratio / row['flop_ratio']:.0%}"
    print(text, flush=True)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Times every cell; writes and returns the rows."""
    begin = time.perf_counter()
    options = parse(arguments)
    if not options.model.startswith("tiny"):
        require_gpu("--model tiny")
    start_processes()
    bench = Bench(options)
    is_first = torch.distributed.get_rank() == 0
    facts = environment(bench.device)
    if is_first:
        print(f"ready after {time.perf_counter() - begin:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    before = read_rows(options.out)
    deadline = begin + options.seconds
    for num_rows, provider, passes, repeats in plan(options, rows):
        if rows and not agreed(bench, time.perf_counter() < deadline):
            break
        for row in measure(bench, num_rows, provider, passes, repeats, deadline):
            rows.append({**facts, **row})
            if is_first:
                print_row(row, rows)
            if is_first and options.out:  # after every row: a run that is stopped keeps what it measured
                write_rows(options.out, merged(before, rows, measured))
        release(bench)
    torch.distributed.destroy_process_group()
    return rows


if __name__ == "__main__":
    main()
