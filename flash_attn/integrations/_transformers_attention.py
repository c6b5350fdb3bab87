"""The attention function registered in transformers: out = softmax(scale q k^T + mask) v, by the ops of
this package.

Called by every attention layer with q (B, H, Lq, D), k (B, Hk, Lk, D), v (B, Hk, Lk, Dv); picks, per call,
the shared-prompt op (a layout came as a kwarg), varlen attention (padding or packed sequences) or dense
attention. Head dim, scale, window, softcap and sinks are this call's own, so models may mix them. What
cannot be computed is refused by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from flash_attn._calls import apply_sinks
from flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_shared_prompt_func,
    flash_attn_varlen_func,
)
from flash_attn.integrations import _transformers_receipt as receipts
from flash_attn.integrations._transformers_passing import window_is_hidden
from flash_attn.integrations._transformers_rope import check_rope
from flash_attn.integrations._transformers_sequences import (
    VARLEN_NAMES,
    cached,
    has_holes,
    sequence_bounds,
    unpad_rows,
)
from flash_attn.shared_prompt.layout import SharedPromptLayout

_ABSENT: Any = object()

# Arguments that do not change what attention computes, or that were used before it.
_HARMLESS = frozenset({
    *VARLEN_NAMES, "position_ids", "use_cache", "cache_position", "num_items_in_batch", "return_dict",
    "output_hidden_states", "output_router_logits", "logits_to_keep", "layer_idx", "deterministic",
    "dualkv_aux_weighted", "shift_labels",
})  # fmt: skip
_CROSS_ATTENTION = "cross attention and encoder-decoder models are not supported, got {}"
_REFUSED = {
    "output_attentions": "attention probabilities are never stored",
    "head_mask": "head masks",
    "layer_head_mask": "head masks",
    "position_bias": "additive position biases",
    "alibi": "additive position biases",
    "cache": "paged caches (continuous batching)",
    "block_table": "paged caches (continuous batching)",
    "encoder_hidden_states": "cross attention",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}


# Layouts, one per batch -> id of a configuration that was found fit for it -> (the configuration, does it ask
# for router logits). A model's layers share theirs, and reading it takes longer than the rest of a call.
_fit: WeakKeyDictionary[SharedPromptLayout, dict[int, tuple[Any, bool]]] = WeakKeyDictionary()


class _Options(NamedTuple):
    """What one layer asks for, in this package's terms."""

    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    sinks: torch.Tensor | None
    deterministic: bool


