"""What the GPU tests share: running the op on a `numerics.Case` in poisoned memory, and building cases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numerics import Case, check, op
from plan_oracle import shared_prompt_segments, varlen_segments
from torch import Tensor

from flash_attn import _checked, _ops

CUDA = os.environ.get("FLASH_ATTN_TEST_DEVICE", "cuda")  # cpu: debug the tests themselves


@contextmanager
def poisoned() -> Iterator[None]:
    """Whatever torch.empty returns holds NaN (or the largest integer), outputs and scratch alike."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def attend_segments(case: Case, deterministic: bool = False, context_rows: int | None = None) -> Any:
    """The op on the case's segments in poisoned memory. `context_rows` decides the splits."""

    def plan(q: Tensor, k: Tensor, k_context: Tensor | None) -> list[Tensor]:
        if context_rows is None:
            return []
        total_context = None if k_context is None else k_context.shape[0]
        return _ops.plan_tables(
            case.table.to(q.device), q.shape[0], k.shape[0], total_context, context_rows,
            num_heads_k=k.shape[1], head_dim=_checked.kernel_head_dim(q.shape[2]), dtype=q.dtype,
            causal=case.causal, window_size=case.window_size,
        )  # fmt: skip

    attend = op(case, plan=plan, deterministic=deterministic)

    def in_poison(*tensors: Tensor, **named: Tensor) -> tuple[Tensor, Tensor]:
        with poisoned():
            return attend(*tensors, **named)

    return in_poison


def check_case(case: Case, deterministic: bool = False, context_rows: int | None = None) -> None:
    with poisoned():  # the backward's outputs too
        check(case, attend_segments(case, deterministic, context_rows))


def shared_case(prompts: list[int], responses: list[list[int]], pad: int = 0, **options: Any) -> Case:
    """Packed groups, every response on its whole prompt; `pad` rows behind the last."""
    segments = shared_prompt_segments(prompts, responses)
    total = int(segments[-1, 1]) + pad
    return Case(segments.tolist(), total, total, **{**DEFAULTS, **options})


def varlen_case(q_lens: list[int], k_lens: list[int], context: int | None = None, **options: Any) -> Case:
    """Sequences, plain (`context` None) or on a context in tensors of its own."""
    segments = varlen_segments(q_lens, k_lens, context or 0)
    return Case(segments.tolist(), sum(q_lens), sum(k_lens), context, **{**DEFAULTS, **options})


DEFAULTS: dict[str, Any] = dict(
    num_heads=4, num_heads_k=2, head_dim=64, dtype=torch.bfloat16, device=CUDA, with_dlse=True
)
