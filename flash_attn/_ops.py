"""The two ops of this package, their schemas, shapes (fake), gradients and dispatch; everything public ends
here.

    torch.ops.flash_attn.fwd -> out, lse
    torch.ops.flash_attn.bwd -> dq, dk, dv, dk_context, dv_context

`segments` int32 (S, 6): q_begin, q_end, context_begin, context_end, k_begin, k_end describes every mask (see
`flash_attn/_pieces.py`). Call path: flash_attn_interface.py -> here -> cpu.py | composed.py | the compiled
library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flash_attn._backend import backend

_BATCH = (
    "Tensor segments, Tensor? segments_host, Tensor[] plan, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "
    "bool deterministic"
)
_QKV = "Tensor q, Tensor k, Tensor v, Tensor? k_context, Tensor? v_context"
_FWD = f"({_QKV}, {_BATCH}) -> (Tensor out, Tensor lse)"
_BWD = (
    f"(Tensor dout, Tensor? dlse, {_QKV}, Tensor out, Tensor lse, {_BATCH})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dk_context, Tensor dv_context)"
)
_NUM_FWD_ARGS = 16

_library = torch.library.Library("flash_attn", "FRAGMENT")
try:
    _library.define("fwd" + _FWD, tags=torch.Tag.pt2_compliant_tag)
    _library.define("bwd" + _BWD, tags=torch.Tag.pt2_compliant_tag)
except RuntimeError as error:
    raise ImportError(
        "torch.ops.flash_attn.fwd is already defined in this process: another copy of this package, or "
        f"another package with this operator, was imported before {__file__}. Import only one. ({error})"
    ) from error


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@torch.library.register_fake("flash_attn::fwd", lib=_library)
def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, k_context: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    total_q, num_heads, _head_dim = q.shape
    return q.new_empty(total_q, num_heads, v.shape[-1]), q.new_empty(num_heads, total_q, dtype=_lse_dtype(q))


@torch.library.register_fake("flash_attn::bwd", lib=_library)
def _bwd_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_context: Tensor | None,
    v_context: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def dense(x: Tensor | None, like: Tensor) -> Tensor:
        return like.new_empty((0, *like.shape[1:]) if x is None else x.shape)

    return dense(q, q), dense(k, k), dense(v, v), dense(k_context, k), dense(v_context, v)


def _fwd_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    from flash_attn import cpu

    with torch.autocast("cpu", enabled=False):
        return cpu.forward(*args[:6], *args[10:15])


def _bwd_cpu(*args: Any) -> tuple[Tensor, ...]:
    from flash_attn import cpu

    with torch.autocast("cpu", enabled=False):
        return cpu.backward(*args[:10], *args[14:19])


def _fwd_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    if backend(args[0].device) != "composed":
        return torch.ops.flash_attn_cuda.fwd(*_planned(args, 0))
    from flash_attn.composed import forward

    with torch.autocast("cuda", enabled=False):
        return forward(*args)


def _bwd_cuda(*args: Any) -> tuple[Tensor, ...]:
    if backend(args[2].device) != "composed":
        return torch.ops.flash_attn_cuda.bwd(*_planned(args, 2))
    from flash_attn.composed import backward

    with torch.autocast("cuda", enabled=False):
        return backward(*args)


IMPLEMENTATIONS = {
    ("fwd", "cpu"): _fwd_cpu,
    ("bwd", "cpu"): _bwd_cpu,
    ("fwd", "cuda"): _fwd_cuda,
    ("bwd", "cuda"): _bwd_cuda,
}
for (_name, _device), _implementation in IMPLEMENTATIONS.items():
    torch.library.impl(f"flash_attn::{_name}", _device, lib=_library)(_implementation)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, k_context, v_context, segments, segments_host, plan, *ctx.numbers = inputs
    ctx.set_materialize_grads(False)
    ctx.num_plan = len(plan)
    ctx.save_for_backward(q, k, v, k_context, v_context, *output, segments, segments_host, *plan)


def _fwd_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, k_context, v_context, out, lse, segments, segments_host, *plan = ctx.saved_tensors
    rest = [None] * 2 + [[None] * ctx.num_plan] + [None] * (_NUM_FWD_ARGS - 8)
    if dout is None and dlse is None:
        return (None, None, None, None, None, *rest)
    if dout is None:
        dout = torch.zeros_like(out)
    grads = torch.ops.flash_attn.bwd(
        dout, dlse, q, k, v, k_context, v_context, out, lse, segments, segments_host, plan, *ctx.numbers
    )
    return (
        *(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad[:5], strict=True)),
        *rest,
    )


torch.library.register_autograd("flash_attn::fwd", _fwd_backward, setup_context=_setup_context, lib=_library)


def _bwd_backward(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("flash_attn: double backward (a gradient of a gradient) is not supported")


torch.library.register_autograd("flash_attn::bwd", _bwd_backward, lib=_library)


def plan_tables(
    segments: Tensor,
    total_q: int,
    total_k: int,
    total_context: int | None,
    context_rows: int,
    *,
    num_heads_k: int,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    window_size: tuple[int, int],
    forward_only: bool = False,
    separate: bool = False,
) -> list[Tensor]:
    """Tables for the CUDA kernels, built on the GPU without a sync; [] where another backend runs.

    [row_span (total_q, 4), block_span (ceil(total_q / 64), 8), query_items (n, 12), key_items (m, 8)], int32.
    `total_context` None: context intervals are rows of k itself. `context_rows`: about how many rows contexts
    have in all; it and `num_heads_k` decide how far the backward splits short contexts. `forward_only`:
    key_items is left empty. `separate`: for ALiBi and dropout, where no tile may hold two segments; for the
    kernels of the sm_80 path.
    """
    if segments.device.type != "cuda" or backend(segments.device) == "composed":
        return []
    backend(segments.device, head_dim=head_dim, dtype=dtype)  # refuses what has no kernel
    if separate:
        _refuse_missing_extras(segments.device, head_dim, dtype)
    return list(
        torch.ops.flash_attn_cuda.plan(
            segments,
            total_q,
            total_k,
            total_context,
            context_rows,
            num_heads_k,
            head_dim,
            dtype,
            causal,
            *window_size,
            forward_only,
            *([True] if separate else []),
        )
    )


def _refuse_missing_extras(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    if not hasattr(torch.ops.flash_attn_cuda, "fwd_extras"):
        raise NotImplementedError("the compiled library has no kernels with ALiBi and dropout: build it anew")
    index = torch.cuda.current_device() if device.index is None else device.index
    missing = torch.ops.flash_attn_cuda.unsupported(index, head_dim, dtype, True)
    if missing:
        raise NotImplementedError(missing)


def plan_for(
    layout: Any,
    *,
    num_heads_k: int,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> list[Tensor]:
    """`plan_tables` of a packed shared-prompt layout (`layout.plan` caches the result)."""
    # Table sizes must not change within capacities (CUDA graphs), so that there the capacity decides.
    context_rows = layout.num_rows if layout.capacities else sum(layout.prompt_lens)
    return plan_tables(
        layout.segments, layout.num_rows, layout.num_rows, None, context_rows,
        num_heads_k=num_heads_k, head_dim=head_dim, dtype=dtype, causal=causal, window_size=window_size,
    )  # fmt: skip


_plans = WeakIdKeyDictionary()  # segments -> (their version, plans built for it)
_constant = WeakIdKeyDictionary()  # segments that nobody writes to


def never_changes(segments: Tensor) -> None:
    """Graphs captured on the stream where these segments were made need not build their plan again.

    `segments` int32 (S, 6) on a GPU, and kept alive for the graphs by the caller. A graph that is replayed on
    another stream must come behind its warm-up there (a synchronisation or a wait): it reads what that wrote.
    """
    _constant[segments] = True


def _planned(args: tuple[Any, ...], first: int) -> tuple[Any, ...]:
    """The op's arguments with a plan where the caller gave none; q, k, v, k_context stand at `first`, `first`
    + 1, ..."""
    batch = len(args) - 11
    if args[batch + 2]:
        return args
    q, k, _, k_context = args[first : first + 4]
    plan = remembered_plan(args[batch], q, k, k_context, args[batch + 6], args[batch + 7 : batch + 9])
    return (*args[: batch + 2], plan, *args[batch + 3 :])


def remembered_plan(
    segments: Tensor, q: Tensor, k: Tensor, k_context: Tensor | None, causal: bool, window: tuple[int, int],
    separate: bool = False,
) -> list[Tensor]:  # fmt: skip
    """`plan_tables` of a call, remembered by its segments as long as these do not change."""
    total_context = None if k_context is None else k_context.shape[0]
    # Backward, recompute and other layers with the same table find the plan again. During graph capture only
    # that of segments which never change, built on this stream before: what is captured has not run yet, and
    # is rebuilt at each replay. Inference tensors have no version to tell a change.
    plans: dict[Any, list[Tensor]] = {}
    plain = type(segments) is Tensor and not segments.is_inference()
    capturing = torch.cuda.is_current_stream_capturing()
    if capturing and segments in _constant:
        _, plans = _plans.get(segments, (0, plans))
    elif plain and not capturing:
        version, plans = _plans.get(segments, (segments._version, plans))
        if version != segments._version:
            plans = {}
        _plans[segments] = segments._version, plans
    stream = torch.cuda.current_stream(segments.device).cuda_stream
    key = (q.shape, k.shape, total_context, q.dtype, causal, window, backend(q.device), stream, separate)
    if key in plans:
        return plans[key]
    plan = plan_tables(
        segments, q.shape[0], k.shape[0], total_context, total_context or 0, num_heads_k=k.shape[1],
        head_dim=q.shape[2], dtype=q.dtype, causal=causal, window_size=window, separate=separate,
    )  # fmt: skip
    if not capturing:
        plans[key] = plan
    return plan
