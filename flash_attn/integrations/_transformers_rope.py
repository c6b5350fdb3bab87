"""Rotary embeddings whose frequencies depend on the longest position of the call: may rows of different
length share a call?

In a replicated batch each row decides for itself; a pack decides once, by its longest row. Equal only where
every row would have decided the same, which the layout's lengths tell without reading the GPU.
"""

from __future__ import annotations

from typing import Any

from flash_attn.shared_prompt.layout import SharedPromptLayout


def length_dependent_rope(config: Any) -> list[tuple[str, int]]:
    """(rope_type, switch length in tokens) of every rotary embedding in `config` that looks at the longest
    position."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [p for p in parameters.values() if isinstance(p, dict) and "rope_type" in p]
    found = []
    for rope in by_layer_type or [parameters]:
        rope_type = str(rope.get("rope_type", rope.get("type", "default")))
        if rope_type == "longrope":
            switch = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
        elif "dynamic" in rope_type:
            switch = config.max_position_embeddings
        else:
            continue
        if switch is None:
            raise NotImplementedError(
                f"rope_type {rope_type!r} without original_max_position_embeddings is not supported"
            )
        found.append((rope_type, switch))
    return found


def check_rope(config: Any, layout: SharedPromptLayout) -> None:
    """Raises NotImplementedError where the pack's rows would choose other frequencies if each ran alone."""
    for rope_type, switch in length_dependent_rope(config):
        groups = zip(layout.prompt_lens, layout.response_lens, strict=True)
        rows = [prompt_len + r for prompt_len, lens in groups for r in lens]
        if not rows or max(rows) <= switch:
            continue
        if rope_type == "longrope" and min(rows) > switch:
            continue
        raise NotImplementedError(
            f"rope_type {rope_type!r} changes its frequencies beyond {switch} tokens; this pack has rows of "
            f"{min(rows)} to {max(rows)} tokens (prompt and response): put rows of one side into a pack"
            + ("" if rope_type == "longrope" else ", all within that length")
        )
