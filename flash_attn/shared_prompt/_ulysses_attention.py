"""Attention of rows that are spread over ranks: one exchange gives every rank all rows of H / ranks heads.

    send[w] = [q | k | v] of rank w's heads  --all-to-all-->  q, k, v (T, H / ranks, D)  --op-->  out
    out of rank w's rows                     --all-to-all-->  out (T / ranks, H, Dv)
One autograd function, so that q, k and v travel together, with or against the attention of another chunk of
heads, in both directions. Called by `ulysses.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flash_attn import checks
from flash_attn.shared_prompt._exchange import all_to_all, copy_words
from flash_attn.shared_prompt._sharded_layout import ShardedLayout


class Options(NamedTuple):
    """Of the attention op, and whether lse (H, rows) is wanted too."""

    softmax_scale: float
    window_size: tuple[int, int]
    softcap: float
    deterministic: bool
    with_lse: bool


class Heads(NamedTuple):
    """How heads are dealt: chunk c of rank w has query heads [(w n + c) q, ... + q) and as many times `k` of
    the key heads, each of which is sent `repeat` times where its query heads go to several ranks."""

    num_ranks: int
    num_chunks: int
    q: int  # query heads of a rank in a chunk
    k: int  # key heads of a rank in a chunk
    repeat: int

    @classmethod
    def of(cls, num_heads: int, num_heads_k: int, num_ranks: int, num_chunks: int) -> Heads:
        """Raises ValueError where the query heads cannot be dealt evenly."""
        if num_heads % num_ranks:
            raise ValueError(
                f"num_heads must be a multiple of the group's {num_ranks} ranks for method "
                f'"ulysses" ("context" takes any), got {num_heads}'
            )
        own, ratio = num_heads // num_ranks, num_heads // num_heads_k
        together = math.gcd(own, ratio)  # query heads of one key head that always stay on one rank
        own_k = own // together
        num_chunks = math.gcd(num_chunks, own_k)
        return cls(num_ranks, num_chunks, own // num_chunks, own_k // num_chunks, ratio // together)


def _deal(target: torch.Tensor, x: torch.Tensor, heads: Heads, repeat: int) -> None:
    """Writes x (n, heads, d), each head `repeat` times, into target (chunks, ranks, n, width)."""
    num_rows = x.shape[0]
    if repeat > 1:
        x = x.unsqueeze(2).expand(-1, -1, repeat, -1).flatten(1, 2)
    parts = x.reshape(num_rows, heads.num_ranks, heads.num_chunks, target.shape[3])
    copy_words(target, parts.permute(2, 1, 0, 3))


def _collect(parts: Sequence[torch.Tensor], num_rows: int, head_dim: int) -> torch.Tensor:
    """Of each chunk (ranks, n, heads of a rank * d), together (num_rows, heads, d), rows behind n zero."""
    ranks, own_rows, width = parts[0].shape
    whole = parts[0].new_empty(num_rows, ranks, len(parts), width)
    for chunk, part in enumerate(parts):
        copy_words(whole[:own_rows, :, chunk], part.transpose(0, 1))
    whole[own_rows:].zero_()
    return whole.view(num_rows, ranks * len(parts) * width // head_dim, head_dim)


class _Travel:
    """The exchanges of one call: of this rank's rows to everybody's heads, and back."""

    def __init__(self, layout: ShardedLayout, heads: Heads) -> None:
        self.group, self.counts, self.own = layout.sp_group, layout.row_counts, layout.num_own_rows
        self.num_ranks, self.num_chunks = heads.num_ranks, heads.num_chunks

    def to_heads(self, send: torch.Tensor) -> list[tuple[torch.Tensor, Any]]:
        """send (chunks, ranks, own rows, width) -> per chunk (rows of the pack, width), being received."""
        counts = [self.own] * self.num_ranks
        return [all_to_all(part.flatten(0, 1), counts, self.counts, self.group) for part in send.unbind(0)]

    def to_rows(self, send: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """send (rows of the pack, width) of one chunk -> (ranks, own rows, width), being received."""
        counts = [self.own] * self.num_ranks
        received, work = all_to_all(send, self.counts, counts, self.group)
        return received.view(self.num_ranks, self.own, send.shape[1]), work


def _waited(arriving: Sequence[tuple[torch.Tensor, Any]]) -> list[torch.Tensor]:
    for _, work in arriving:
        work.wait()
    return [part for part, _ in arriving]


def _send_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: Heads, travel: _Travel, widths: Sequence[int]
) -> list[tuple[torch.Tensor, Any]]:
    """Starts the exchange of rows [q | k | v], one buffer for all chunks; nothing of it stays behind."""
    send = q.new_empty(heads.num_chunks, heads.num_ranks, travel.own, sum(widths))
    repeats = (1, heads.repeat, heads.repeat)
    for target, x, repeat in zip(send.split(list(widths), 3), (q, k, v), repeats, strict=True):
        _deal(target, x[: travel.own], heads, repeat)
    return travel.to_heads(send)


class _UlyssesAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: ShardedLayout,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        heads = Heads.of(q.shape[1], k.shape[1], layout.sp_group.size(), layout.num_chunks)
        travel = _Travel(layout, heads)
        widths = (heads.q * q.shape[2], heads.k * k.shape[2], heads.k * v.shape[2])
        arriving = _send_qkv(q, k, v, heads, travel, widths)
        arguments = _op_arguments(layout, heads.k, q.shape[2], q.dtype, options)
        saved, outs, lses = [], [], []
        for received, work in arriving:
            work.wait()
            out, lse = torch.ops.flash_attn.fwd(*_as_qkv(received, widths, heads), None, None, *arguments)
            saved += [received, out, lse]
            outs.append(travel.to_rows(out.flatten(1)))
            if options.with_lse:
                lses.append(travel.to_rows(lse.t().contiguous()))
        ctx.save_for_backward(*saved)
        ctx.layout, ctx.options, ctx.heads, ctx.widths = layout, options, heads, widths
        ctx.num_heads_k, ctx.head_dims = k.shape[1], (q.shape[2], v.shape[2])
        ctx.set_materialize_grads(False)
        result = _collect(_waited(outs), layout.num_rows, v.shape[2])
        if not options.with_lse:
            return result, None
        lse_rows = _collect(_waited(lses), layout.num_rows, 1)[:, :, 0]
        return result, lse_rows.masked_fill(layout.is_padding[:, None], -torch.inf)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        checks.no_double_backward("flash_attn")
        layout, heads, widths, saved = ctx.layout, ctx.heads, ctx.widths, ctx.saved_tensors
        travel, own, head_dim_v = _Travel(layout, heads), layout.num_own_rows, ctx.head_dims[1]
        shape = (heads.num_chunks, heads.num_ranks, own)

        def dealt(grad: torch.Tensor | None, like: torch.Tensor, width: int) -> torch.Tensor:
            send = like.new_zeros(*shape, width) if grad is None else like.new_empty(*shape, width)
            if grad is not None:
                _deal(send, grad[:own], heads, 1)
            return send

        arriving = travel.to_heads(dealt(dout, saved[1], heads.q * head_dim_v))
        arriving_lse: list[Any] = [None] * heads.num_chunks
        if ctx.options.with_lse:
            grad_lse = None if dlse is None else dlse[:, :, None]
            arriving_lse = list(travel.to_heads(dealt(grad_lse, saved[2], heads.q)))
        arguments = _op_arguments(layout, heads.k, ctx.head_dims[0], saved[0].dtype, ctx.options)
        grads = []
        for chunk in range(heads.num_chunks):
            received, out, lse = saved[3 * chunk : 3 * chunk + 3]
            dout_heads, work = arriving.pop(0)
            work.wait()
            dlse_heads = None
            if arriving_lse[chunk] is not None:
                arriving_lse[chunk][1].wait()
                dlse_heads = arriving_lse[chunk][0].t().contiguous()
            # Nothing but the list holds dout: it is gone before the gradients are copied.
            given, qkv = [dout_heads.view(out.shape)], _as_qkv(received, widths, heads)
            del dout_heads, work
            grads.append(travel.to_rows(_gradients(given, dlse_heads, qkv, out, lse, arguments)))
        parts = zip(*(part.split(list(widths), 2) for part in _waited(grads)), strict=True)
        dims = (ctx.head_dims[0], ctx.head_dims[0], head_dim_v)
        dq, dk, dv = (_collect(part, layout.num_rows, d) for part, d in zip(parts, dims, strict=True))
        if heads.repeat > 1:
            dk, dv = (_summed(x, ctx.num_heads_k) for x in (dk, dv))
        return dq, dk, dv, None, None


def _gradients(
    dout: list[torch.Tensor],
    dlse: torch.Tensor | None,
    qkv: list[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    arguments: tuple[Any, ...],
) -> torch.Tensor:
    """[dq | dk | dv] of one chunk of heads, (rows of the pack, width). Empties `dout`."""
    found = torch.ops.flash_attn.bwd(dout.pop(), dlse, *qkv, None, None, out, lse, *arguments)
    return torch.cat([grad.flatten(1) for grad in found[:3]], 1)


def _as_qkv(received: torch.Tensor, widths: Sequence[int], heads: Heads) -> list[torch.Tensor]:
    """Views (T, heads, d) of rows [q | k | v]: the kernels take strides."""
    counts = (heads.q, heads.k, heads.k)
    parts = zip(received.split(list(widths), 1), counts, widths, strict=True)
    return [x.unflatten(1, (count, width // count)) for x, count, width in parts]


def _summed(x: torch.Tensor, num_heads_k: int) -> torch.Tensor:
    """Sums over the copies of each key head, in fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.unflatten(1, (num_heads_k, x.shape[1] // num_heads_k)).sum(2, dtype=wide).to(x.dtype)


def _op_arguments(
    layout: ShardedLayout, num_heads_k: int, head_dim: int, dtype: torch.dtype, options: Options
) -> tuple[Any, ...]:
    """What follows k_context, v_context in the op: the whole pack, causal."""
    whole = layout.whole
    plan: list[torch.Tensor] = []
    if whole.device.type == "cuda":
        plan = layout.plan(
            head_dim=head_dim, num_heads_k=num_heads_k, dtype=dtype, window_size=options.window_size
        )
    return (
        whole.segments, whole.segments_host, plan, whole.max_seqlen_q, whole.max_seqlen_k,
        options.softmax_scale, True, *options.window_size, options.softcap, options.deterministic,
    )  # fmt: skip


def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: ShardedLayout, options: Options
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q (num_rows, H, D), k, v (num_rows, Hk, ...) of this rank -> out (num_rows, H, Dv), lse (num_rows, H).

    Head dims as the op wants them. Runs on every rank of the group, forward and backward.
    """
    return _UlyssesAttention.apply(q, k, v, layout, options)
