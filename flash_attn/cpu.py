"""Exact attention over segments on the CPU, forward and backward, in O(T H D) memory.

    per piece of the mask (_pieces.py):  o = softmax(q k^T * scale) v,  l = log sum exp
    merged:    out = sum_i o_i exp(l_i - lse),  lse = log sum_i exp(l_i)
    backward:  per piece, with the merged out and lse,
               P = exp(S - lse),  dS = P (dout v^T - rowsum(dout * out) + dlse)

Rectangles and triangles run on torch's CPU flash kernels; narrow bands, softcap and whatever has NaN or
infinite scores on _cpu_tiles.py. fp16 and bf16 are computed in fp32: torch's own half-precision backward
rounds dk and dv once per block of rows. Called by _ops.py; with ALiBi or dropout (`options`, all of it on
_cpu_tiles.py, on any device) by _extras.py.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flash_attn import _cpu_tiles
from flash_attn._alibi_dropout import ScoreOptions
from flash_attn._pieces import Kind, Table, bands, check_table, cut, runs
from flash_attn._rows import RaggedRows, Rows, Work, work_of

aten = torch.ops.aten
_flash = aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward


@functools.lru_cache(maxsize=1)
def _kernel_knows_gqa() -> bool:
    """Whether torch's kernels take fewer key heads than query heads, and sum dk and dv over a group's query
    heads."""
    q = torch.ones(1, 2, 1, 8)
    heads = torch.arange(2.0)[None, :, None, None].expand(1, 2, 1, 8).contiguous()
    k = heads[:, :1]  # zeros; ones lie behind them, where a kernel of one key head a query head would read
    try:
        out, lse = _flash(q, k, k, 0.0, False)
        grad = _flash_backward(q, q, k, k, out, lse, 0.0, False)[2]
    except RuntimeError:
        return False
    return not bool(out.any()) and grad.shape == k.shape and bool((grad == 2.0).all())


def _plan(
    q: Tensor,
    k: Tensor,
    k_context: Tensor | None,
    segments: Tensor,
    softmax_scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    options: ScoreOptions | None = None,
) -> list[Work]:
    table = segments.tolist()
    check_table(table, q.shape[0], k.shape[0], None if k_context is None else k_context.shape[0])
    if options is None and softcap == 0.0 and _scores_are_finite(table, q, k, k_context, softmax_scale):
        return work_of(runs(cut(table, causal, *window)))
    return work_of(runs(list(bands(table, causal, *window))))


def _scores_are_finite(
    table: Table, q: Tensor, k: Tensor, k_context: Tensor | None, softmax_scale: float
) -> bool:
    """False where a score might be NaN or infinite, by |q k^T| <= ||q|| ||k||: one pass over the used rows.

    torch's kernels take a row of few scores that are all NaN for a masked one (out 0, lse 0), and a merge
    would make finite numbers of it: _cpu_tiles.py does such calls.
    """
    num_q = table[-1][1] if table else 0
    num_k, num_context = (max((row[i] for row in table), default=0) for i in (5, 3))
    used = [q[:num_q]]
    used += [k[: max(num_k, num_context)]] if k_context is None else [k[:num_k], k_context[:num_context]]
    norms = [float(torch.linalg.vector_norm(x, dtype=q.dtype)) for x in used]
    bound = norms[0] * sum(norms[1:]) * max(1.0, abs(softmax_scale))
    return bound < torch.finfo(q.dtype).max


def _positive(q: Tensor, softmax_scale: float) -> tuple[Tensor, float]:
    """q and the scale with q k^T * scale as given, the scale positive: the kernels mask before they scale."""
    return (q, softmax_scale) if softmax_scale > 0.0 else (q * softmax_scale, 1.0)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_context: Tensor | None,
    v_context: Tensor | None,
    segments: Tensor,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    options: ScoreOptions | None = None,
) -> tuple[Tensor, Tensor]:
    """out (total_q, H, Dv) and lse (H, total_q); shapes, dtypes and meaning as the op's."""
    dtype = q.dtype
    q, k, v = (_computed(x) for x in (q, k, v))
    window = (window_left, window_right)
    todo = _plan(q, k, k_context, segments, softmax_scale, causal, window, softcap, options)
    q, scale = _positive(q, softmax_scale)
    regions = _regions(k, v, k_context, v_context)
    total_q, num_heads, _ = q.shape
    out = q.new_zeros(total_q, num_heads, v.shape[-1])
    lse = q.new_full((total_q, num_heads), -torch.inf)
    for work in todo:
        run, rows, columns = work.run, work.rows, work.keys
        keys, values = regions[run.piece.context]
        if run.piece.kind is Kind.BAND:
            _cpu_tiles.forward(run, q, keys, values, scale, softcap, out, lse, options)
            continue
        o, l = _flash_forward(run.piece.kind, rows.take(q), columns.take(keys), columns.take(values), scale)
        if len(todo) == 1 and isinstance(rows, Rows) and o.shape[0] * o.shape[1] == total_q:
            out, lse = o.reshape(out.shape), l.reshape(lse.shape)
        else:
            _merge(rows, out, lse, o, l)
    return out.to(dtype).contiguous(), lse.t().contiguous()


