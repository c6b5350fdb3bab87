"""TRL's AsyncGRPO packs a batch as a trie of tokens; its attention "tree_fa3" without copies of K/V per
branch.

Each segment of the trie sees its root-to-segment path. TRL's function gathers K/V along every path, so N
responses copy their prompt's K/V N times in every layer. Here a two-level trie (prompts, responses) copies
nothing, and a deeper one gathers a path once for all the leaves below it. Needs no FlashAttention-3.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.masking_utils import AttentionMaskInterface

from flash_attn._calls import attention
from flash_attn._checked import kernel_head_dim
from flash_attn._ops import plan_tables

TREE_ATTENTION = "tree_fa3"
# Reach attention in every call and change nothing that it computes.
_HARMLESS = frozenset({"position_ids", "use_cache", "output_router_logits", "dropout", "is_causal"})


class Trie(NamedTuple):
    """A packed trie as the ops' segments. `context_rows` (n,): rows gathered as contexts; None: nothing
    is."""

    segments: Tensor
    segments_host: Tensor
    context_rows: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    plans: dict[tuple[Any, ...], list[Tensor]]


_tries: WeakIdKeyDictionary = WeakIdKeyDictionary()


def read_trie(kv_index: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Trie:
    """The segments of a row of TRL's `TreeRow.pack()`; copies its tables to the host once.

    `kv_index` holds, for each segment, the rows of its path, its own last; `cu_seqlens_q`, `cu_seqlens_k`
    delimit the segments' rows and paths. Raises ValueError for tables that are no trie in DFS pre-order.
    """
    host = kv_index.cpu()
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if len(bounds_q) != len(bounds_k) or bounds_k[-1] != len(host):
        raise ValueError(
            f"tree_cu_seqlens_k must delimit tree_kv_index's {len(host)} rows for {len(bounds_q) - 1} "
            f"segments, got {len(bounds_k) - 1} segments and {bounds_k[-1]} rows"
        )
    own = list(itertools.pairwise(bounds_q))
    paths = [host[a:b] for a, b in itertools.pairwise(bounds_k)]
    for (begin, end), path in zip(own, paths, strict=True):
        if not torch.equal(path[len(path) - (end - begin) :], torch.arange(begin, end)):
            raise ValueError(
                f"tree_kv_index must end each path with the segment's own rows {begin} to {end - 1}"
            )
    above = [path[: len(path) - (end - begin)] for (begin, end), path in zip(own, paths, strict=True)]
    table = _two_levels(own, above)
    context_rows = None
    if table is None:
        table, context_rows = _any_depth(own, above)
    segments_host = torch.tensor(table, dtype=torch.int32).reshape(-1, 6)
    device = kv_index.device
    return Trie(
        segments_host.to(device), segments_host, None if context_rows is None else context_rows.to(device),
        max((end - begin for begin, end in own), default=0), max(map(len, paths), default=0), {},
    )  # fmt: skip


def _two_levels(own: list[tuple[int, int]], above: list[Tensor]) -> list[tuple[int, ...]] | None:
    """Roots see themselves as their context, their children see it too; None where the trie is deeper."""
    table: list[tuple[int, ...]] = []
    root = (0, 0)
    for i, ((begin, end), path) in enumerate(zip(own, above, strict=True)):
        if len(path) == 0:
            root = (begin, end)
            has_children = i + 1 < len(above) and len(above[i + 1]) > 0
            keys = (begin, end, end, end) if has_children else (begin, begin, begin, end)
            table.append((begin, end, *keys))
        elif torch.equal(path, torch.arange(*root)):
            table.append((begin, end, *root, begin, end))
        else:
            return None
    return table


def _any_depth(own: list[tuple[int, int]], above: list[Tensor]) -> tuple[list[tuple[int, ...]], Tensor]:
    """The path above each segment is its context, gathered once for neighbours that share it."""
    table: list[tuple[int, ...]] = []
    gathered: list[Tensor] = []
    context = (0, 0)
    before = None
    for (begin, end), path in zip(own, above, strict=True):
        if before is None or not torch.equal(path, before):
            context = (context[1], context[1] + len(path))
            gathered.append(path)
        before = path
        table.append((begin, end, *context, begin, end))
    return table, torch.cat(gathered)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    tree_max_seqlen_q: int,
    tree_max_seqlen_k: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over a packed trie: query (1, H, T, D), key, value (1, Hk, T, D) -> (1, T, H,
    D).

    The arguments are those of TRL's function. `sliding_window` counts the row itself, along its own path.
    """
    if kwargs.get("dropout"):
        raise NotImplementedError(f"attention dropout is not supported, got dropout={kwargs['dropout']}")
    unknown = sorted(n for n, value in kwargs.items() if n not in _HARMLESS and value not in (None, False))
    if unknown:
        raise NotImplementedError(f"tree attention does not know the argument {unknown[0]!r}")
    trie = _tries.get(tree_cu_seqlens_q)
    if trie is None:  # the first layer of a forward; the others get the same tensors
        trie = read_trie(tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k)
        _tries[tree_cu_seqlens_q] = trie
    num_rows = int(trie.segments_host[-1, 1])
    if query.shape[2] != num_rows:
        raise ValueError(f"the trie must have q's {query.shape[2]} rows, got {num_rows}")
    dtype = get_target_dtype(query, module) or query.dtype
    q, k, v = (x.transpose(1, 2)[0].to(dtype) for x in (query, key, value))
    window = (sliding_window - 1, 0) if sliding_window else (-1, -1)
    k_context, v_context = None, None
    if trie.context_rows is not None:
        k_context, v_context = k.index_select(0, trie.context_rows), v.index_select(0, trie.context_rows)
    out, _ = attention(
        q, k, v, k_context, v_context, trie.segments, trie.segments_host, _plan(trie, q, k, window),
        trie.max_seqlen_q, trie.max_seqlen_k, scaling, True, window, softcap or 0.0, s_aux,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return out.unsqueeze(0), None


def _plan(trie: Trie, q: Tensor, k: Tensor, window: tuple[int, int]) -> list[Tensor]:
    """The kernels' tables, built once per kind of layer."""
    head_dim = kernel_head_dim(q.shape[-1])
    kind = (head_dim, k.shape[1], q.dtype, window)
    if kind not in trie.plans:
        total_context = None if trie.context_rows is None else len(trie.context_rows)
        in_contexts = int((trie.segments_host[:, 3] - trie.segments_host[:, 2]).max())
        trie.plans[kind] = plan_tables(
            trie.segments, q.shape[0], k.shape[0], total_context, total_context or in_contexts,
            num_heads_k=k.shape[1], head_dim=head_dim, dtype=q.dtype, causal=True, window_size=window,
        )  # fmt: skip
    return trie.plans[kind]


def install_tree_attention() -> None:
    """Registers this function under TRL's name. TRL registers its own when it builds an `AsyncGRPOTrainer`,
    so call this after that, or use `SharedPromptAsyncGRPOTrainer`."""
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    AttentionMaskInterface.register(TREE_ATTENTION, lambda **kwargs: None)
