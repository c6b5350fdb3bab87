"""Which heads a process of a sequence-parallel group holds, of rows that run unshared: four processes played
one after the other."""

from __future__ import annotations

import pytest
import torch

from flash_attn.integrations import _verl_attention
from flash_attn.integrations._transformers_attention import dualkv_attention

POSITIONS = torch.cat([torch.arange(n) for n in (9, 4, 7, 1)])[None]


class Layer(torch.nn.Module):
    """What attention asks of its module."""

    is_causal = True
    config = type("Config", (), {})()


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("num_heads_k", [1, 2, 4, 8])
def test_heads_of_four_processes_are_those_of_one(num_heads_k, with_sinks, monkeypatch):
    """Keys are repeated head by head, so that queries meet their own; sinks go with the query heads."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 8, POSITIONS.numel(), 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, num_heads_k, POSITIONS.numel(), 16, generator=generator, dtype=torch.float64)
    sinks = torch.randn(8, generator=generator, dtype=torch.float64) if with_sinks else None
    arguments = {"s_aux": sinks, "position_ids": POSITIONS, "scaling": 0.3}
    whole, _ = dualkv_attention(Layer(), q, k, v, None, **arguments)

    rank = 0
    names = "get_ulysses_sequence_parallel_world_size", "get_ulysses_sequence_parallel_rank"
    monkeypatch.setattr(_verl_attention, names[0], lambda: 4)
    monkeypatch.setattr(_verl_attention, names[1], lambda: rank)
    # The exchanges, where every process already has all rows: only the heads are dealt.
    monkeypatch.setattr(
        _verl_attention, "gather_seq_scatter_heads", lambda x, seq_dim, head_dim: x.chunk(4, head_dim)[rank]
    )
    monkeypatch.setattr(_verl_attention, "gather_heads_scatter_seq", lambda x, head_dim, seq_dim: x)
    monkeypatch.setattr(_verl_attention, "_all_rows", lambda position_ids, num_parts: position_ids)
    parts = []
    for process in range(4):
        rank = process
        parts.append(_verl_attention.ulysses_attention(Layer(), q, k, v, None, **arguments)[0])
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=1e-12, atol=1e-12)
