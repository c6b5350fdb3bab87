"""Which rows of a batch may share their prompt: equality of content, found by a hash and confirmed by
comparison.

Rows share when their prompts' tokens (and, where given, position ids) and the caller's keys are equal; names
and order of rows never matter. With `longest_common_prefix` rows that share only a prefix are grouped too, at
the least number of stored tokens that one level of sharing can reach.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from flash_attn.shared_prompt._tables import on_host
from flash_attn.shared_prompt.layout import Boundary, check_boundary


class PromptGroups(NamedTuple):
    """`rows[g]`: the rows of group g in the caller's order. `prefix_lens[g]`: tokens that they share, at
    least 1.
    """

    rows: list[list[int]]
    prefix_lens: list[int]


def integer_ids(name: str, ids: torch.Tensor, *, or_bools: bool = False) -> None:
    """Raises TypeError unless `ids` holds integers of any width (or, for masks, bools)."""
    is_bool = ids.dtype == torch.bool
    if ids.dtype.is_floating_point or ids.dtype.is_complex or (is_bool and not or_bools):
        raise TypeError(f"{name} must hold integers{' or bools' if or_bools else ''}, got {ids.dtype}")


def pad_rows(
    name: str, rows: Sequence[Sequence[int] | torch.Tensor], *, or_bools: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of integers as one right-padded CPU int64 tensor (num_rows, width) and its mask."""
    if isinstance(rows, (str, bytes)) or not hasattr(rows, "__len__"):
        raise TypeError(f"{name} must be a tensor or a list of rows, got {type(rows).__name__}")
    tensors = []
    for i, row in enumerate(rows):
        try:
            tensor = torch.as_tensor(row)
        except (TypeError, ValueError, RuntimeError) as error:  # no numbers, or none of 64 bits
            raise ValueError(f"{name}[{i}] must be a list of ids, got {row!r:.80}") from error
        if tensor.dim() != 1:
            raise ValueError(f"{name}[{i}] must be a list of ids, got shape {list(tensor.shape)}")
        if tensor.numel():
            integer_ids(f"{name}[{i}]", tensor, or_bools=or_bools)
        tensors.append(tensor.to("cpu", torch.int64))
    lens = torch.tensor([t.numel() for t in tensors], dtype=torch.int64)
    width = int(lens.max()) if tensors else 0
    padded = (
        torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True) if width else torch.zeros(len(tensors), 0)
    )
    return padded.long(), torch.arange(width) < lens[:, None]


