"""From public arguments to the op: autocast, head dim padding, segments of dense and varlen batches, sinks.

Called by flash_attn_interface.py, _upstream.py and shared_prompt/ulysses.py; runs the op through _eager.py.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict

import torch
from torch import Tensor

from flash_attn import _alibi_dropout, _eager, _extras, _ops, _places, checks
from flash_attn._backend import backend, is_capturing, stream_of
from flash_attn._by_tensor import ByTensor
from flash_attn._checked import Call, checked, op_head_dims, scale_of
from flash_attn._extras import Extras
from flash_attn._ops import Batch

Output = Tensor | tuple[Tensor, Tensor, Tensor]


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under torch.autocast attention runs in autocast's dtype, as F.scaled_dot_product_attention does."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return tensors
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors  # refused by the checks
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def unit_stride_rows(x: Tensor, head_dim: int) -> Tensor:
    """x with a unit last stride, and its head dim padded with zeros to `head_dim`."""
    if x.shape[-1] != head_dim:
        return torch.nn.functional.pad(x, (0, head_dim - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_context: Tensor | None,
    v_context: Tensor | None,
    segments: Tensor,
    segments_host: Tensor | None,
    plan: list[Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
    deterministic: bool,
    extras: Extras | None = None,
) -> tuple[Tensor, Tensor]:
    """Into the op with packed tensors, (total, heads, head_dim); out (total_q, H, Dv), lse (H, total_q)."""
    direct = _eager.is_direct(q, k, v, k_context, v_context, segments, segments_host)
    call = Call(direct, q, v, softmax_scale, causal, window_size, softcap, deterministic)
    batch = Batch(segments, segments_host, plan, max_seqlen_q, max_seqlen_k, *call.options)
    return attend(call, q, k, v, k_context, v_context, batch, sinks, extras)


def attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor, k_context: Tensor | None, v_context: Tensor | None,
    batch: Batch, sinks: Tensor | None = None, extras: Extras | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` of a checked call. Without a context the rows of q, k, v and so of out may stand in two
    dimensions, (batch, seqlen)."""
    if not call.direct:
        checks.no_forward_mode(q, k, v, k_context, v_context, sinks)
        _ops.tell_watchers()
    elif extras is None:
        batch = _ops.planned(batch, q, k, k_context)
    head_dim_v = v.shape[-1]
    if call.padded or not batch.plan:  # the library, whose plan it is, takes any stride
        q, k = unit_stride_rows(q, call.head_dim), unit_stride_rows(k, call.head_dim)
        v = unit_stride_rows(v, call.head_dim_v)
        if k_context is not None and v_context is not None:
            k_context = unit_stride_rows(k_context, call.head_dim)
            v_context = unit_stride_rows(v_context, call.head_dim_v)
    if extras is not None:
        out, lse = torch.ops.flash_attn.fwd_extras(
            *(x.flatten(0, -3) for x in (q, k, v)), batch.segments, *batch[3:], *extras
        )
        out = out.unflatten(0, q.shape[:-2])
    elif call.direct:
        out, lse = _eager.forward(q, k, v, k_context, v_context, batch)
    else:
        out, lse = _ops.forward_op(q, k, v, k_context, v_context, batch)
    if call.head_dim_v != head_dim_v:
        out = out[..., :head_dim_v]
    if sinks is not None:
        out = apply_sinks(out, lse.t(), sinks)
    return out, lse


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Tensor,
    segments_host: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float | None,
    causal: bool, window_size: tuple[int, int], softcap: float, deterministic: bool,
    extras: Extras | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of packed tensors from out and lse (H, total_q), which may be of more keys than k's."""
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    scale = scale_of(softmax_scale, q)
    padded, padded_v = op_head_dims(q, v)
    q, k = unit_stride_rows(q, padded), unit_stride_rows(k, padded)
    v, out, dout = (unit_stride_rows(x, padded_v) for x in (v, out, dout))
    _ops.tell_watchers()
    numbers = (
        max_seqlen_q, max_seqlen_k, scale, checks.flag("causal", causal), *window_size, float(softcap),
        checks.flag("deterministic", deterministic),
    )  # fmt: skip
    if extras is not None:
        lse = lse - public_lse_shift(extras, segments, q, causal, window_size, max_seqlen_k)
        dq, dk, dv = torch.ops.flash_attn.bwd_extras(
            dout, None, q, k, v, out, lse, segments, *numbers, *extras
        )
    else:
        dq, dk, dv, _, _ = torch.ops.flash_attn.bwd(
            dout, None, q, k, v, None, None, out, lse, segments, segments_host, [], *numbers
        )
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim_v]


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """out (..., H, Dv) with one more key per head, of logit sinks[h] and value 0; lse (..., H), sinks (H,).

    It scales every row by sum exp / (sum exp + exp sink). Rows without keys (lse -inf) are 0 under any sink,
    and nothing of their gradient reaches the sinks; a sink of +inf takes all of a row, one of -inf nothing.
    """
    # Masked before the sigmoid: -inf - (-inf) is NaN, and so would be its gradient.
    logit = (lse - sinks.to(lse.dtype)).masked_fill(lse == -torch.inf, -torch.inf)
    return (out * torch.sigmoid(logit)[..., None]).to(out.dtype)


