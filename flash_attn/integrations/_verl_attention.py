"""The "dualkv" attention under veRL's Ulysses sequence parallelism: all-to-all, attention, all-to-all back.

Each process holds T / n rows and all heads; between the two exchanges it holds all rows and H / n heads.
Packs come with a layout that is spread over the group, whose attention exchanges q, k and v together. Rows
that run unshared exchange here, as veRL does for its own attention inside a function that another attention
name never reaches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from transformers import AttentionInterface, AttentionMaskInterface
from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
)

from flash_attn.integrations._transformers_attention import dualkv_attention
from flash_attn.integrations._transformers_masks import dualkv_mask

ULYSSES_NAME = "dualkv_ulysses"


def register_ulysses() -> None:
    """Makes `attn_implementation="dualkv_ulysses"` known to transformers, attention and masks."""
    AttentionInterface.register(ULYSSES_NAME, ulysses_attention)
    AttentionMaskInterface.register(ULYSSES_NAME, dualkv_mask)


def ulysses_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`dualkv_attention` of all rows from this process's rows: q (1, H, T / n, D), k and v (1, Hk, T / n, D).

    Where n exceeds the key heads these are repeated. Attention that is not causal (vision towers) has whole
    rows on every process and runs as it is, and a pack's layout does the exchange. Raises NotImplementedError
    for padding masks (veRL's rows come without padding), and for layers that say neither layout nor
    positions.
    """
    num_parts = get_ulysses_sequence_parallel_world_size()
    causal = kwargs.get("is_causal")
    whole = num_parts == 1 or not (getattr(module, "is_causal", True) if causal is None else causal)
    if whole or kwargs.get("dualkv_layout") is not None:
        return dualkv_attention(module, query, key, value, attention_mask, s_aux=s_aux, **kwargs)
    # int64: the sequences of this process's own rows, made from its positions; the gathered positions say
    # it for all rows.
    if attention_mask is not None and not (attention_mask.dim() == 5 and attention_mask.dtype == torch.int64):
        raise NotImplementedError(
            "sequence parallelism takes rows without padding (use_remove_padding=True), got attention_mask "
            f"{attention_mask.dtype} {list(attention_mask.shape)}"
        )
    if kwargs.get("position_ids") is None:
        raise NotImplementedError(
            f"sequence parallelism needs position_ids in attention, {type(module).__name__} passes none"
        )
    repeats = num_parts // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    query, key, value = (gather_seq_scatter_heads(x, seq_dim=2, head_dim=1) for x in (query, key, value))
    if s_aux is not None:
        s_aux = s_aux.chunk(num_parts)[get_ulysses_sequence_parallel_rank()]
    kwargs["position_ids"] = _all_rows(kwargs["position_ids"], num_parts)
    out, _ = dualkv_attention(module, query, key, value, None, s_aux=s_aux, **kwargs)
    return gather_heads_scatter_seq(out, head_dim=2, seq_dim=1), None


def _all_rows(position_ids: torch.Tensor, num_parts: int) -> torch.Tensor:
    parts = [torch.empty_like(position_ids) for _ in range(num_parts)]
    group = get_ulysses_sequence_parallel_group()
    torch.distributed.all_gather(parts, position_ids.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
