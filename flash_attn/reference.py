"""The one reference: softmax(mask(q k^T * scale)) v with an explicit boolean mask, any dtype and device,
differentiable.

    S = q k^T * softmax_scale   (softcap > 0: S = softcap * tanh(S / softcap)),   S += bias
    lse = log sum exp S,   out = (weights * exp(S - lse)) v

Everything else in the package is compared with this file, and nothing in the package calls it: it stores T x
T scores. The mask comes from `segments`, row by row (see `segment_mask`), so that it shares no code with the
fast implementations.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_mask(
    segments: Tensor,
    total_q: int,
    total_k: int,
    total_context: int | None,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Which keys each query row sees: bool (total_q, total_context + total_k), context columns first.

    `total_context` None means that context intervals are rows of k itself (one set of columns).
    """
    left, right = window_size
    if causal:
        right = 0
    offset = 0 if total_context is None else total_context
    mask = torch.zeros(total_q, offset + total_k, dtype=torch.bool)
    for q_begin, q_end, context_begin, context_end, k_begin, k_end in segments.tolist():
        num_context, num_keys = context_end - context_begin, k_end - k_begin
        columns = torch.cat([torch.arange(context_begin, context_end), torch.arange(k_begin, k_end) + offset])
        position = torch.arange(q_end - q_begin)[:, None] + num_context + num_keys - (q_end - q_begin)
        key = torch.arange(num_context + num_keys)[None, :]
        seen = torch.ones(q_end - q_begin, num_context + num_keys, dtype=torch.bool)
        if left >= 0:
            seen &= key >= position - left
        if right >= 0:
            seen &= key <= position + right
        mask[torch.arange(q_begin, q_end)[:, None], columns[None, :]] = seen
    return mask


class _Low(torch.autograd.Function):
    """Attention that keeps S, softmax and lse in fp32 and rounds P, dS and outputs to the input dtype."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def,override]
        ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float, bias: Tensor | None,
        weights: Tensor | None,
    ):  # fmt: skip
        dtype = q.dtype
        s, slope = _scores(q.float(), k.float(), mask, scale, softcap, bias)
        weights = torch.ones((), device=q.device) if weights is None else weights.float()
        lse = torch.logsumexp(s, -1)
        p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        out = ((weights * p).to(dtype).float() @ v.float()).to(dtype)
        ctx.save_for_backward(q, k, v, out, p, slope, weights)
        ctx.scale = scale
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor, dlse: Tensor):  # type: ignore[no-untyped-def,override]
        q, k, v, out, p, slope, weights = ctx.saved_tensors
        dtype = q.dtype
        dp = dout.float() @ v.float().mT * weights
        delta = (dout.float() * out.float()).sum(-1) - dlse
        ds = (p * (dp - delta[..., None]) * slope).to(dtype).float()
        dv = ((weights * p).to(dtype).float().mT @ dout.float()).to(dtype)
        return (
            (ds @ k.float() * ctx.scale).to(dtype),
            (ds.mT @ q.float() * ctx.scale).to(dtype),
            dv,
            *[None] * 5,
        )


def _scores(
    q: Tensor, k: Tensor, mask: Tensor, scale: float, softcap: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    s = q @ k.mT * scale
    slope = torch.ones((), dtype=s.dtype, device=s.device)
    if softcap > 0.0:
        t = torch.tanh(s / softcap)
        s, slope = softcap * t, 1.0 - t * t
    s = s if bias is None else s + bias.to(s.dtype)
    return s.masked_fill(~mask, -torch.inf), slope


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_context: Tensor | None = None,
    v_context: Tensor | None = None,
    *,
    segments: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    low: bool = False,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (total_q, H, Dv) in q's dtype and lse (H, total_q) by the formula above; rows without keys give 0
    and -inf.

    q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv), context tensors likewise; `segments` int (S,
    6). `low` keeps S, softmax and lse in fp32 and rounds inputs, P, dS and outputs to the input dtype: the
    yardstick of the tolerance rule. Otherwise everything is computed in q's dtype: pass fp32 or fp64. `sinks`
    (H,): one more key per head with logit sinks[h] and value 0. lse does not contain the sink. `bias` and
    `weights` (H, total_q, keys): ALiBi's term of S, and dropout's factors of the probabilities (not in lse).
    """
    total_context = None if k_context is None else k_context.shape[0]
    mask = segment_mask(segments, q.shape[0], k.shape[0], total_context, causal, window_size).to(q.device)
    if k_context is not None and v_context is not None:
        k, v = torch.cat([k_context, k]), torch.cat([v_context, v])
    groups = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = q.transpose(0, 1), _expand(k, groups), _expand(v, groups)
    # Keys that no row sees take no part, so that NaN in them reaches nothing.
    unseen = ~mask.any(0)[None, :, None]
    k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    q = q.masked_fill(~mask.any(1)[None, :, None], 0.0)
    if low:
        out, lse = _Low.apply(q, k, v, mask, scale, softcap, bias, weights)
    else:
        s, _ = _scores(q, k, mask, scale, softcap, bias)
        # Rows without keys: logsumexp of nothing is -inf, and its gradient must be 0 instead of NaN.
        empty = ~mask.any(1)
        lse = torch.logsumexp(s.masked_fill(empty[:, None], 0.0), -1).masked_fill(empty, -torch.inf)
        p = torch.exp(s - lse.masked_fill(empty, 0.0)[..., None])
        out = (p if weights is None else p * weights.to(p.dtype)) @ v
    if sinks is not None:
        out = (out * torch.sigmoid(lse - sinks[:, None].to(lse.dtype))[..., None]).to(out.dtype)
    return out.transpose(0, 1), lse


def _expand(x: Tensor, groups: int) -> Tensor:
    """(rows, Hk, D) -> (H, rows, D); query head h reads key head h // groups."""
    return x.transpose(0, 1).repeat_interleave(groups, 0)
