"""veRL's real training worker on a CPU: a few GRPO updates of a tiny model, with shared prompts and without.

    python examples/verl/cpu_update.py

Prints tokens, loss and gradient norm of each update both ways: the same numbers from fewer tokens. Rewards
count even tokens; responses come from the model itself, one token at a time.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))
import cpu_platform  # noqa: E402  (before veRL)
import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import (  # noqa: E402
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402
from verl.workers.utils.padding import response_from_nested  # noqa: E402

VOCAB = 128


def make_worker(path: str, shared: bool) -> TrainingWorker:
    """What `actor_rollout_ref` makes of its settings in a worker; `plugin` are the two of the plug-in."""
    plugin = {
        "external_lib": "flash_attn.integrations.verl",
        "override_config": {"attn_implementation": "dualkv"},
    }
    model = plugin if shared else {"override_config": {"attn_implementation": "sdpa"}}
    os.environ["VERL_ENGINE_VENDOR"] = "cpu" if shared else "none"  # here only: both kinds in one process
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=path, load_tokenizer=False, **model),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2", use_dynamic_bsz=False, micro_batch_size_per_gpu=8,
                infer_micro_batch_size_per_gpu=8, use_torch_compile=False, mixed_precision=precision,
            ),
            optimizer_config=FSDPOptimizerConfig(
                lr=3e-3, total_training_steps=100, override_optimizer_config={"eps": 1e-4}
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )  # fmt: skip
    worker.reset()
    actor = ActorConfig(strategy="fsdp2", rollout_n=8, ppo_micro_batch_size_per_gpu=8)
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def rollout(worker: TrainingWorker, prompts: torch.Tensor, num_responses: int, length: int) -> TensorDict:
    """Responses of up to `length` tokens with GRPO's advantages, as veRL's driver hands them over."""
    module = worker.engine.module.eval()
    rows = prompts.repeat_interleave(num_responses, 0)
    with torch.no_grad():
        for _ in range(length):
            logits = module(input_ids=rows, use_cache=False).logits[:, -1]
            rows = torch.cat([rows, torch.multinomial(logits.softmax(-1), 1)], 1)
    responses = [row[prompts.shape[1] : rows.shape[1] - i % length // 2] for i, row in enumerate(rows)]
    rewards = torch.stack([(r % 2 == 0).float().mean() for r in responses]).view(-1, num_responses)
    advantages = ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    own = [a.expand(len(r)).clone() for a, r in zip(advantages, responses, strict=True)]

    def nested(tensors: Any) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)

    whole = [torch.cat([row[: prompts.shape[1]], r]) for row, r in zip(rows, responses, strict=True)]
    masks = nested(torch.ones_like(r) for r in responses)
    batch = TensorDict(
        {
            "prompts": nested(row[: prompts.shape[1]] for row in rows),
            "responses": nested(responses),
            "input_ids": nested(whole),
            "position_ids": nested(torch.arange(len(row)) for row in whole),
            "response_mask": masks,
            "loss_mask": masks,
            "advantages": nested(own),
        },
        batch_size=[len(rows)],
    )
    tu.assign_non_tensor(batch, temperature=1.0, mean_reward=float(rewards.mean()))
    return batch


def update(worker: TrainingWorker, batch: TensorDict) -> dict[str, float]:
    """Old log-probs, then one update of two mini-batches; their means."""
    data = batch.copy()
    tu.assign_non_tensor(data, compute_loss=False)
    log_probs = worker.infer_batch(data)["log_probs"]
    data = batch.copy()
    data["old_log_probs"] = response_from_nested(log_probs, batch["response_mask"])
    rows = len(batch) // 2
    tu.assign_non_tensor(data, global_batch_size=rows, mini_batch_size=rows)
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    tokens = metrics.get("shared_prompt/packed_tokens", [batch["input_ids"].values().numel() / 2])
    return {
        "tokens": float(sum(tokens)) if len(tokens) > 1 else 2 * float(tokens[0]),
        "loss": sum(metrics["loss"]) / 2,
        "grad_norm": sum(metrics["grad_norm"]) / 2,
    }


def main(arguments: list[str] | None = None) -> list[dict[str, dict[str, float]]]:
    """The updates of both ways, on the same rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--response-len", type=int, default=16)
    options = parser.parse_args(arguments)
    logging.disable(logging.INFO)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
        cpu_platform.register_plain_engine()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    found = []
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        workers = {name: make_worker(folder, name == "shared") for name in ("replicated", "shared")}
        for step in range(options.steps):
            prompts = torch.randint(VOCAB, (4, options.prompt_len))
            batch = rollout(workers["replicated"], prompts, 8, options.response_len)
            both = {}
            for name, worker in workers.items():
                begin = time.perf_counter()
                both[name] = update(worker, batch)
                text = ", ".join(f"{k} {v:.6g}" for k, v in both[name].items())
                print(f"step {step} {name:10} {text}, {time.perf_counter() - begin:.2f} s", flush=True)
            found.append(both)
    return found


if __name__ == "__main__":
    main()
