"""ALiBi and dropout as explicit tensors for the reference, and the calls under test with a given random
state."""

from __future__ import annotations

from typing import Any

import torch
from numerics import Case
from plan_oracle import varlen_segments
from torch import Tensor

from flash_attn import _calls
from flash_attn._alibi_dropout import keep_below, random_bytes
from flash_attn._extras import Extras


def bias_of(table: Tensor, slopes: Tensor, total_q: int, total_k: int) -> Tensor:
    """-slope |row's position - key's position| in fp64, sequence by sequence: (H, total_q, total_k)."""
    bias = torch.zeros(slopes.shape[-1], total_q, total_k, dtype=torch.float64, device=slopes.device)
    for s, (q_begin, q_end, _, _, k_begin, k_end) in enumerate(table.tolist()):
        rows = torch.arange(q_end - q_begin, device=slopes.device) + (k_end - k_begin) - (q_end - q_begin)
        distance = (rows[:, None] - torch.arange(k_end - k_begin, device=slopes.device)).abs()
        slope = (slopes[s] if slopes.dim() == 2 else slopes).double()
        bias[:, q_begin:q_end, k_begin:k_end] = -slope[:, None, None] * distance
    return bias


def weights_of(
    table: Tensor, dropout_p: float, rng_state: Tensor, num_heads: int, total_q: int, total_k: int
) -> Tensor:
    """M / (1 - p): (H, total_q, total_k) fp64, of the mask in torch."""
    weights = torch.zeros(num_heads, total_q, total_k, dtype=torch.float64, device=rng_state.device)
    for q_begin, q_end, _, _, k_begin, k_end in table.tolist():
        if q_begin == q_end or k_begin == k_end:
            continue
        rows = torch.arange(q_begin, q_end, device=rng_state.device)[None]
        positions = torch.arange(k_end - k_begin, device=rng_state.device)[None]
        found = random_bytes(rng_state, rows, positions, num_heads)[0] < keep_below(dropout_p)
        weights[:, q_begin:q_end, k_begin:k_end] = found.double() / (1.0 - dropout_p)
    return weights


def extras_case(
    q_lens: list[int],
    k_lens: list[int],
    *,
    alibi: str = "",
    dropout_p: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> tuple[Case, Extras]:
    """A varlen case whose reference has the options, and they. `alibi`: "heads", "batch" or ""."""
    segments = varlen_segments(q_lens, k_lens, 0)
    case = Case(segments.tolist(), sum(q_lens), sum(k_lens), seed=seed, **options)
    sizes = (case.total_q, case.total_k)
    slopes = rng_state = None
    if alibi:
        generator = torch.Generator().manual_seed(seed)
        shape = (case.num_heads,) if alibi == "heads" else (len(q_lens), case.num_heads)
        slopes = (torch.rand(shape, generator=generator) * 0.3).to(case.device)
        case.terms["bias"] = bias_of(case.table, slopes, *sizes)
    if dropout_p:
        rng_state = torch.tensor([(seed + 1) * 0x1234567812345678 % (1 << 62), seed], device=case.device)
        case.terms["weights"] = weights_of(case.table, dropout_p, rng_state, case.num_heads, *sizes)
    return case, Extras(slopes, dropout_p, rng_state)


def attend_extras(case: Case, extras: Extras, deterministic: bool = False) -> Any:
    """The op with `extras`, as `numerics.check` wants it."""
    table = case.table.to(case.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _calls.attention(
            q, k, v, None, None, table, None, [], max(case.total_q, 1), max(case.total_k, 1),
            case.softmax_scale, case.causal, case.window_size, case.softcap, None, deterministic, extras,
        )  # fmt: skip

    return attend