def check_mask(name: str, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`mask` as bool on the CPU; raises unless it has the shape of `ids` and holds only 0 and 1."""
    if mask.shape != ids.shape:
        raise ValueError(f"{name} must be {tuple(ids.shape)} like its ids, got {list(mask.shape)}")
    mask = mask.to("cpu")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{name} must hold 0 and 1 only, got {mask[(mask != 0) & (mask != 1)][0].item()}")
    return mask.bool()


def read_mask(
    name: str, mask: torch.Tensor | Sequence[Any], rows_name: str, exists: torch.Tensor
) -> torch.Tensor:
    """The caller's mask, a tensor or lists of flags, over the tokens that exist, as bool."""
    if isinstance(mask, torch.Tensor):
        return check_mask(name, mask, exists) & exists
    flags, flags_exist = pad_rows(name, mask, or_bools=True)
    if flags.shape != exists.shape or not torch.equal(flags_exist, exists):
        raise ValueError(
            f"{name} must have one flag per id of {rows_name}, got {flags_exist.sum(1).tolist()}"
        )
    return check_mask(name, flags, exists) & exists


@on_host
def group_by_prompt(
    ids: torch.Tensor | Sequence[Sequence[int] | torch.Tensor],
    *,
    prompt_lens: Sequence[int] | None = None,
    attention_mask: torch.Tensor | Sequence[Sequence[int] | torch.Tensor] | None = None,
    keys: Sequence[Hashable] | None = None,
    longest_common_prefix: bool = False,
    boundary: Boundary = "fork",
) -> PromptGroups:
    """Groups rows by the content of their prompts.

    `ids` is (num_rows, width) integers or a list of rows; the prompt is the first `prompt_lens[i]` tokens of
    a row, or the tokens under `attention_mask` (num_rows, width) or a list of rows, padding and holes left
    out. Rows share only where `keys[i]` (LoRA adapter, fingerprint of the images, pair id, ...) are equal
    too; tensors and arrays count by value. Groups stand in the order of their first row.

    `longest_common_prefix=True` also groups prompts that differ at the end (pairs for DPO, tokens merged
    across the prompt's end), choosing the grouping that stores the fewest tokens with `boundary`. Ids on a
    GPU are copied to the host once, which waits for the GPU.
    """
    check_boundary(boundary)
    if isinstance(ids, torch.Tensor):
        if ids.dim() != 2:
            raise ValueError(f"ids must be (num_rows, width), got {list(ids.shape)}")
        integer_ids("ids", ids)
        grid, mask = ids.to("cpu", torch.int64), torch.ones(ids.shape, dtype=torch.bool)
    else:
        grid, mask = pad_rows("ids", ids)
    if prompt_lens is not None and attention_mask is not None:
        raise ValueError("prompt_lens and attention_mask must not both be given, got both")
    if attention_mask is not None:
        mask = read_mask("attention_mask", attention_mask, "ids", mask)
    if prompt_lens is not None:
        lens = torch.as_tensor(prompt_lens).cpu()
        if lens.numel():
            integer_ids("prompt_lens", lens)
        lens = lens.long()
        if lens.shape != grid.shape[:1]:
            raise ValueError(f"prompt_lens must be ({grid.shape[0]},), got {list(lens.shape)}")
        if (lens > mask.sum(1)).any():
            i = int((lens > mask.sum(1)).nonzero()[0])
            raise ValueError(f"prompt_lens[{i}] must be at most {int(mask[i].sum())}, got {int(lens[i])}")
        mask = mask & (torch.arange(grid.shape[1]) < lens[:, None])
    tokens = grid.flatten().index_select(0, mask.flatten().nonzero()[:, 0])
    return group_rows(
        list(tokens.split(mask.sum(1).tolist())), keys, longest_common_prefix, int(boundary == "fork")
    )


def group_rows(
    prompts: list[torch.Tensor], keys: Sequence[Hashable] | None, longest_common_prefix: bool, fork: int
) -> PromptGroups:
    """Groups of rows with prompts (length,) or (length, facts per token), int64 on the CPU."""
    if keys is not None:
        keys = _keys_by_value(keys)
        if len(keys) != len(prompts):
            raise ValueError(f"keys must have one entry per row ({len(prompts)}), got {len(keys)}")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompts[{i}] must have at least one token, got 0")
    buckets: dict[Hashable, list[list[int]]] = {}
    groups: list[list[int]] = []
    for i, (prompt, hashed) in enumerate(zip(prompts, _hashes(prompts), strict=True)):
        bucket = buckets.setdefault((hashed, len(prompt), None if keys is None else keys[i]), [])
        for group in bucket:
            if torch.equal(prompts[group[0]], prompt):  # a hash alone could be wrong
                group.append(i)
                break
        else:
            bucket.append([i])
            groups.append(bucket[-1])
    prefix_lens = [len(prompts[group[0]]) for group in groups]
    if not longest_common_prefix:
        return PromptGroups(groups, prefix_lens)
    merged: list[tuple[list[int], int]] = []
    by_key: dict[Hashable, list[list[int]]] = {}
    for group in groups:
        by_key.setdefault(None if keys is None else keys[group[0]], []).append(group)
    for same_key in by_key.values():
        merged += _merge_by_prefix(prompts, same_key, fork)
    merged.sort()
    return PromptGroups([rows for rows, _ in merged], [prefix for _, prefix in merged])


def _keys_by_value(keys: Any) -> list[Hashable]:
    """Keys as plain hashable values: a tensor's own hash is its identity, which no two rows share."""
    values = keys.tolist() if hasattr(keys, "tolist") else keys  # one copy where they are on a GPU
    if isinstance(values, (str, bytes, Mapping, Set)) or not hasattr(values, "__len__"):
        raise TypeError(f"keys must be a sequence with one entry per row, got {type(keys).__name__}")
    values = [_by_value(key) for key in values]
    for i, key in enumerate(values):
        try:
            hash(key)
        except TypeError:
            raise TypeError(f"keys[{i}] must be hashable, got {key!r}") from None
    return values


def _by_value(key: Any) -> Any:
    key = key.tolist() if hasattr(key, "tolist") else key
    return tuple(map(_by_value, key)) if isinstance(key, (list, tuple)) else key


def _hashes(prompts: list[torch.Tensor]) -> list[int]:
    """sum_t weight[t] * token[t] modulo 2**64 with fixed random odd weights, per row."""
    if not prompts:
        return []
    flat = [prompt.reshape(-1) for prompt in prompts]
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (max(map(len, flat)),), generator=generator) | 1
    return [int((tokens * weights[: len(tokens)]).sum()) for tokens in flat]