def _no_dropout_mask(out: Tensor) -> Tensor:
    return out.new_empty(0)


def extras_of(
    q: Tensor,
    batch: int,
    dropout_p: float,
    alibi_slopes: Tensor | None,
    softcap: float,
    rng_state: Tensor | None,
) -> Extras | None:
    """The call's ALiBi and dropout, checked, with a new random state unless one is given; None without."""
    if alibi_slopes is None and dropout_p == 0.0:
        return None
    alibi_slopes = checks.alibi_slopes(alibi_slopes, q, batch)
    if q.device.type == "cuda" and q.shape[-1] > _extras.MAX_HEAD_DIM:
        limit = _extras.MAX_HEAD_DIM
        raise NotImplementedError(f"ALiBi and dropout run head_dim <= {limit} on GPUs, got {q.shape[-1]}")
    if dropout_p == 0.0:
        return Extras(alibi_slopes, 0.0, None)
    if softcap > 0.0:
        raise NotImplementedError("dropout with softcap is not supported")
    rng_state = _alibi_dropout.new_state(q.device) if rng_state is None else rng_state
    return Extras(alibi_slopes, float(dropout_p), checks.rng_state(rng_state, q))


def public_lse_shift(
    extras: Extras, segments: Tensor, q: Tensor, causal: bool, window_size: tuple[int, int], max_seqlen_k: int
) -> Tensor | float:
    """What flash-attn's lse (H, total_q) of this call has more than log sum exp S: its causal kernels' bias
    is slope * key's position."""
    left, right = window_size[0], 0 if causal else window_size[1]
    if extras.alibi_slopes is None or right != 0 or 0 <= left < max_seqlen_k:
        return 0.0
    return _alibi_dropout.ScoreOptions(segments, *extras, q.shape[1]).causal_shift(q.shape[0])


