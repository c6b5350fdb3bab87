"""Plain attention of a batch of equal sequences: ours, and torch's FlashAttention-2."""

from __future__ import annotations

import os

import torch
from cases import PlainCase
from providers import DTYPES, Pair
from torch import Tensor

aten = torch.ops.aten


def plain_providers(case: PlainCase) -> dict[str, Pair]:
    """Name -> forward and backward, through autograd."""
    generator = torch.Generator("cuda").manual_seed(0)

    def make(heads: int) -> Tensor:
        shape = (case.batch, case.seqlen, heads, case.head_dim)
        return torch.randn(shape, device="cuda", dtype=DTYPES[case.dtype], generator=generator)

    q, k, v, dout = make(case.num_heads), make(case.num_heads_k), make(case.num_heads_k), make(case.num_heads)
    scale = case.head_dim**-0.5

    def ours(force_arch: str) -> Pair:
        import flash_attn

        leaves = [x.clone().requires_grad_() for x in (q, k, v)]

        def use_arch() -> None:  # read at every call; not part of it, as nobody else changes it
            os.environ["FLASH_ATTN_FORCE_ARCH"] = force_arch

        def forward() -> Tensor:
            return flash_attn.flash_attn_func(*leaves, causal=case.causal)

        use_arch()
        out = forward()

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

        forward.prepare = backward.prepare = use_arch  # type: ignore[attr-defined]
        return forward, backward  # type: ignore[return-value]

    def sdpa_fa2() -> Pair:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        args = [x.transpose(1, 2) for x in leaves]

        def forward() -> Tensor:
            return aten._scaled_dot_product_flash_attention(*args, 0.0, case.causal, scale=scale)[0]

        out = forward()

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, leaves, dout.transpose(1, 2), retain_graph=True)

        return forward, backward  # type: ignore[return-value]

    found = {"fa2": sdpa_fa2()}
    for name, force_arch in (("ours-sm80", "80"), ("ours-sm90a", "90")):
        try:
            found[name] = ours(force_arch)
        except NotImplementedError as error:  # this library was built without it
            print(f"{name}: {error}")
    return found
