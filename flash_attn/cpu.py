"""Exact attention over segments on the CPU, forward and backward, without any T x T tensor.

    out = softmax(q k^T * scale) v per piece of the mask (see _pieces.py), pieces merged by log-sum-exp
Called by _ops.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn._pieces import Kind, Piece, check_table, decompose

aten = torch.ops.aten
_TILE_ELEMENTS = 1 << 22  # scores of one tile


def _pieces(q: Tensor, k: Tensor, k_context: Tensor | None, segments: Tensor, causal: bool, left: int, right: int, softcap: float) -> list[Piece]:
    table = segments.tolist()
    check_table(table, q.shape[0], k.shape[0], k.shape[0] if k_context is None else k_context.shape[0])
    return decompose(table, causal, left, right, split_bands=softcap == 0.0)


def forward(
    q: Tensor, k: Tensor, v: Tensor, k_context: Tensor | None, v_context: Tensor | None, segments: Tensor,
    softmax_scale: float, causal: bool, window_left: int, window_right: int, softcap: float,
) -> tuple[Tensor, Tensor]:
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    total_q, num_heads, _ = q.shape
    out = torch.zeros(total_q, num_heads, v.shape[-1], dtype=acc)
    lse = torch.full((total_q, num_heads), -torch.inf, dtype=acc)
    for p in _pieces(q, k, k_context, segments, causal, window_left, window_right, softcap):
        kk, vv = (k_context, v_context) if p.context and k_context is not None else (k, v)
        rows = slice(p.q_begin, p.q_end)
        _tiled_forward(q[rows], kk[p.k_begin:p.k_end], vv[p.k_begin:p.k_end], p, softmax_scale, softcap, out[rows], lse[rows])
    return out.to(q.dtype), lse.t().contiguous()


def _tiles(p: Piece, num_heads: int):
    rows_per_tile = 128
    lower, upper = p.lower, p.upper
    if p.kind is Kind.CAUSAL:
        upper = 1
    for r0 in range(0, p.num_rows, rows_per_tile):
        r1 = min(p.num_rows, r0 + rows_per_tile)
        k0, k1 = max(0, r0 + lower), min(p.num_keys, r1 - 1 + upper)
        step = max(128, _TILE_ELEMENTS // ((r1 - r0) * num_heads))
        for j0 in range(k0, k1, step):
            j1 = min(k1, j0 + step)
            mask = None
            if r1 - 1 + lower > j0 or r0 + upper < j1:
                row, key = torch.arange(r0, r1)[:, None], torch.arange(j0, j1)[None, :]
                mask = (key >= row + lower) & (key < row + upper)
            yield r0, r1, j0, j1, mask


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, softcap: float) -> tuple[Tensor, Tensor | None]:
    """(Hk, G, rows, keys) scores of q (rows, H, D), and d(softcapped)/d(raw)."""
    rows, num_heads, _ = q.shape
    num_k = k.shape[1]
    qq = q.reshape(rows, num_k, num_heads // num_k, -1).permute(1, 2, 0, 3)
    s = (qq * scale) @ k.permute(1, 2, 0)[:, None]
    slope = None
    if softcap > 0.0:
        t = torch.tanh(s / softcap)
        s, slope = t * softcap, 1 - t * t
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    return s, slope


def _tiled_forward(q: Tensor, k: Tensor, v: Tensor, p: Piece, scale: float, softcap: float, out: Tensor, lse: Tensor) -> None:
    acc = out.dtype
    for r0, r1, j0, j1, mask in _tiles(p, q.shape[1]):
        s, _ = _scores(q[r0:r1].to(acc), k[j0:j1].to(acc), mask, scale, softcap)
        l = torch.logsumexp(s, -1)
        prob = torch.exp(s - l.masked_fill(l == -torch.inf, 0.0)[..., None])
        o = prob @ v[j0:j1].to(acc).permute(1, 0, 2)[:, None]
        o = o.permute(2, 0, 1, 3).reshape(r1 - r0, q.shape[1], -1)
        l = l.permute(2, 0, 1).reshape(r1 - r0, q.shape[1])
        weight = torch.sigmoid(l - lse[r0:r1]).masked_fill(l == -torch.inf, 0.0)
        out[r0:r1].lerp_(o, weight[..., None])
        lse[r0:r1] = torch.logaddexp(lse[r0:r1], l)


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, k_context: Tensor | None, v_context: Tensor | None,
    out: Tensor, lse: Tensor, segments: Tensor, softmax_scale: float, causal: bool, window_left: int, window_right: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    grads = [None if x is None else torch.zeros(x.shape, dtype=acc) for x in (q, k, v, k_context, v_context)]
    dq, dk, dv, dk_context, dv_context = grads
    delta = (dout.to(acc) * out.to(acc)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.t()
    for p in _pieces(q, k, k_context, segments, causal, window_left, window_right, softcap):
        context = p.context and k_context is not None
        kk, vv, dkk, dvv = (k_context, v_context, dk_context, dv_context) if context else (k, v, dk, dv)
        num_k = k.shape[1]
        for r0, r1, j0, j1, mask in _tiles(p, q.shape[1]):
            rows, keys = slice(p.q_begin + r0, p.q_begin + r1), slice(p.k_begin + j0, p.k_begin + j1)
            qt, kt, vt, dot = q[rows].to(acc), kk[keys].to(acc), vv[keys].to(acc), dout[rows].to(acc)
            s, slope = _scores(qt, kt, mask, softmax_scale, softcap)
            split = lambda x: x.reshape(r1 - r0, num_k, -1, *x.shape[2:]).movedim(0, 2)  # noqa: E731
            l = split(lse.t()[rows].to(acc))
            prob = torch.exp(s - l.masked_fill(l == -torch.inf, torch.inf)[..., None])
            doh, qh = split(dot), split(qt)
            dp = doh @ vt.permute(1, 2, 0)[:, None]
            ds = prob * (dp - split(delta[rows])[..., None])
            if slope is not None:
                ds = ds * slope
            ds = ds * softmax_scale
            dvv[keys] += (prob.mT @ doh).sum(1).transpose(0, 1)
            dkk[keys] += (ds.mT @ qh).sum(1).transpose(0, 1)
            dq[rows] += (ds @ kt.permute(1, 0, 2)[:, None]).permute(2, 0, 1, 3).reshape(qt.shape)
    empty = [k.new_empty(0, *k.shape[1:]), v.new_empty(0, *v.shape[1:])] if k_context is None else []
    return (*(g.to(q.dtype) for g in grads if g is not None), *empty)