def with_probabilities(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, segments: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None, causal: bool, window_size: tuple[int, int], extras: Extras | None,
    probabilities: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out, flash-attn's lse and S_dmask: empty without dropout, else signed probabilities, made for tests."""
    if extras is None:
        return out, lse, _no_dropout_mask(out)
    mask = _no_dropout_mask(out)
    if extras.rng_state is not None and probabilities:
        if torch.compiler.is_compiling():
            raise NotImplementedError("return_attn_probs with dropout needs an eager call: it reads lengths")
        mask = _alibi_dropout.signed_probabilities(
            q.detach(), k.detach(), lse.detach(), _alibi_dropout.ScoreOptions(segments, *extras, q.shape[1]),
            segments.tolist(), max_seqlen_q, max_seqlen_k, scale_of(softmax_scale, q), causal, window_size,
        )  # fmt: skip
    return out, lse + public_lse_shift(extras, segments, q, causal, window_size, max_seqlen_k), mask


def dense_segments(batch: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """The segments of a padded batch, whose rows follow each other."""
    begin = torch.arange(batch, dtype=torch.int32, device=device)
    zero = torch.zeros_like(begin)
    q_begin, k_begin = begin * seqlen_q, begin * seqlen_k
    return torch.stack([q_begin, q_begin + seqlen_q, zero, zero, k_begin, k_begin + seqlen_k], 1)


# (batch, seqlen_q, seqlen_k, device, stream) -> one table, and so one plan, for all calls of a shape on a
# stream: equal batches cost no launches. The least lately used goes first.
_tables: OrderedDict[tuple[object, ...], tuple[Tensor, Tensor | None]] = OrderedDict()
_in_graphs: dict[tuple[object, ...], tuple[Tensor, Tensor | None]] = {}  # kept: nobody says when a graph ends
_tables_lock = threading.Lock()
_MAX_TABLES = 64


def segments_of_dense(batch: int, seqlen_q: int, seqlen_k: int, q: Tensor) -> tuple[Tensor, Tensor | None]:
    """The segments, int32 (batch, 6), of q (batch, seqlen_q, H, D) on its device; on the CPU too where q is
    on a GPU. A graph that is captured keeps what it reads of the remembered ones, once for each shape."""
    sizes, device = (batch, seqlen_q, seqlen_k), q.device

    def make() -> tuple[Tensor, Tensor | None]:
        on_cpu = dense_segments(*sizes, torch.device("cpu")) if device.type == "cuda" else None
        return dense_segments(*sizes, device), on_cpu

    if not _eager.is_direct(q):
        return make()
    key, capturing = (*sizes, device, stream_of(device)), is_capturing(device)
    with _tables_lock:
        known = _tables.get(key) or _in_graphs.get(key)
        if known is not None:
            if capturing:
                _in_graphs[key] = known
            if key in _tables:
                _tables.move_to_end(key)
            return known
    with torch.inference_mode(False):  # a call with gradients may be next
        tables = make()
    if capturing:  # not there yet, and made anew by each replay
        return tables
    _ops.never_changes(tables[0])
    with _tables_lock:
        _tables[key] = tables
        if len(_tables) > _MAX_TABLES:
            _tables.popitem(last=False)
    return tables


# (call, stream, backend) -> the batch of the last such call
_batches: dict[tuple[object, ...], Batch] = {}


def batch_of_dense(call: Call, q: Tensor, k: Tensor) -> Batch:
    """What the op is told about a dense call: of a kind that was seen before one look-up, with the plan."""
    if not call.direct:
        return _new_batch(call, q, k)
    device = q.device
    if is_capturing(device):  # a graph keeps what it reads
        return _new_batch(call, q, k)
    key = (call, stream_of(device), backend(device))
    known = _batches.get(key)
    if known is None:
        known = _ops.planned(_new_batch(call, q, k), q, k, None)
        if len(_batches) >= _MAX_TABLES:
            _batches.clear()
        _batches[key] = known
    return known


def _new_batch(call: Call, q: Tensor, k: Tensor) -> Batch:
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    return Batch(*segments_of_dense(batch, seqlen_q, seqlen_k, q), [], seqlen_q, seqlen_k, *call.options)


def dense(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: tuple[int, int], softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    return_attn_probs: bool, rng_state: Tensor | None = None, probabilities: bool = True,
    casts: bool = True,
) -> Output:  # fmt: skip
    """`casts`: whether in autocast's dtype, where that is on."""
    q, k, v = autocast(q, k, v) if casts else (q, k, v)
    call = checked(q, k, v, 4, dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    extras = extras_of(q, q.shape[0], dropout_p, alibi_slopes, softcap, rng_state)
    batch = batch_of_dense(call, q, k) if extras is None else _new_batch(call, q, k)
    out, lse = attend(call, q, k, v, None, None, batch, None, extras)
    if not return_attn_probs:
        return out
    out, lse, mask = with_probabilities(
        out, lse, q.flatten(0, 1), k.flatten(0, 1), batch.segments, batch.max_seqlen_q, batch.max_seqlen_k,
        softmax_scale, causal, window_size, extras, probabilities,
    )  # fmt: skip
    return out, lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous(), mask


# cu_seqlens_q -> what its segments were made of, and they
_segments: ByTensor[tuple[object, weakref.ref[Tensor], Tensor]] = ByTensor()


def _packed_segments(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, context_seqlen: int) -> Tensor:
    zero = torch.zeros_like(cu_seqlens_q[1:])
    context_end = torch.full_like(zero, context_seqlen) if context_seqlen else zero
    q_begin, q_end, k_begin, k_end = cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:]
    return torch.stack([q_begin, q_end, zero, context_end, k_begin, k_end], 1)


def varlen_segments(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, context_seqlen: int = 0) -> Tensor:
    """Packed sequences' segments: one tensor for all layers that share cu_seqlens; backends remember by it.

    Remembered until cu_seqlens change: on the CPU by their values, on GPUs (where reading them waits) by
    torch's version counter, which sees in-place operations but not writes through `.data`, DLPack or foreign
    kernels.
    """
    # A captured graph must rebuild them at each replay; inference tensors have no version to tell a change.
    capturing = is_capturing(cu_seqlens_q.device)
    plain = type(cu_seqlens_q) is Tensor and type(cu_seqlens_k) is Tensor
    if torch.compiler.is_compiling() or capturing or not plain:
        return _packed_segments(cu_seqlens_q, cu_seqlens_k, context_seqlen)
    if cu_seqlens_q.is_inference() or cu_seqlens_k.is_inference():
        return _packed_segments(cu_seqlens_q, cu_seqlens_k, context_seqlen)
    state: list[object] = [x.tolist() if x.is_cpu else x._version for x in (cu_seqlens_q, cu_seqlens_k)]
    # The stream: another might read what this one has not written yet.
    key = (id(cu_seqlens_k), state, context_seqlen, stream_of(cu_seqlens_q.device))
    known = _segments.get(cu_seqlens_q)
    if known is not None and known[0] == key and known[1]() is cu_seqlens_k:
        return known[2]
    with torch.inference_mode(False):  # a call with gradients may be next
        segments = _packed_segments(cu_seqlens_q, cu_seqlens_k, context_seqlen)
    _segments.set(cu_seqlens_q, (key, weakref.ref(cu_seqlens_k), segments))
    return segments


def check_packed(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None) -> None:
    """q, k, v of packed sequences; k and v in pages are checked where they are gathered."""
    if block_table is None:
        checks.qkv(q, k, v, 3)
    else:
        checks.dims("q", q, 3, "(total_q, num_heads, head_dim)")


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: tuple[int, int], softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    return_attn_probs: bool, block_table: Tensor | None = None, rng_state: Tensor | None = None,
    probabilities: bool = True, leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None,
    names: tuple[str, str, str, str] = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    casts: bool = True,
) -> Output:  # fmt: skip
    q, k, v = autocast(q, k, v) if casts else (q, k, v)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    if block_table is None:
        call = checked(q, k, v, 3, *options)
    else:
        check_packed(q, k, v, block_table)
        checks.options(dropout_p, softcap, window_size, q.dtype)
    max_seqlen_q, max_seqlen_k = checks.length(names[2], max_seqlen_q), checks.length(names[3], max_seqlen_k)
    rows_k = k.shape[0] if block_table is None else 2**31  # the pages' rows are checked one by one
    checks.cu_seqlens_pair(
        (names[0], cu_seqlens_q, q.shape[0], names[2], max_seqlen_q),
        (names[1], cu_seqlens_k, rows_k, names[3], max_seqlen_k),
        q.device,
    )
    placed, given = None, (q, k, v)
    if block_table is not None or leftpad_k is not None or seqused_k is not None:
        k, v, placed = _places.find(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, block_table, leftpad_k, seqused_k
        )
        q = q.detach()
        call = checked(q, k, v, 3, *options)
    extras = extras_of(q, cu_seqlens_q.shape[0] - 1, dropout_p, alibi_slopes, softcap, rng_state)
    segments = varlen_segments(cu_seqlens_q, cu_seqlens_k) if placed is None else placed
    batch = Batch(segments, None, [], max_seqlen_q, max_seqlen_k, *call.options)
    out, lse = attend(call, q, k, v, None, None, batch, None, extras)
    if placed is not None:
        out, lse = _places.forward_only(out, lse, *given)
    if not return_attn_probs:
        return out
    return with_probabilities(
        out, lse, q, k, segments, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, extras,
        probabilities,
    )  # fmt: skip


def unbind(x: Tensor, name: str, count: int, num_dims: int) -> tuple[Tensor, ...]:
    rows = "batch, seqlen" if num_dims == 5 else "total"
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dim() != num_dims or x.shape[-3] != count:
        raise ValueError(f"{name} must be ({rows}, {count}, num_heads, head_dim), got {list(x.shape)}")
    return x.unbind(-3)
