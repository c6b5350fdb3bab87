"""Attention of a decoder layer by provider, with gradients: what decoder_layer.py compares.

Each provider names how its rows are laid out (`LAYOUTS`): packed (the prompt once, then the responses),
replicated (prompt and response, N times, no padding) or padded (the same as a rectangle). Its attention takes
q (rows, H, d), k and v (rows, Hk, d) in that layout and returns (rows, H, d).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from providers import _cudnn_forward
from providers_fa4 import _varlen as fa4_varlen
from providers_gather import fa2_varlen, gather_rows, padded_fa2
from providers_varlen import _compiled_merge, cumulative
from torch import Tensor

from flash_attn import flash_attn_shared_prompt_func
from flash_attn.shared_prompt import SharedPromptLayout

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
LAYOUTS = {"fa2-replicated": "replicated", "fa4-replicated": "replicated", "cudnn-padded": "padded"}


@dataclass(frozen=True)
class Batch:
    """A prompt of `prompt` tokens and responses of `lens`, in a provider's layout."""

    prompt: int
    lens: list[int]
    layout: str
    device: str

    @classmethod
    def of(cls, provider: str, prompt: int, lens: list[int], device: str) -> Batch:
        return cls(prompt, lens, LAYOUTS.get(provider, "packed"), device)

    @property
    def packed_tokens(self) -> int:
        return self.prompt + sum(self.lens)

    @property
    def lengths(self) -> list[int]:
        """Of the sequences, padding included."""
        if self.layout == "packed":
            return [self.packed_tokens]
        if self.layout == "padded":
            return [self.prompt + max(self.lens)] * len(self.lens)
        return [self.prompt + r for r in self.lens]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_pairs(self) -> float:
        """Visible pairs that are computed."""
        if self.layout == "packed":
            return self.prompt**2 / 2 + sum(self.prompt * r + r * r / 2 for r in self.lens)
        return sum(length**2 / 2 for length in self.lengths)

    @property
    def rows(self) -> Tensor:
        """Packed row of each row; padding repeats the prompt's first."""
        if self.layout == "packed":
            return torch.arange(self.packed_tokens)
        prompt, parts, end = torch.arange(self.prompt), [], self.prompt
        for r, length in zip(self.lens, self.lengths, strict=True):
            own, padding = (
                torch.arange(end, end + r),
                torch.zeros(length - self.prompt - r, dtype=torch.int64),
            )
            parts += [prompt, own, padding]
            end += r
        return torch.cat(parts)

    @property
    def positions(self) -> Tensor:
        if self.layout == "packed":
            return torch.cat(
                [torch.arange(self.prompt), *(torch.arange(self.prompt, self.prompt + r) for r in self.lens)]
            )
        return torch.cat([torch.arange(length) for length in self.lengths])

    @property
    def counts(self) -> Tensor:
        """1 for rows whose output counts: the first copy of the prompt, and the responses."""
        if self.layout == "packed":
            return torch.ones(self.packed_tokens)
        parts = []
        for index, (r, length) in enumerate(zip(self.lens, self.lengths, strict=True)):
            counts = torch.zeros(length)
            counts[: self.prompt] = float(index == 0)
            counts[self.prompt : self.prompt + r] = 1
            parts.append(counts)
        return torch.cat(parts)


class Varlen(torch.autograd.Function):
    """out = call(q, k, v, shape)[0]"""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shape: tuple, call: Any, grad: Any) -> Tensor:
        out, lse = call(q, k, v, shape)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.shape, ctx.grad = shape, grad
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:  # type: ignore[override]
        return *ctx.grad(dout.contiguous(), *ctx.saved_tensors, ctx.shape), None, None, None


