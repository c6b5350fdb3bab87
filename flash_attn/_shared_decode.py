"""Decoding of N sequences on one prompt: the prompt's keys and values are stored once and read once a step.

    out = (e^lse_p out_p + e^lse_o out_o) / (e^lse_p + e^lse_o)      p: the prompt's keys, o: a sequence's own
The queries of all sequences on a prompt are rows of the same tiles there. Through the decode kernels
(_decode.py) where they run, else as two calls of _kvcache.with_kvcache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn import _decode, _kvcache, _kvcache_checks, _kvcache_op, checks
from flash_attn._checked import scale_of


def _check_prompts(q: Tensor, k_prompt: Any, v_prompt: Any, k_cache: Tensor, v_cache: Tensor) -> None:
    for name, x, cache in (("k_prompt", k_prompt, k_cache), ("v_prompt", v_prompt, v_cache)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4 or x.shape[2:] != cache.shape[2:]:
            heads, head_dim = cache.shape[2:]
            raise ValueError(
                f"{name} must be (num_prompts, seqlen_prompt, {heads}, {head_dim}), got {list(x.shape)}"
            )
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    if k_prompt.shape[:2] != v_prompt.shape[:2]:
        raise ValueError(
            f"v_prompt must have k_prompt's {list(k_prompt.shape[:2])} rows, got {list(v_prompt.shape[:2])}"
        )
    if k_prompt.shape[0] == 0 or q.shape[0] % k_prompt.shape[0]:
        raise ValueError(
            f"q's batch size must be a multiple of the {k_prompt.shape[0]} prompts, got {q.shape[0]}"
        )


def _check_lengths(prompt: Tensor, capacity: int, own: Tensor, seqlen_q: int, causal: bool) -> None:
    """Where values may be read."""
    if not checks.values_are_read(own):
        return
    if bool(((prompt < 0) | (prompt > capacity)).any()):
        raise ValueError(f"prompt_seqlens must be within k_prompt's {capacity} rows, got {prompt.tolist()}")
    if causal and bool((own < seqlen_q).any()):
        raise ValueError(
            f"every sequence must have a key of its own for each of its {seqlen_q} queries where causal, "
            f"got {own.tolist()} keys"
        )


@torch.no_grad()
def with_kvcache(
    q: Tensor, k_prompt: Tensor, v_prompt: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None,
    v: Tensor | None, rotary_cos: Tensor | None, rotary_sin: Tensor | None,
    prompt_seqlens: int | Tensor | None, cache_seqlens: int | Tensor | None, softmax_scale: float | None,
    causal: bool, softcap: float, rotary_interleaved: bool, num_splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The work of `flash_attn_shared_prompt_with_kvcache`: out (B, Sq, H, Dv) and lse (B, H, Sq)."""
    _kvcache_checks.shapes(q, k_cache, v_cache, k, v, None)
    _kvcache_checks.indices(q, k_cache.shape[0], cache_seqlens, None, None, None)
    _check_prompts(q, k_prompt, v_prompt, k_cache, v_cache)
    checks.options(0.0, softcap, dtype=q.dtype)
    causal, num_splits = checks.flag("causal", causal), _kvcache_checks.num_splits(num_splits)
    batch, seqlen_q = q.shape[:2]
    num_prompts, longest = k_prompt.shape[:2]
    if _kvcache_checks.is_number(prompt_seqlens):
        checks.integer("prompt_seqlens", prompt_seqlens)
    elif prompt_seqlens is not None:
        _kvcache_checks.index("prompt_seqlens", prompt_seqlens, "num_prompts", num_prompts, q.device)
    before = _kvcache.seqlens_of(cache_seqlens, batch, k_cache.shape[1], q.device)
    prompt_lens = _kvcache.seqlens_of(prompt_seqlens, num_prompts, longest, q.device)
    added = 0 if k is None else k.shape[1]
    _check_lengths(prompt_lens, longest, before + added, seqlen_q, causal)
    if rotary_cos is not None and rotary_sin is not None and k is not None:
        _kvcache_checks.tables(rotary_cos, rotary_sin, q, longest + k_cache.shape[1])
        places = prompt_lens.repeat_interleave(batch // num_prompts, output_size=batch) + before
        tables = rotary_cos, rotary_sin, rotary_interleaved, places
        q, k = _kvcache_op.rotate(q, *tables, causal), _kvcache_op.rotate(k, *tables, True)
    elif rotary_cos is not None or rotary_sin is not None:
        raise ValueError("rotary_cos and rotary_sin must be given together, with k and v")
    scale, softcap = scale_of(softmax_scale, q), float(softcap)

    # Kernels read rows of unit stride, and the op k and v at the same places; prompts are only read.
    k_prompt, v_prompt = (x if x.stride(-1) == 1 else x.contiguous() for x in (k_prompt, v_prompt))
    if _decode.usable(q, k_cache, v_cache, None) and k_prompt.numel():
        own = _decode.Keys(k_cache, v_cache, before, added, window=(-1, 0 if causal else -1))
        if k is not None and v is not None:
            _decode.append(own, k, v, None)
        prompt = _decode.Keys(k_prompt, v_prompt, prompt_lens, 0)
        return _decode.decode(q.contiguous(), own, scale, softcap, num_splits, prompt)

    options = (None, None, None, scale)
    more: Any = ((-1, -1), softcap, True, None, num_splits)
    out, lse = _kvcache.with_kvcache(q, k_cache, v_cache, k, v, None, None, before, *options, causal, *more)
    num_sequences = batch // num_prompts
    rows = q.reshape(num_prompts, num_sequences * seqlen_q, *q.shape[2:])
    k_prompt, v_prompt = _kvcache_op.readable(k_prompt, v_prompt)
    out_prompt, lse_prompt = _kvcache.with_kvcache(
        rows, k_prompt, v_prompt, None, None, None, None, prompt_lens, *options, False, *more
    )
    lse_prompt = lse_prompt.unflatten(2, (num_sequences, seqlen_q)).transpose(1, 2).flatten(0, 1)
    merged = torch.logaddexp(lse, lse_prompt)
    parts = ((out, lse), (out_prompt.reshape(out.shape), lse_prompt))
    weights = [(x - merged).exp().masked_fill(merged == -torch.inf, 0.0) for _, x in parts]
    summed = sum(x * w.transpose(1, 2)[..., None] for (x, _), w in zip(parts, weights, strict=True))
    return summed.to(q.dtype), merged  # type: ignore[union-attr]
