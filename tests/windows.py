"""A shared prompt under sliding windows, and the same by copies: what CPU and GPU tests compare."""

from __future__ import annotations

from typing import Any

import torch
from numerics import Case
from plan_oracle import shared_prompt_segments
from torch import Tensor

PROMPT, RESPONSES = 150, [70, 0, 33, 129]
# Itself alone, shorter than a tile, across the border of prompt and response, longer than everything.
WINDOWS = [(0, 0), (1, 0), (39, 0), (100, 0), (200, 0), (10**6, 0)]


def problem(window_size: tuple[int, int], **options: Any) -> Case:
    segments = shared_prompt_segments([PROMPT], [RESPONSES])
    total = int(segments[-1, 1])
    return Case(segments.tolist(), total, total, window_size=window_size, **options)


def replicated(case: Case, window_size: tuple[int, int]) -> dict[str, Tensor]:
    """out and gradients in fp64: every response behind its own copy of the prompt, through
    F.scaled_dot_product_attention with the window as a mask; gradients of the prompt are sums over copies."""
    leaves = {n: x.detach().double().requires_grad_() for n, x in case.tensors.items()}
    device, outs, at = leaves["q"].device, [], PROMPT
    for index, length in enumerate(RESPONSES):
        rows = torch.cat([torch.arange(PROMPT), torch.arange(at, at + length)]).to(device)
        q, k, v = (leaves[n][rows].transpose(0, 1)[None] for n in ("q", "k", "v"))
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        position = torch.arange(len(rows), device=device)
        distance = position[:, None] - position[None]
        mask = (distance >= 0) & (distance <= window_size[0])
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)
        outs.append(out if index == 0 else out[PROMPT:])
        at += length
    out = torch.cat(outs)
    grads = torch.autograd.grad(out, list(leaves.values()), case.dout.double())
    return {"out": out.detach(), **{"d" + n: g for n, g in zip(leaves, grads, strict=True)}}
