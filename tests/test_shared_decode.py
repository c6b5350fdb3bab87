"""Decoding of several sequences on one stored prompt, against dense attention on all keys in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flash_attn
from flash_attn import flash_attn_func, flash_attn_shared_prompt_with_kvcache
from flash_attn.layers.rotary import apply_rotary_emb

G, N, P, CAPACITY, H, HK, D = 2, 3, 10, 12, 4, 2, 8
B = G * N
PROMPTS, OWN = [10, 7], [3, 0, 9, 5, 2, 8]


def tensors(seqlen_q: int = 1, new: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = dict(
        q=(B, seqlen_q, H, D), k_prompt=(G, P, HK, D), v_prompt=(G, P, HK, D), k_cache=(B, CAPACITY, HK, D),
        v_cache=(B, CAPACITY, HK, D), k=(B, new, HK, D), v=(B, new, HK, D),
    )  # fmt: skip
    made = {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}
    return made if new else {name: x for name, x in made.items() if name not in "kv"}


def expected(x: dict[str, Tensor], own: list[int], new: int, **options: Any) -> tuple[Tensor, Tensor]:
    results = []
    for b in range(B):
        parts = []
        for kind in "kv":
            rows = [x[f"{kind}_prompt"][b // N, : PROMPTS[b // N]], x[f"{kind}_cache"][b, : own[b]]]
            parts.append(torch.cat([*rows, *([x[kind][b]] if new else [])])[None])
        out, lse, _ = flash_attn_func(x["q"][b : b + 1], *parts, return_attn_probs=True, **options)
        results.append((out, lse))
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def call(x: dict[str, Tensor], **options: Any) -> Any:
    return flash_attn_shared_prompt_with_kvcache(
        **x, prompt_seqlens=torch.tensor(PROMPTS, dtype=torch.int32),
        cache_seqlens=torch.tensor(OWN, dtype=torch.int32), return_softmax_lse=True, **options,
    )  # fmt: skip


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(tuple(found), tuple(wanted), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize(
    ("seqlen_q", "new", "options"),
    [
        (1, 0, {}),
        (1, 1, dict(causal=True)),
        (3, 3, dict(causal=True)),
        (1, 1, dict(softcap=2.0, softmax_scale=0.4)),
    ],
)
def test_ragged_prompts_and_sequences(
    seqlen_q: int, new: int, options: dict[str, Any], num_splits: int
) -> None:
    x = tensors(seqlen_q, new)
    cache = x["k_cache"].clone()
    wanted = expected(x, OWN, new, **options)
    close(call(x, num_splits=num_splits, **options), wanted)
    for b, n in enumerate(OWN if new else []):
        cache[b, n : n + new] = x["k"][b]
    assert torch.equal(x["k_cache"], cache)


def test_rotary_positions_count_through_the_prompt() -> None:
    x = tensors(1, 1)
    angle = torch.randn(P + CAPACITY, D // 2, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    places = torch.tensor([PROMPTS[b // N] + OWN[b] for b in range(B)])
    turned = {n: apply_rotary_emb(x[n], cos, sin, seqlen_offsets=places) for n in "qk"}
    wanted = expected(x | turned, OWN, 1, causal=True)
    close(call(x, causal=True, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False), wanted)


def test_the_output_alone_and_default_lengths() -> None:
    x = tensors()
    found = flash_attn_shared_prompt_with_kvcache(**x)
    assert isinstance(found, Tensor)
    whole = [torch.cat((x[f"{n}_prompt"].repeat_interleave(N, 0), x[f"{n}_cache"]), 1) for n in "kv"]
    torch.testing.assert_close(found, flash_attn_func(x["q"], *whole))
    assert "flash_attn_shared_prompt_with_kvcache" in flash_attn.__all__


@pytest.mark.parametrize("options", [{}, dict(causal=True)])
@pytest.mark.parametrize("batch", [B, 0])
def test_without_queries(batch: int, options: dict[str, Any]) -> None:
    x = {name: t[:batch] if t.shape[0] == B else t for name, t in tensors().items()}
    out, lse = flash_attn_shared_prompt_with_kvcache(
        **x | dict(q=x["q"][:, :0]), return_softmax_lse=True, **options
    )
    assert out.shape == (batch, 0, H, D) and lse.shape == (batch, H, 0)


@pytest.mark.parametrize("rows", [P, 1])
@pytest.mark.parametrize("names", [("k_prompt", "v_prompt"), ("v_prompt",)])
def test_prompts_that_lie_between_each_other(names: tuple[str, ...], rows: int) -> None:
    """They are only read, so that any strides do."""
    x = tensors()
    x |= {name: x[name][:, :rows] for name in ("k_prompt", "v_prompt")}
    wanted = flash_attn_shared_prompt_with_kvcache(**x)
    for name in names:
        x[name] = x[name].transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(flash_attn_shared_prompt_with_kvcache(**x), wanted)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (dict(k_prompt=None), TypeError, "k_prompt must be a tensor, got NoneType"),
        (
            dict(v_prompt=torch.zeros(G, P, HK, 4, dtype=torch.float64)), ValueError,
            r"v_prompt must be \(num_prompts, seqlen_prompt, 2, 8\), got \[2, 10, 2, 4\]",
        ),
        (dict(k_prompt=torch.zeros(G, P, HK, D)), TypeError, "k_prompt must have q's dtype torch.float64"),
        (
            dict(v_prompt=torch.zeros(G, 9, HK, D, dtype=torch.float64)), ValueError,
            r"v_prompt must have k_prompt's \[2, 10\] rows, got \[2, 9\]",
        ),
        (
            {n: torch.zeros(4, P, HK, D, dtype=torch.float64) for n in ("k_prompt", "v_prompt")}, ValueError,
            "q's batch size must be a multiple of the 4 prompts, got 6",
        ),
        (
            dict(prompt_seqlens=torch.tensor([1, 2, 3])), ValueError,
            r"prompt_seqlens must be \(num_prompts,\) = \[2\] on cpu, got \[3\] on cpu",
        ),
        (
            dict(prompt_seqlens=torch.tensor([9.7, 7.0])), TypeError,
            "prompt_seqlens must be an int32 tensor, got torch.float32",
        ),
        (dict(prompt_seqlens=np.array(7.0)), TypeError, "prompt_seqlens must be an int32 .* ndarray"),
        (dict(cache_seqlens=np.array(7.0)), TypeError, "cache_seqlens must be an int32 .* ndarray"),
        (dict(prompt_seqlens=2**70), ValueError, "prompt_seqlens must be an int of 64 bits, got 118"),
        (dict(cache_seqlens=2**70), ValueError, "cache_seqlens must be an int of 64 bits, got 118"),
        (dict(prompt_seqlens="ten"), TypeError, "prompt_seqlens must be an int32 tensor, got str"),
        (
            dict(prompt_seqlens=torch.zeros(G, dtype=torch.int32, device="meta")), ValueError,
            r"prompt_seqlens must be \(num_prompts,\) = \[2\] on cpu, got \[2\] on meta",
        ),
        (
            dict(prompt_seqlens=torch.tensor([1, 11])), ValueError,
            r"prompt_seqlens must be within k_prompt's 10 rows, got \[1, 11\]",
        ),
        (
            dict(causal=True, cache_seqlens=torch.tensor([1, 1, 0, 1, 1, 1])), ValueError,
            r"every sequence must have a key of its own for each of its 1 queries where causal, got",
        ),
        (
            dict(rotary_cos=torch.zeros(30, 4)), ValueError,
            "rotary_cos and rotary_sin must be given together, with k and v",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        flash_attn_shared_prompt_with_kvcache(**{**tensors(), **change})
