"""Tiny random models of many architectures, a batch of rows, and their log-probs computed one row at a time.

`exact_double` makes fp64 models compute in fp64 throughout: transformers' norms and softmaxes round to fp32
by name, which would hide errors below 1e-6.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BASE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, **MOE},
    "mistral": {"head_dim": 8, "sliding_window": 6},
    "phi3": {},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 6,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Head dims 256 and 512 by layer; the last two layers share the keys of the first two; embeddings per
    # layer.
    "gemma4_text": {
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 67,
        "hidden_size_per_layer_input": 8,
    },
    # The 31B's: five sliding layers to one global one, whose keys and values come from one projection.
    "gemma4_text:31b": {
        "num_hidden_layers": 6,
        "sliding_window": 6,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    # Multi-head latent attention: head dims 24 (keys) and 12 (values).
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    },
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}


def config_of(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    values = {**BASE, **MODELS.get(kind, {}), **changes}
    if kind == "gpt2":
        renamed = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        values = {renamed.get(k, k): v for k, v in values.items()}
        for name in ("intermediate_size", "num_key_value_heads", "max_position_embeddings"):
            values.pop(name, None)
    return AutoConfig.for_model(kind.partition(":")[0], **values)


def model_of(kind: str, attention: str = "eager", seed: int = 0, **changes: Any) -> Any:
    """A tiny random model in eval mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = config_of(kind, **changes)
    # transformers' grouped matmul for experts has no fp64.
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager"
    )
    with torch.no_grad():  # what is initialised to a constant (norms, sinks, biases) should matter too
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


Row = tuple[list[int], list[int]]


@functools.cache
def rows_of_batch() -> tuple[Row, ...]:
    """Rows (prompt, response) of four groups in shuffled order: two prompts that differ in one token, a
    one-token prompt, an empty and a one-token response; prompts and responses longer than the models'
    window."""
    generator = torch.Generator().manual_seed(3)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, 67, (n,), generator=generator).tolist()

    first = tokens(9)
    prompts = [first, [*first[:4], first[4] % 60 + 4, *first[5:]], tokens(5), tokens(1)]
    lengths = [(8, 0, 11), (1, 4), (7, 3), (3,)]
    rows = [(p, tokens(n)) for p, lens in zip(prompts, lengths, strict=True) for n in lens]
    order = torch.randperm(len(rows), generator=generator).tolist()
    return tuple(rows[i] for i in order)


def row_log_probs(model: Any, rows: tuple[Row, ...] = (), **kwargs: Any) -> list[torch.Tensor]:
    """Log-probs of each row's response tokens, one forward per row."""
    found = []
    for prompt, response in rows or rows_of_batch():
        ids = torch.tensor([prompt + response])
        logits = model(input_ids=ids, use_cache=False, **kwargs).logits[0, len(prompt) - 1 : -1]
        log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        found.append(log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0])
    return found


def packed_batch(boundary: str = "fork", rows: tuple[Row, ...] = (), **capacities: int) -> Any:
    from flash_attn.shared_prompt import pack

    prompts, responses = zip(*(rows or rows_of_batch()), strict=True)
    return pack(list(prompts), list(responses), boundary=boundary, **capacities)


def packed_log_probs(model: Any, packed: Any, **kwargs: Any) -> list[torch.Tensor]:
    """The same from one forward of the pack, by its index maps."""
    from flash_attn.integrations.transformers import packed_forward
    from flash_attn.shared_prompt import unpack_responses

    logits = packed_forward(model, packed, **kwargs).logits[0, packed.pred_index]
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return unpack_responses(log_probs.gather(1, packed.labels[:, None])[:, 0], packed)


def loss_of(log_probs: list[torch.Tensor]) -> torch.Tensor:
    """A weighted sum in which no two tokens weigh the same."""
    flat = torch.cat(list(log_probs))
    weights = torch.linspace(-1.0, 1.5, flat.numel(), dtype=flat.dtype, device=flat.device)
    return (flat * weights).sum()


def gradients(model: Any, log_probs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradient of `loss_of` for every parameter that has one; the model's own are cleared."""
    loss_of(log_probs).backward()
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def relative_errors(x: dict[str, torch.Tensor], ref: dict[str, torch.Tensor]) -> dict[str, float]:
    """||x - ref|| / ||ref|| of each parameter, NaN as inf; tiny gradients are measured by the largest one."""
    assert x.keys() == ref.keys()
    floor = 1e-4 * max(r.norm() for r in ref.values())
    errors = {name: (x[name] - r).norm() / torch.maximum(r.norm(), floor) for name, r in ref.items()}
    return {name: float(e.nan_to_num(nan=torch.inf, posinf=torch.inf)) for name, e in errors.items()}


class exact_double(TorchDispatchMode):
    """Within it, fp64 tensors stay fp64 where a model asks for fp32, and positions become fp64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.float32
        if is_cast and args[0].dtype in (torch.float64, torch.int64):
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