def _common_prefix(a: torch.Tensor, b: torch.Tensor) -> int:
    length = min(len(a), len(b))
    differs = (a[:length] != b[:length]).reshape(length, -1).any(1).nonzero()
    return int(differs[0, 0]) if len(differs) else length


class _Node(NamedTuple):
    """A node of the prefix tree: the prompts begin..end of the sorted order, which share `prefix` tokens."""

    begin: int
    end: int
    prefix: int
    ancestors: tuple[int, ...]  # indices of nodes, the root first


def _prefix_tree(prompts: list[torch.Tensor]) -> tuple[list[_Node], list[list[int]]]:
    """Nodes of the tree of sorted, distinct prompts, parents first, and the children of each. Leaves are
    prompts.
    """
    adjacent = [_common_prefix(a, b) for a, b in itertools.pairwise(prompts)]
    nodes: list[_Node] = []
    children: list[list[int]] = []
    stack: list[tuple[int, int, tuple[int, ...]]] = [(0, len(prompts), ())]
    while stack:
        begin, end, ancestors = stack.pop()
        inner = adjacent[begin : end - 1]
        prefix = min(inner, default=len(prompts[begin]))
        if ancestors:
            children[ancestors[-1]].append(len(nodes))
        cuts = [begin, *(begin + 1 + i for i, shared in enumerate(inner) if shared == prefix), end]
        if end - begin > 1:
            stack += [(a, b, (*ancestors, len(nodes))) for a, b in itertools.pairwise(cuts)]
        nodes.append(_Node(begin, end, prefix, ancestors))
        children.append([])
    return nodes, children


def _merge_by_prefix(
    prompts: list[torch.Tensor], groups: list[list[int]], fork: int
) -> list[tuple[list[int], int]]:
    """Merges groups of equal prompts into the (rows, prefix length) that store the fewest tokens.

    A group of n rows with prefix L saves (n - 1) * (L - fork) tokens. Optimal over the prefix tree: the rows
    below a node either form a group there or stay open for one ancestor's group, where each saves that
    ancestor's L - fork and the group costs L - fork once. `saved[v][a]`: the most that the subtree of v saves
    with its open rows counted at node a.
    """
    order = sorted(groups, key=lambda group: prompts[group[0]].tolist())
    nodes, children = _prefix_tree([prompts[group[0]] for group in order])
    alone = -1  # open rows that no ancestor takes: nothing saved
    gain = {alone: 0} | {v: max(node.prefix - fork, 0) for v, node in enumerate(nodes)}
    saved: list[dict[int, int]] = [{} for _ in nodes]
    closes: list[dict[int, bool]] = [{} for _ in nodes]
    for v in reversed(range(len(nodes))):
        num_rows = len(order[nodes[v].begin])
        for a in (alone, *nodes[v].ancestors):
            if children[v]:
                closed = sum(saved[c][v] for c in children[v]) - gain[v]
                open_ = sum(saved[c][a] for c in children[v])
            else:
                closed, open_ = (num_rows - 1) * gain[v], num_rows * gain[a]
            closes[v][a] = closed > open_  # nothing is shared without gain
            saved[v][a] = max(closed, open_)

    owner = {0: alone}
    members: dict[int, list[int]] = {}
    for v in range(len(nodes)):
        if closes[v][owner[v]]:
            owner[v] = v
        for child in children[v]:
            owner[child] = owner[v]
        if not children[v]:
            group = v if owner[v] == alone else owner[v]
            members.setdefault(group, []).extend(order[nodes[v].begin])
    return [(sorted(rows), nodes[v].prefix) for v, rows in members.items()]
