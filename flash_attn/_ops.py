"""The two ops of this package, their schemas, shapes (fake), gradients and dispatch; everything public ends
here.

    torch.ops.flash_attn.fwd -> out, lse
    torch.ops.flash_attn.bwd -> dq, dk, dv, dk_context, dv_context

`segments` int32 (S, 6): q_begin, q_end, context_begin, context_end, k_begin, k_end describes every mask (see
`flash_attn/_pieces.py`). Call path: flash_attn_interface.py -> here -> cpu.py | composed.py | the compiled
library.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn._backend import backend, is_capturing, stream_of
from flash_attn._by_tensor import ByTensor

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


class Batch(NamedTuple):
    """The arguments of both ops behind the tensors: which rows see which keys, and the options."""

    segments: Tensor
    segments_host: Tensor | None
    plan: list[Tensor]
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    deterministic: bool


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


# Of the functions below: without a context the rows of q, k, v, out, dout and the gradients may stand in two
# dimensions, (batch, seqlen). The library takes them as they are, the other implementations as one.


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.flatten(0, 1)


def _like(x: Tensor, q: Tensor) -> Tensor:
    """x with its rows as q has them."""
    return x if q.dim() == 3 else x.unflatten(0, q.shape[:2])


def forward(
    q: Tensor, k: Tensor, v: Tensor, k_context: Tensor | None, v_context: Tensor | None, batch: Batch
) -> tuple[Tensor, Tensor]:
    """fwd's implementation: the library where there is a plan, else the one for q's device."""
    if batch.plan:
        return torch.ops.flash_attn_cuda.fwd(
            q, k, v, k_context, v_context, batch.segments, batch.plan, batch.softmax_scale, batch.softcap
        )
    from flash_attn import composed, cpu

    tensors = (_rows(q), _rows(k), _rows(v), k_context, v_context)
    with torch.autocast(q.device.type, enabled=False):
        if q.is_cuda:
            out, lse = composed.forward(*tensors, *batch)
        else:
            out, lse = cpu.forward(*tensors, batch.segments, *batch[5:10])
    if q.dim() == 4:  # no view: nobody may write to a view that a Function returns
        out = torch.ops.aten._unsafe_view(out, (*q.shape[:-1], out.shape[-1]))
    return out, lse


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, k_context: Tensor | None,
    v_context: Tensor | None, out: Tensor, lse: Tensor, batch: Batch,
) -> tuple[Tensor, ...]:  # fmt: skip
    """bwd's implementation, as `forward`."""
    if batch.plan:
        return torch.ops.flash_attn_cuda.bwd(
            dout, dlse, q, k, v, k_context, v_context, out, lse, batch.segments, batch.plan,
            batch.softmax_scale, batch.softcap, batch.deterministic,
        )  # fmt: skip
    from flash_attn import composed, cpu

    tensors = (_rows(dout), dlse, _rows(q), _rows(k), _rows(v), k_context, v_context, _rows(out), lse)
    with torch.autocast(q.device.type, enabled=False):
        if q.is_cuda:
            dq, dk, dv, *context = composed.backward(*tensors, *batch)
        else:
            dq, dk, dv, *context = cpu.backward(*tensors, batch.segments, *batch[5:10])
    return _like(dq, q), _like(dk, k), _like(dv, v), *context


def forward_op(
    q: Tensor, k: Tensor, v: Tensor, k_context: Tensor | None, v_context: Tensor | None, batch: Batch
) -> tuple[Tensor, Tensor]:
    """`forward` by torch's dispatch, for whoever watches, traces or rewrites operators."""
    out, lse = torch.ops.flash_attn.fwd(_rows(q), _rows(k), _rows(v), k_context, v_context, *batch)
    return _like(out, q), lse