class TwoCall(torch.autograd.Function):
    """The prompt on itself, responses on the prompt and on themselves, merged by log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shapes: tuple, call: Any, grad: Any) -> Tensor:
        on_self, on_prompt, on_own = shapes
        p = on_self[2]
        first = call(q[:p], k[:p], v[:p], on_self)
        x = call(q[p:], k[:p], v[:p], on_prompt)
        y = call(q[p:], k[p:], v[p:], on_own)
        out, lse = _compiled_merge(x[0], x[1].t().unsqueeze(-1), y[0], y[1].t().unsqueeze(-1))
        ctx.save_for_backward(q, k, v, *first[:2], out, lse.squeeze(-1).t().contiguous())
        ctx.shapes, ctx.grad = shapes, grad
        return torch.cat([first[0], out])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:  # type: ignore[override]
        q, k, v, first, first_lse, out, lse = ctx.saved_tensors
        on_self, on_prompt, on_own = ctx.shapes
        p, dout = on_self[2], dout.contiguous()
        a = ctx.grad(dout[:p], q[:p], k[:p], v[:p], first, first_lse, on_self)
        x = ctx.grad(dout[p:], q[p:], k[:p], v[:p], out, lse, on_prompt)
        y = ctx.grad(dout[p:], q[p:], k[p:], v[p:], out, lse, on_own)
        parts = (a[0], x[0] + y[0]), (a[1] + x[1], y[1]), (a[2] + x[2], y[2])
        return *(torch.cat(part) for part in parts), None, None, None


Calls = Callable[[float], tuple[Callable[..., Any], Callable[..., Any]]]


def replicated(calls: Calls) -> Callable[[Batch, float], Attention]:
    def make(batch: Batch, scale: float) -> Attention:
        call, grad = calls(scale)
        steps, longest = cumulative(batch.lengths, batch.device), max(batch.lengths)
        shape = (steps, steps, longest, longest, True)
        return lambda q, k, v: Varlen.apply(q, k, v, shape, call, grad)

    return make


def two_call(calls: Calls) -> Callable[[Batch, float], Attention]:
    def make(batch: Batch, scale: float) -> Attention:
        call, grad = calls(scale)
        p, rows, longest = batch.prompt, sum(batch.lens), max(batch.lens)
        prompt, flat, each = (cumulative(x, batch.device) for x in ([p], [rows], batch.lens))
        shapes = (
            (prompt, prompt, p, p, True),
            (flat, prompt, rows, p, False),
            (each, each, longest, longest, True),
        )
        return lambda q, k, v: TwoCall.apply(q, k, v, shapes, call, grad)

    return make


def gather(calls: Calls) -> Callable[[Batch, float], Attention]:
    """K and V gathered per response; the gather's own backward adds them up."""

    def make(batch: Batch, scale: float) -> Attention:
        call, grad = calls(scale)
        index, shape = gather_rows(batch.prompt, batch.lens, batch.device)
        return lambda q, k, v: Varlen.apply(
            q, k.index_select(0, index), v.index_select(0, index), shape, call, grad
        )

    return make


def cudnn_padded(batch: Batch, scale: float) -> Attention:
    """A rectangle; padding stands last, where causality hides it."""
    size = (len(batch.lens), batch.lengths[0])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (x.unflatten(0, size).transpose(1, 2) for x in (q, k, v))
        return _cudnn_forward(*heads, True, scale)[0].transpose(1, 2).flatten(0, 1)

    return attend


def prefix_grouper(batch: Batch, scale: float) -> Attention:
    """The package itself, around torch's FlashAttention-2."""
    from prefix_grouper import AttentionForward, PrefixGrouper  # type: ignore[import-not-found]

    grouper = PrefixGrouper([[batch.prompt, *batch.lens]], device=batch.device)
    call = AttentionForward(padded_fa2(scale))
    return lambda q, k, v: call(grouper, *(x.unsqueeze(0).transpose(1, 2) for x in (q, k, v)))[0]


def ours(batch: Batch, scale: float) -> Attention:
    layout = SharedPromptLayout.from_lengths([batch.prompt], [batch.lens], batch.device, "shared")
    return lambda q, k, v: flash_attn_shared_prompt_func(q, k, v, layout, softmax_scale=scale)  # type: ignore[return-value]


def reference(batch: Batch, scale: float) -> Attention:
    """fp32 with an explicit mask."""
    owner = torch.repeat_interleave(torch.tensor([batch.prompt, *batch.lens], device=batch.device))
    index = torch.arange(len(owner), device=batch.device)
    mask = (index[None] <= index[:, None]) & ((owner[None] == 0) | (owner[None] == owner[:, None]))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)

    return attend


ATTENTION: dict[str, Callable[[Batch, float], Attention]] = {
    "ours": ours,
    "fa4-two-call": two_call(fa4_varlen),
    "fa2-replicated": replicated(fa2_varlen),
    "cudnn-padded": cudnn_padded,
    "fa2-two-call": two_call(fa2_varlen),
    "gather-varlen": gather(fa2_varlen),
    "prefix-grouper": prefix_grouper,
    "fa4-replicated": replicated(fa4_varlen),
    "reference": reference,
}