def dualkv_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = _ABSENT,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    dualkv_layout: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: (B, Lq, H, Dv), and None for the probabilities. Keys and values are not
    repeated for GQA.

    `sliding_window` counts the row itself, in positions of its own sequence. `s_aux` (H,) are sink logits.
    Raises NotImplementedError for dropout, attention probabilities, biases, 4-D masks, cross attention and
    arguments that are not known here; ValueError for arguments that contradict each other.
    """
    _refuse_unknown(module, dropout, kwargs)
    if dualkv_layout is None:
        _refuse_config(module)
    receipts.record(module, dualkv_layout)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    num_keys = k.shape[1]
    if dualkv_layout is not None and getattr(dualkv_layout, "sp_group", None) is not None:
        num_keys = dualkv_layout.whole.num_rows  # k has this rank's rows only
    window = _window(module, sliding_window, causal, num_keys)
    deterministic = bool(kwargs.get("deterministic") or torch.are_deterministic_algorithms_enabled())
    options = _Options(scaling, bool(causal), window, softcap or 0.0, s_aux, deterministic)
    if dualkv_layout is not None:
        return _shared_prompt(module, q, k, v, attention_mask, dualkv_layout, options, kwargs), None
    if not (
        attention_mask is None
        or (isinstance(attention_mask, torch.Tensor) and attention_mask.dim() in (2, 5))
    ):
        shape = list(getattr(attention_mask, "shape", ()))
        raise NotImplementedError(
            "dualkv attention takes 2-D padding masks, "
            f"got attention_mask {type(attention_mask).__name__} {shape}"
        )
    if not options.causal and q.shape[1] != k.shape[1]:
        raise NotImplementedError(
            f"cross attention is not supported: {q.shape[1]} queries, {k.shape[1]} keys, not causal"
        )
    if attention_mask is not None and (attention_mask.dim() == 2 or attention_mask.dtype == torch.bool):
        return _padded(q, k, v, attention_mask, options, kwargs), None
    bounds = sequence_bounds(q, k, attention_mask, kwargs)
    if bounds is not None:
        return _varlen(q, k, v, *bounds, options), None
    return _dense(q, k, v, options), None


def _refuse_unknown(module: torch.nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise NotImplementedError(
            f"attention dropout is not supported, got dropout={dropout}: set it to 0 or call model.eval()"
        )
    if getattr(module, "is_cross_attention", False):
        raise NotImplementedError(_CROSS_ATTENTION.format(type(module).__name__))
    for name, value in kwargs.items():
        if name in _HARMLESS or value is None or value is False:
            continue
        if name in _REFUSED:
            raise NotImplementedError(f"{name} is not supported: {_REFUSED[name]}")
        raise NotImplementedError(
            f"dualkv attention does not know the argument {name!r}, so it does not ignore it"
        )


def _refuse_config(module: torch.nn.Module) -> None:
    config = getattr(module, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(_CROSS_ATTENTION.format(type(module).__name__))
    if getattr(config, "output_attentions", False):
        raise NotImplementedError(f"output_attentions is not supported: {_REFUSED['output_attentions']}")


def _fits(module: torch.nn.Module, layout: SharedPromptLayout) -> bool:
    """Whether the module's configuration asks for router logits; raises where the pack cannot run under
    it."""
    config: Any = module.config
    # Neither in a graph nor for layouts that take over other lengths (`copy_`).
    changes = torch.compiler.is_compiling() or layout.capacities is not None
    known = {} if changes else _fit.setdefault(layout, {})
    if id(config) not in known:
        _refuse_config(module)
        check_rope(config, layout)
        known[id(config)] = config, bool(getattr(config, "output_router_logits", False))
    return known[id(config)][1]


def _window(module: torch.nn.Module, sliding_window: Any, causal: bool, num_keys: int) -> tuple[int, int]:
    if sliding_window is _ABSENT:
        if window_is_hidden(module):
            raise NotImplementedError(
                f"{type(module).__name__} has a sliding window but does not tell attention its size"
            )
        return -1, -1
    if sliding_window is None or sliding_window >= num_keys:
        return -1, -1
    if sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 (the row itself), got {sliding_window}")
    if not causal:
        raise NotImplementedError(
            "sliding windows of modules that are not causal are not supported: their size is ambiguous"
        )
    return sliding_window - 1, 0


def _shared_prompt(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layout: SharedPromptLayout,
    options: _Options,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    _check_pack(module, q, k, layout, options, kwargs)
    wants_router = _fits(module, layout) or kwargs.get("output_router_logits")
    _check_pack_mask(attention_mask, layout, wants_router, kwargs.get("dualkv_aux_weighted", False))
    # Not q[0]: its gradient is a copy into zeros, six launches a layer.
    out: Any = flash_attn_shared_prompt_func(
        q.squeeze(0), k.squeeze(0), v.squeeze(0), layout,
        softmax_scale=options.softmax_scale, window_size=options.window_size, softcap=options.softcap,
        sinks=options.sinks, deterministic=options.deterministic,
    )  # fmt: skip
    return out.unsqueeze(0)


def _check_pack(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    layout: SharedPromptLayout,
    options: _Options,
    kwargs: dict[str, Any],
) -> None:
    """Raises unless the call is one causal row of the layout's tokens, which nothing else describes."""
    if not isinstance(layout, SharedPromptLayout):
        raise TypeError(f"dualkv_layout must be a SharedPromptLayout, got {type(layout).__name__}")
    if q.shape[0] != 1 or q.shape[1] != k.shape[1]:
        raise ValueError(
            "a shared-prompt pack must be one row without cached keys (use_cache=False), got "
            f"{q.shape[0]} rows, {q.shape[1]} queries, {k.shape[1]} keys"
        )
    # Not in a graph, where the comparison would compile anew for each layout.
    compiling = torch.compiler.is_compiling()
    if not compiling and layout.capacities is None and q.shape[1] != layout.total:
        raise ValueError(
            f"dualkv_layout must describe the pack's {q.shape[1]} tokens, got a layout of {layout.total} rows"
        )
    if not options.causal:
        raise NotImplementedError(
            f"a shared-prompt pack needs causal attention, {type(module).__name__} is not causal"
        )
    given = [name for name in VARLEN_NAMES if kwargs.get(name) is not None]
    if given:
        raise ValueError(
            f"a shared-prompt pack must come without {given[0]}: its layout describes the sequences"
        )