def backward_op(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, k_context: Tensor | None,
    v_context: Tensor | None, out: Tensor, lse: Tensor, batch: Batch,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`backward` by torch's dispatch."""
    dq, dk, dv, *context = torch.ops.flash_attn.bwd(
        _rows(dout), dlse, _rows(q), _rows(k), _rows(v), k_context, v_context, _rows(out), lse, *batch
    )
    return _like(dq, q), _like(dk, k), _like(dv, v), *context


def _fwd(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, v, k_context, v_context, *batch = args
    return forward(q, k, v, k_context, v_context, planned(Batch(*batch), q, k, k_context))


def _bwd(*args: Any) -> tuple[Tensor, ...]:
    dout, dlse, q, k, v, k_context, v_context, out, lse, *batch = args
    plan = planned(Batch(*batch), q, k, k_context)
    return backward(dout, dlse, q, k, v, k_context, v_context, out, lse, plan)


for _device in ("cpu", "cuda"):
    torch.library.impl("flash_attn::fwd", _device, lib=_library)(_fwd)
    torch.library.impl("flash_attn::bwd", _device, lib=_library)(_bwd)


def tell_watchers() -> None:
    """Whoever counts FLOPs of operators learns those of ours."""
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        from flash_attn import _flops

        _flops.tell_counters()


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
    tell_watchers()
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


class _Plans:
    """The plans that were built for one table of segments, as long as nobody writes to it."""

    __slots__ = ("constant", "kinds", "version")

    def __init__(self, version: int) -> None:
        self.version, self.constant = version, False
        self.kinds: dict[Any, list[Tensor]] = {}


_plans: ByTensor[_Plans] = ByTensor()  # by the segments


def _plans_of(segments: Tensor) -> _Plans:
    known = _plans.get(segments)
    if known is None or known.version != segments._version:
        known = _Plans(segments._version)
        _plans.set(segments, known)
    return known


def never_changes(segments: Tensor) -> None:
    """Graphs captured on the stream where these segments were made need not build their plan again.

    `segments` int32 (S, 6) on a GPU, and kept alive for the graphs by the caller. A graph that is replayed on
    another stream must come behind its warm-up there (a synchronisation or a wait): it reads what that wrote.
    """
    _plans_of(segments).constant = True


def planned(batch: Batch, q: Tensor, k: Tensor, k_context: Tensor | None) -> Batch:
    """`batch` with a plan, where the library runs and the caller gave none."""
    if batch.plan:
        return batch
    window = batch.window_size_left, batch.window_size_right
    plan = remembered_plan(batch.segments, q, k, k_context, batch.causal, window)
    return Batch._make((*batch[:2], plan, *batch[3:]))


def remembered_plan(
    segments: Tensor, q: Tensor, k: Tensor, k_context: Tensor | None, causal: bool, window: tuple[int, int],
    separate: bool = False,
) -> list[Tensor]:  # fmt: skip
    """`plan_tables` of a call, remembered by its segments as long as these do not change."""
    total_context = None if k_context is None else k_context.shape[0]
    # Backward, recompute and other layers with the same table find the plan again. During graph capture only
    # that of segments which never change, built on this stream before: what is captured has not run yet, and
    # is rebuilt at each replay. Inference tensors have no version to tell a change.
    kinds: dict[Any, list[Tensor]] = {}
    capturing = is_capturing(q.device)
    if type(segments) is Tensor and not segments.is_inference():
        plans = _plans_of(segments)
        if plans.constant or not capturing:
            kinds = plans.kinds
    key = (
        q.shape, k.shape, total_context, q.dtype, causal, window, backend(q.device), stream_of(q.device),
        separate,
    )  # fmt: skip
    if key in kinds:
        return kinds[key]
    plan = plan_tables(
        segments, q.shape[:-2].numel(), k.shape[:-2].numel(), total_context, total_context or 0,
        num_heads_k=k.shape[-2], head_dim=q.shape[-1], dtype=q.dtype, causal=causal, window_size=window,
        separate=separate,
    )  # fmt: skip
    if not capturing:
        kinds[key] = plan
    return plan
