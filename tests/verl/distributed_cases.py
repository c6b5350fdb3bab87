"""What the two processes of `worker.py` run. Each case gives {"plain": ..., "shared": ...} as process 0 saw
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed
from tensordict import TensorDict
from tiny import make_batch, make_worker, model_path, parameters, update
from verl.utils import tensordict_utils as tu

# Sixteen rows; groups of other sizes and lengths.
LENS = [(20, [5, 9, 1, 7]), (13, [8, 3, 6, 12]), (31, [2, 2, 15, 1]), (9, [7, 11, 7, 3])]
DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 86, "infer_max_token_len_per_gpu": 86}


def step(worker: Any, batch: TensorDict, *, ranks: int, num_mini_batches: int) -> dict[str, Any]:
    """Log-probs of this process's rows and an update; {} on processes that return nothing."""
    data = batch.copy()
    tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
    out = worker.infer_batch(data)
    old = batch["response_mask"].values() * -2.0
    for name in ("old_log_probs", "ref_log_prob"):
        batch[name] = torch.nested.nested_tensor_from_jagged(old, batch["response_mask"].offsets())
    metrics = update(worker, batch, ranks=ranks, num_mini_batches=num_mini_batches)
    sharing = getattr(worker.engine, "sharing", None)
    return {
        "log_probs": None if out is None else torch.cat([r[:-1] for r in out["log_probs"].unbind()]),
        "metrics": metrics, "parameters": parameters(worker),
        "sharing": None if sharing is None else vars(sharing),
    }  # fmt: skip


def dp(
    attention: str, folder: Path, rows: list[list[int]], num_mini_batches: int = 2, **options: Any
) -> dict[str, Any]:
    """Two data-parallel ranks with these rows of the batch."""
    worker = make_worker(model_path(folder), attention, **options)
    own = tu.index_select_tensor_dict(make_batch(LENS), rows[torch.distributed.get_rank()])
    return step(worker, own, ranks=2, num_mini_batches=num_mini_batches)


WHOLE = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
# Mini-batches of the same rows as WHOLE's, dealt to the ranks otherwise: every group on both.
SPLIT = [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]]
UNEVEN = [[0, 4, 5, 6, 12, 13, 14, 8], [7, 1, 2, 3, 15, 9, 10, 11]]


def data_parallel(folder: Path) -> dict[str, Any]:
    """The same rows on either rank."""
    return {a: dp(a, folder, WHOLE) for a in ("sdpa", "dualkv")}


def any_partition(folder: Path) -> dict[str, Any]:
    """veRL's engine on groups taken apart against ours on whole groups, and on ones taken apart."""
    return {
        "sdpa": dp("sdpa", folder, SPLIT), "dualkv": dp("dualkv", folder, WHOLE),
        "split": dp("dualkv", folder, SPLIT), "uneven": dp("dualkv", folder, UNEVEN),
    }  # fmt: skip


def dynamic(folder: Path) -> dict[str, Any]:
    """A budget under which one rank needs more forwards than the other."""
    plain = dp("sdpa", folder, WHOLE, num_mini_batches=1, engine={"micro_batch_size_per_gpu": 4})
    return {"sdpa": plain, "dualkv": dp("dualkv", folder, WHOLE, num_mini_batches=1, engine=DYNAMIC)}


def errors(folder: Path) -> dict[str, Any]:
    """One rank has a row above the budget: both raise, and neither waits for the other."""
    limits = {"max_token_len_per_gpu": 44, "infer_max_token_len_per_gpu": 44}
    try:
        dp("dualkv", folder, [WHOLE[1], WHOLE[0]], engine={**DYNAMIC, **limits})
    except ValueError as error:
        return {"error": str(error)}
    return {}


def sp(folder: Path, kind: str = "qwen3", **options: Any) -> dict[str, Any]:
    """Both processes hold half of each pack's rows; veRL's engine, in one process, holds all."""
    results = {}
    for attention in ("sdpa", "dualkv"):
        engine = {"ulysses_sequence_parallel_size": 2 if attention == "dualkv" else 1}
        worker = make_worker(
            model_path(folder, kind), attention, engine={**engine, **options.get("engine", {})},
            **{k: v for k, v in options.items() if k != "engine"},
        )  # fmt: skip
        batch = make_batch(LENS)
        # Without sequence parallelism the two processes are two ranks with the same rows: their mean.
        ranks = worker.engine.get_data_parallel_size()
        results[attention] = step(worker, batch, ranks=ranks, num_mini_batches=2)
    return results


def sequence_parallel(folder: Path) -> dict[str, Any]:
    return sp(folder, model={"enable_gradient_checkpointing": True})


def sequence_parallel_one_key_head(folder: Path) -> dict[str, Any]:
    """Keys and values are repeated: more processes than key heads."""
    return sp(folder, "one_key_head")


def sequence_parallel_fused(folder: Path) -> dict[str, Any]:
    fused = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}
    return sp(folder, model=fused, engine={"pad_to_length": True, "pad_to_length_bucket": 16})


def sequence_parallel_fallback(folder: Path) -> dict[str, Any]:
    """Rows that cannot be shared run through the same attention without a layout."""
    from flash_attn.integrations import _verl_engine

    original = _verl_engine.refusal
    _verl_engine.refusal = lambda data: "a test"
    try:
        return sp(folder)
    finally:
        _verl_engine.refusal = original


def sequence_parallel_critic(folder: Path) -> dict[str, Any]:
    """As `sp`, values instead of log-probs."""
    import critics
    from verl.utils import model as verl_models

    verl_models.load_valuehead_model = critics.load
    results = {}
    for attention, size in (("sdpa", 1), ("dualkv", 2)):
        worker = critics.make_critic(folder, attention, ulysses_sequence_parallel_size=size)
        ranks = worker.engine.get_data_parallel_size()
        values, metrics = critics.step(worker, make_batch(LENS), ranks=ranks)
        results[attention] = {
            "log_probs": values, "metrics": metrics, "parameters": parameters(worker),
            "sharing": vars(worker.engine.sharing),
        }  # fmt: skip
    return results


CASES = {
    case.__name__: case
    for case in (
        data_parallel, any_partition, dynamic, errors, sequence_parallel, sequence_parallel_one_key_head,
        sequence_parallel_fallback, sequence_parallel_fused, sequence_parallel_critic,
    )
}  # fmt: skip