def _check_pack_mask(
    attention_mask: torch.Tensor | None, layout: SharedPromptLayout, wants_router: Any, weighted: bool
) -> None:
    """Raises where the mask says more than the layout, and where a router's auxiliary loss needs one that
    does (`weighted`)."""
    if wants_router and layout.sp_group is not None:
        raise NotImplementedError(
            "output_router_logits is not supported with sequence parallelism: the auxiliary loss of a rank's "
            "rows is not a part of that of the pack"
        )
    # The row ids that `dualkv_mask` makes of the pack's position ids say less than the layout, and a
    # multiplicity is 0 behind the layout's total only; anything else says more.
    known = attention_mask is None or (
        isinstance(attention_mask, torch.Tensor)
        and attention_mask.dim() == 5
        and (attention_mask.dtype == torch.int64 or (weighted and layout.num_rows > layout.total))
    )
    if not known:
        raise NotImplementedError(
            "a shared-prompt pack takes no attention_mask other than ones (MoE models: the multiplicity); a "
            "wrapped sdpa makes one of the pack's positions unless packed_forward or a receipt is used; "
            f"got {getattr(attention_mask, 'dtype', None)} {list(getattr(attention_mask, 'shape', ()))}"
        )
    if wants_router and not weighted:
        raise NotImplementedError(
            "output_router_logits: the auxiliary loss of a shared-prompt pack would count each prompt once. "
            "Call packed_forward, or pass attention_mask=multiplicity_mask(layout), dualkv_aux_weighted=True"
        )


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: _Options) -> torch.Tensor:
    found: Any = flash_attn_func(q, k, v, **_flash_arguments(options))
    if options.sinks is None:
        return found
    out, lse, _ = found
    return apply_sinks(out, lse.transpose(1, 2), options.sinks)


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: _Options,
) -> torch.Tensor:
    """q (B, Lq, H, D) or (total_q, H, D), likewise k and v; the result has q's leading dimensions."""
    flat_q, flat_k, flat_v = (x.flatten(0, -3) for x in (q, k, v))
    found: Any = flash_attn_varlen_func(
        flat_q,
        flat_k,
        flat_v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        **_flash_arguments(options),
    )
    if options.sinks is not None:
        out, lse, _ = found
        found = apply_sinks(out, lse.transpose(0, 1), options.sinks)
    return found.unflatten(0, q.shape[:-2])


def _flash_arguments(options: _Options) -> dict[str, Any]:
    arguments = options._asdict()
    return {"return_attn_probs": arguments.pop("sinks") is not None, **arguments}


def _padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    options: _Options,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attention of the real tokens only; rows of padding give 0. The queries are the last Lq columns of the
    mask."""
    if any(kwargs.get(name) is not None for name in VARLEN_NAMES):
        raise ValueError("cu_seq_lens_q/k must come without a padding mask, got both")
    batch, num_queries, num_keys = q.shape[0], q.shape[1], mask.shape[-1]
    if mask.shape[0] != batch or not num_queries <= num_keys <= k.shape[1]:
        raise ValueError(
            f"attention_mask must be ({batch}, {num_queries} to {k.shape[1]} keys), got {list(mask.shape)}"
        )
    if options.window_size[0] >= 0 and cached(mask, has_holes):
        raise NotImplementedError("sliding windows over an attention_mask with holes are not supported")
    rows_k, cu_seqlens_k, max_seqlen_k = cached(mask, unpad_rows, num_keys)
    rows_q, cu_seqlens_q, max_seqlen_q = cached(mask, unpad_rows, num_queries)
    k, v = (x[:, :num_keys].flatten(0, 1).index_select(0, rows_k) for x in (k, v))
    flat_q = q.flatten(0, 1).index_select(0, rows_q)
    out = _varlen(flat_q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options)
    padded = out.new_zeros(batch * num_queries, *out.shape[1:]).index_copy(0, rows_q, out)
    return padded.unflatten(0, (batch, num_queries))
