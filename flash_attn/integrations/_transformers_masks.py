"""The mask half of the `"dualkv"` attention: tells the attention function which keys are padding and which
rows form a sequence.

transformers calls `dualkv_mask` once per forward and mask pattern; what it returns reaches
`dualkv_attention` as `attention_mask`. Nothing of size T x T is ever built, and a pattern that 2-D tables
cannot express is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

# Mask functions of transformers.masking_utils whose meaning reaches the attention function by other ways:
# causality and windows as arguments, packed sequences as row ids (below), padding as the 2-D mask.
_EXPRESSIBLE = frozenset({
    "and_masks", "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
    "sliding_window_bidirectional_overlay", "padding_mask_function", "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence", "add_offsets_to_mask_function",
})  # fmt: skip


def dualkv_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The `attention_mask` of the attention function; None where every key is a real token of one sequence
    per row.

    - padding, or a static cache that is not full yet: bool (batch_size, 1, 1, 1, num_keys), True on real
      tokens; the keys behind `num_keys` are unused cache;
    - several sequences in one row (`position_ids` that jump): int64 (batch_size, 1, 1, 1, q_length), the
      sequence of each row.

    Five dimensions, because models hand masks of two or four dimensions of their own to attention, and
    because Gemma-4 cuts masks to the last queries (`mask[:, :, -n:, :]`), which these survive. Raises
    NotImplementedError for patterns that neither can express (chunks, blocks, masks of the caller's own);
    ValueError for a mask with fewer columns than tokens so far. Further columns are ignored.
    """
    sequence_ids, bidirectional = None, False
    for name, function in _parts(mask_function):
        if name not in _EXPRESSIBLE:
            raise NotImplementedError(
                f"dualkv attention cannot express the mask pattern {name!r} that this model asks for"
            )
        if name == "packed_sequence_mask_function":
            sequence_ids = _closure(function)["packed_sequence_mask"]
        bidirectional |= "bidirectional" in name
    if attention_mask is not None and attention_mask.dim() == 5:
        return attention_mask  # generation with static caches makes its masks before the model's forward does
    # The last query stands at the last key that is in use: a static cache has room behind it, which no mask
    # of the caller's makes real. Queries of bidirectional models have no place among the keys.
    num_keys = kv_length if bidirectional else int(q_offset) + q_length - kv_offset
    if attention_mask is not None:
        # Its columns are the positions from 0; keys begin at kv_offset (sliding caches drop the first ones).
        end = kv_offset + num_keys
        if attention_mask.shape[1] < end:
            raise ValueError(
                f"attention_mask must have a column for each of the {end} tokens so far (cached ones too), "
                f"got {list(attention_mask.shape)}"
            )
        attention_mask = attention_mask[:, kv_offset:end]
        if num_keys == kv_length and bool(attention_mask.all()):
            return None
        return attention_mask[:, None, None, None].bool()
    if sequence_ids is not None:
        return sequence_ids.expand(batch_size, -1)[:, None, None, None].long()
    if num_keys < kv_length:
        return torch.ones(batch_size, 1, 1, 1, num_keys, dtype=torch.bool, device=kwargs.get("device"))
    return None


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _parts(mask_function: Callable[..., Any] | None) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions that a mask function of transformers is composed of, each with the name of its
    factory."""
    pending = [] if mask_function is None else [mask_function]
    while pending:
        function = pending.pop()
        if not hasattr(function, "__code__"):  # partial, callable object: not one of transformers' own
            yield type(function).__name__, function
            continue
        yield function.__qualname__.split(".", 1)[0], function
        for value in _closure(function).values():
            pending.extend(v for v in (value if isinstance(value, tuple) else (value,)) if callable(v))
