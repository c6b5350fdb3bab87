"""FlashAttention-4 over the packed row with a mask function and lists of visible blocks, built beforehand.

Key j is visible to row i iff j <= i < end[j]; end[j]: one past the last row that may see j.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def _ends(n: int, p: int, r: int) -> Tensor:
    total = p + n * r
    end = torch.zeros(total + 1024, dtype=torch.int32, device="cuda")  # tiles read past the last key
    end[:p] = total
    end[p:total] = p + (torch.arange(n, device="cuda") + 1).repeat_interleave(r).int() * r
    return end


def _classes(n: int, p: int, r: int) -> tuple[Tensor, Tensor]:
    """(row blocks, key blocks) bool: partly visible, wholly visible. From the blocks' corners alone."""
    total = p + n * r
    first = torch.arange(0, total, BLOCK, device="cuda")
    last = (first + BLOCK).clamp(max=total) - 1
    key_first, key_last = first[None], first[None] + BLOCK - 1  # a ragged last block is never whole

    def response(row: Tensor) -> Tensor:
        return (row - p).div(r, rounding_mode="floor").clamp(min=-1)

    def start(row: Tensor) -> Tensor:
        return torch.where(row < p, 0, p + response(row).clamp(min=0) * r)

    a, b, own = first[:, None], last[:, None], start(first)[:, None]
    visible = ((key_first < p) & (key_first <= b)) | ((key_last >= own) & (key_first <= b))
    one = (response(first) == response(last))[:, None]
    from_own = one & (key_first >= own)
    adjoining = one & (own <= p) & (a >= p)  # the first response follows the prompt
    whole = (key_last <= a) & ((key_last < p) | from_own | adjoining | (b < p))
    return visible & ~whole, whole


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number and ascending indices of the set blocks of each row, int32 (1, 1, rows[, most])."""
    count = blocks.sum(1).int()
    width = max(2, int(count.max()))
    index = torch.argsort((~blocks).to(torch.uint8), dim=1, stable=True)[:, :width].int()
    return count[None, None].contiguous(), index[None, None].contiguous()


def fa4_block_sparse(problem):  # type: ignore[no-untyped-def]
    from providers_fa4 import _functions

    fa4_forward, fa4_backward = _functions()
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    @cute.jit
    def mask(batch, head, row, key, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        end = utils.scalar_to_ssa(aux_tensors[0][key[0]], cutlass.Int32)
        return (key <= row) & (row < end)

    n, p, r = problem.one_group()
    part, whole = _classes(n, p, r)
    sizes = dict(block_size=(BLOCK, BLOCK))
    by_rows = BlockSparseTensorsTorch(*_lists(part), *_lists(whole), **sizes)
    by_keys = BlockSparseTensorsTorch(
        *_lists(part.t().contiguous()), *_lists(whole.t().contiguous()), **sizes
    )
    options = dict(softmax_scale=problem.scale, mask_mod=mask, aux_tensors=[_ends(n, p, r)])
    q, k, v, dout = (x.unsqueeze(0) for x in (problem.q, problem.k, problem.v, problem.dout))

    def run() -> tuple[Tensor, Tensor]:
        return fa4_forward(q, k, v, block_sparse_tensors=by_rows, return_lse=True, **options)[:2]

    out, lse = run()

    def forward() -> Tensor:
        return run()[0]

    def backward() -> tuple[Tensor, ...]:
        return fa4_backward(q, k, v, out, dout, lse, block_sparse_tensors=by_keys, **options)[:3]

    forward.packed = lambda x: x[0]  # type: ignore[attr-defined]
    backward.packed = lambda g: [x[0] for x in g]  # type: ignore[attr-defined]
    return forward, backward