def _flash_forward(kind: Kind, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One kernel call on (n, rows, heads, D) tensors: out (n, rows, H, Dv), lse (n, rows, H)."""
    head_dim_v = v.shape[-1]
    heads = [x.transpose(1, 2) for x in _kernel_inputs(kind, q, k, v)]
    out, lse = _flash(*heads, 0.0, kind is not Kind.FULL, scale=scale)
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    if kind is Kind.REVERSED:
        out, lse = out.flip(1), lse.flip(1)
    return out[..., :head_dim_v], lse


def _kernel_inputs(kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as the kernel wants them: one head dim, mirrored for REVERSED, heads repeated where it must
    be."""
    if v.shape[-1] != q.shape[-1]:
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
    if kind is Kind.REVERSED:
        q, k, v = q.flip(1), k.flip(1), v.flip(1)
    if q.shape[2] != k.shape[2] and not _kernel_knows_gqa():
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    return q, k, v


def _merge(rows: Rows | RaggedRows, out: Tensor, lse: Tensor, o: Tensor, l: Tensor) -> None:
    """Adds one part of some rows' softmax to what out and lse hold of it. Every row of the part sees a
    key."""
    before = rows.take(lse)
    rows.put(out, torch.lerp(rows.take(out), o, torch.sigmoid(l - before)[..., None]))
    rows.put(lse, torch.logaddexp(before, l))


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_context: Tensor | None,
    v_context: Tensor | None,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    options: ScoreOptions | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dk_context, dv_context (the last two empty without a context), contiguous, in q's dtype."""
    dtype, head_dim, head_dim_v = q.dtype, q.shape[-1], v.shape[-1]
    q, k, v, dout, out = (_computed(x) for x in (q, k, v, dout, out))
    window = (window_left, window_right)
    todo = _plan(q, k, k_context, segments, softmax_scale, causal, window, softcap, options)
    q, scale = _positive(q, softmax_scale)
    lse = lse.t()
    regions = _regions(k, v, k_context, v_context)
    dq, (dk, dv) = _zeros(q), (_zeros(k), _zeros(v))
    grads = {False: (dk, dv), True: (dk, dv)}
    if k_context is not None:
        grads[True] = (_zeros(regions[True][0]), _zeros(regions[True][1]))
    flash_dout, flash_out, width = dout, out, head_dim
    if dlse is not None and any(work.run.piece.kind is not Kind.BAND for work in todo):
        # The kernel knows no dlse. One more column with v = 0, dout = 1 and out = -dlse adds it to
        # rowsum(dout * out) and to nothing else.
        flash_dout = torch.cat([dout, torch.ones_like(dout[..., :1])], -1)
        flash_out = torch.cat([out, -dlse.t()[..., None].to(out.dtype)], -1)
        width = max(head_dim, head_dim_v + 1)
    delta = None
    for work in todo:
        run, rows, columns = work.run, work.rows, work.keys
        keys, values = regions[run.piece.context]
        into = grads[run.piece.context]
        if run.piece.kind is Kind.BAND:
            if delta is None:
                delta = (dout * out).sum(-1)
                delta = delta if dlse is None else delta - dlse.t()
            _cpu_tiles.backward(
                run, q, keys, values, dout, lse, delta, scale, softcap, dq, *into, options
            )  # fmt: skip
            continue
        parts = _flash_backward_of(
            run.piece.kind, rows.take(flash_dout), rows.take(q), columns.take(keys), columns.take(values),
            rows.take(flash_out), rows.take(lse), scale, width,
        )  # fmt: skip
        for where, grad, part in zip((rows, columns, columns), (dq, *into), parts, strict=True):
            where.add(grad, part)
    if scale != softmax_scale:  # q was scaled
        dq *= softmax_scale
    context = grads[True] if k_context is not None else (dk[:0].clone(), dv[:0].clone())
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), context[0].to(dtype), context[1].to(dtype)


def _flash_backward_of(
    kind: Kind,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One kernel call on (n, rows, heads, D) tensors with the merged out and lse, head dims padded to
    `width`."""
    num_k, head_dim, head_dim_v = k.shape[2], q.shape[-1], v.shape[-1]
    if width != head_dim:
        q, k = (torch.nn.functional.pad(x, (0, width - head_dim)) for x in (q, k))
    dout, out = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (dout, out))
    q, k, v = _kernel_inputs(kind, q, k, v)
    if kind is Kind.REVERSED:
        dout, out, lse = dout.flip(1), out.flip(1), lse.flip(1)
    dout, q, k, v, out, lse = (x.transpose(1, 2) for x in (dout, q, k, v, out, lse))
    grads = _flash_backward(dout, q, k, v, out, lse, 0.0, kind is not Kind.FULL, scale=scale)
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    if dk.shape[2] != num_k:
        dk, dv = (x.unflatten(2, (num_k, -1)).sum(3) for x in (dk, dv))
    if kind is Kind.REVERSED:
        dq, dk, dv = dq.flip(1), dk.flip(1), dv.flip(1)
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim_v]


def _computed(x: Tensor) -> Tensor:
    """x in the dtype of the computation (fp32, or fp64), with a unit last stride."""
    x = x if x.dtype == torch.float64 else x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def _regions(
    k: Tensor, v: Tensor, k_context: Tensor | None, v_context: Tensor | None
) -> dict[bool, tuple[Tensor, Tensor]]:
    """Keys and values of both regions, True the context's: rows of k and v where it has no tensors of its
    own."""
    if k_context is None or v_context is None:
        return {False: (k, v), True: (k, v)}
    return {False: (k, v), True: (_computed(k_context), _computed(v_context))}


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
