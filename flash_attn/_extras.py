"""The ops with ALiBi and dropout, beside those of _ops.py: sequences without contexts.

    torch.ops.flash_attn.fwd_extras -> out, lse            (lse of S with ALiBi, without dropout)
    torch.ops.flash_attn.bwd_extras -> dq, dk, dv
`alibi_slopes` fp32 (H,) or (segments, H); `rng_state` int64 (2,), seed and offset, None without dropout. On
GPUs the library's sm_80 path runs them, on Hopper too; elsewhere _cpu_tiles.py. Called by _calls.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn import _ops
from flash_attn._alibi_dropout import ScoreOptions
from flash_attn._backend import backend
from flash_attn._ops import Batch

MAX_HEAD_DIM = 256

_QKV = "Tensor q, Tensor k, Tensor v"
_BATCH = (
    "Tensor segments, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal, "
    "SymInt window_size_left, SymInt window_size_right, float softcap, bool deterministic, "
    "Tensor? alibi_slopes, float dropout_p, Tensor? rng_state"
)
_FWD = f"fwd_extras({_QKV}, {_BATCH}) -> (Tensor out, Tensor lse)"
_BWD = (
    f"bwd_extras(Tensor dout, Tensor? dlse, {_QKV}, Tensor out, Tensor lse, {_BATCH}) "
    "-> (Tensor dq, Tensor dk, Tensor dv)"
)
_NUM_FWD_ARGS = 15
_library = _ops._library
_library.define(_FWD, tags=torch.Tag.pt2_compliant_tag)
_library.define(_BWD, tags=torch.Tag.pt2_compliant_tag)


class Extras(NamedTuple):
    """The options of one call, as the ops' last arguments."""

    alibi_slopes: Tensor | None
    dropout_p: float
    rng_state: Tensor | None


@torch.library.register_fake("flash_attn::fwd_extras", lib=_library)
def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _ops._fwd_fake(q, k, v, None)


@torch.library.register_fake("flash_attn::bwd_extras", lib=_library)
def _bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def parse(segments: Tensor, *rest: Any) -> tuple[Batch, Extras]:
    """Of the arguments of both ops from `segments` on."""
    return Batch(segments, None, [], *rest[:-3]), Extras(*rest[-3:])


def _forward_in_torch(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from flash_attn import cpu

    batch, extras = parse(*rest)
    options = ScoreOptions(batch.segments, *extras, q.shape[1])
    with torch.autocast(q.device.type, enabled=False):
        return cpu.forward(q, k, v, None, None, batch.segments, *batch[5:10], options=options)


def _backward_in_torch(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    from flash_attn import cpu

    batch, extras = parse(*rest)
    options = ScoreOptions(batch.segments, *extras, q.shape[1])
    with torch.autocast(q.device.type, enabled=False):
        grads = cpu.backward(
            dout, dlse, q, k, v, None, None, out, lse, batch.segments, *batch[5:10], options=options
        )
    return grads[:3]


def _plan(q: Tensor, k: Tensor, batch: Batch) -> list[Tensor]:
    window = (batch.window_size_left, batch.window_size_right)
    return _ops.remembered_plan(batch.segments, q, k, None, batch.causal, window, separate=True)


def _forward_cuda(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if backend(q.device) == "composed":
        return _forward_in_torch(q, k, v, *rest)
    batch, extras = parse(*rest)
    plan = _plan(q, k, batch)
    return torch.ops.flash_attn_cuda.fwd_extras(
        q, k, v, batch.segments, plan, batch.softmax_scale, batch.softcap, *extras
    )


def _backward_cuda(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    if backend(q.device) == "composed":
        return _backward_in_torch(dout, dlse, q, k, v, out, lse, *rest)
    batch, extras = parse(*rest)
    plan = _plan(q, k, batch)
    return torch.ops.flash_attn_cuda.bwd_extras(
        dout, dlse, q, k, v, out, lse, batch.segments, plan, batch.softmax_scale, batch.softcap,
        batch.deterministic, *extras,
    )  # fmt: skip


for _name, _device, _implementation in (
    ("fwd_extras", "cpu", _forward_in_torch),
    ("bwd_extras", "cpu", _backward_in_torch),
    ("fwd_extras", "cuda", _forward_cuda),
    ("bwd_extras", "cuda", _backward_cuda),
):
    torch.library.impl(f"flash_attn::{_name}", _device, lib=_library)(_implementation)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, segments, *ctx.numbers, alibi_slopes, ctx.dropout_p, rng_state = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, segments, alibi_slopes, rng_state)


def _fwd_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, segments, alibi_slopes, rng_state = ctx.saved_tensors
    rest = [None] * (_NUM_FWD_ARGS - 3)
    if dout is None and dlse is None:
        return (None, None, None, *rest)
    if dout is None:
        dout = torch.zeros_like(out)
    _ops.tell_watchers()
    grads = torch.ops.flash_attn.bwd_extras(
        dout, dlse, q, k, v, out, lse, segments, *ctx.numbers, alibi_slopes, ctx.dropout_p, rng_state
    )
    needed = ctx.needs_input_grad[:3]
    return (*(g if n else None for g, n in zip(grads, needed, strict=True)), *rest)


torch.library.register_autograd(
    "flash_attn::fwd_extras", _fwd_backward, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd("flash_attn::bwd_extras", _ops._bwd_backward, lib=_library)
