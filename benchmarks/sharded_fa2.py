"""The baseline of sequence_parallel.py: the replicated batch, its heads exchanged for rows, FlashAttention-2.

Each response carries its own copy of the prompt; N (P + R) rows are spread over the ranks. Same exchanges as
ours, torch's own kernel in the middle (on the CPU its flash kernel for CPUs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn.shared_prompt._sharded_layout import ShardedLayout
from flash_attn.shared_prompt._ulysses_attention import (
    Heads,
    _as_qkv,
    _collect,
    _deal,
    _send_qkv,
    _summed,
    _Travel,
)

aten = torch.ops.aten


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: ShardedLayout, length: int
    ) -> Tensor:
        heads = Heads.of(q.shape[1], k.shape[1], layout.sp_group.size(), 1)
        travel, dim = _Travel(layout, heads), q.shape[2]
        widths = (heads.q * dim, heads.k * dim, heads.k * dim)
        ((received, work),) = _send_qkv(q, k, v, heads, travel, widths)
        work.wait()
        rows = _as_qkv(received, widths, heads)
        out, lse, *rng = _fa2_forward(rows, layout.whole.num_rows, length)
        ctx.save_for_backward(received, out, lse, *rng)
        ctx.layout, ctx.length, ctx.heads, ctx.widths, ctx.dim = layout, length, heads, widths, dim
        ctx.num_heads_k = k.shape[1]
        parts, work = travel.to_rows(out.flatten(1))
        work.wait()
        return _collect([parts], layout.num_rows, dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        received, out, lse, *rng = ctx.saved_tensors
        layout, heads, widths, dim = ctx.layout, ctx.heads, ctx.widths, ctx.dim
        travel, own = _Travel(layout, heads), layout.num_own_rows
        send = dout.new_empty(1, heads.num_ranks, own, heads.q * dim)
        _deal(send, dout[:own], heads, 1)
        ((dout_heads, work),) = travel.to_heads(send)
        work.wait()
        rows = _as_qkv(received, widths, heads)
        grads = _fa2_backward(
            dout_heads.view(out.shape), rows, out, lse, rng, layout.whole.num_rows, ctx.length
        )
        parts, work = travel.to_rows(torch.cat([g.flatten(1) for g in grads], 1))
        work.wait()
        dq, dk, dv = (_collect([x], layout.num_rows, dim) for x in parts.split(widths, 2))
        return dq, _summed(dk, ctx.num_heads_k), _summed(dv, ctx.num_heads_k), None, None


def _bounds(num_rows: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(0, num_rows + 1, length, dtype=torch.int32, device=device)


def _fa2_forward(rows: list[Tensor], num_rows: int, length: int) -> tuple[Tensor, ...]:
    q, k, v = rows
    if q.device.type == "cpu":  # no varlen there: sequences as a batch
        batched = [_batch(x, length, q.shape[1] // x.shape[1]) for x in (q, k, v)]
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*batched, 0.0, True)
        return out.transpose(1, 2).flatten(0, 1), lse
    cu = _bounds(num_rows, length, q.device)
    return aten._flash_attention_forward(q, k, v, cu, cu, length, length, 0.0, True, False)[:4]


def _fa2_backward(
    dout: Tensor, rows: list[Tensor], out: Tensor, lse: Tensor, rng: list[Tensor], num_rows: int, length: int
) -> tuple[Tensor, ...]:
    q, k, v = rows
    if q.device.type == "cpu":
        ratio = q.shape[1] // k.shape[1]
        batched = [_batch(x, length, n) for x, n in ((dout, 1), (q, 1), (k, ratio), (v, ratio), (out, 1))]
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*batched, lse, 0.0, True)
        dq, dk, dv = (g.transpose(1, 2).flatten(0, 1) for g in grads)
        return dq, *(g.unflatten(1, (k.shape[1], ratio)).sum(2) for g in (dk, dv))
    cu = _bounds(num_rows, length, q.device)
    return aten._flash_attention_backward(
        dout, q, k, v, out, lse, cu, cu, length, length, 0.0, True, *rng[:2]
    )


def _batch(x: Tensor, length: int, repeat: int) -> Tensor:
    return x.repeat_interleave(repeat, 1).unflatten(0, (-1, length)).transpose(1, 2)


def fa2_attention(q: Tensor, k: Tensor, v: Tensor, layout: ShardedLayout, length: int) -> Tensor:
    """Causal attention of sequences of `length` rows, spread as `layout`: this rank's rows in and out."""
    return _Replicated.apply(q, k, v, layout, length)
