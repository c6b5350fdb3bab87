"""The public functions: flash-attn's dense, varlen and packed calls, and attention over shared prompts.

    out = softmax(mask(q k^T * softmax_scale)) v
They check their arguments, describe the batch as `segments` (see _pieces.py) and call
torch.ops.flash_attn.fwd. Causal masks are aligned bottom-right, windows are inclusive on both sides, rows
without keys give out 0 and lse -inf. lse is the natural log of the sum of exp of the scaled scores, fp32
(fp64 for fp64 inputs).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_attn import _kvcache, _shared_decode, checks
from flash_attn._calls import (
    Output,
    attend,
    attention,
    autocast,
    dense,
    unbind,
    varlen,
    varlen_segments,
)
from flash_attn._checked import checked, kernel_head_dim
from flash_attn._ops import Batch
from flash_attn._upstream import (  # noqa: F401 (imported from here by other libraries)
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
    maybe_contiguous,
    round_multiple,
)

if TYPE_CHECKING:
    from flash_attn.shared_prompt import SharedPromptLayout


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """Attention of a padded batch: q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) -> out (B, Sq, H,
    Dv).

    fp16 or bf16 on GPUs, also fp32 and fp64 on the CPU. H is a multiple of Hk; Dv <= D. `softmax_scale`
    defaults to D**-0.5 (on GPUs it must be positive). `window_size` (left, right): keys from position - left
    to position + right, -1 is unbounded; `causal` caps right at 0. `softcap` > 0: scores become softcap *
    tanh(scores / softcap). `alibi_slopes` fp32 (H,) or (B, H): scores -= slope * |row's position - key's|.
    `dropout_p`: probabilities are dropped in steps of 1/256, the others divided by 1 - dropout_p, with a
    state from torch's generator. Both: head dims up to 256 on GPUs, the sm_80 kernels; dropout not with
    softcap. `return_attn_probs` adds lse (B, H, Sq) fp32 (causal with ALiBi, as in flash-attn: of scores +
    slope * key's position) and with dropout the probabilities, negative where dropped, (B, H, Sq, Sk) rounded
    up to 128, made for tests; else an empty tensor. Forward-mode derivatives (jvp) raise NotImplementedError.
    """
    return dense(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_func` with keys and values in one tensor: kv (B, Sk, 2, Hk, D)."""
    k, v = unbind(kv, "kv", 2, 5)
    return dense(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_func` with everything in one tensor: qkv (B, S, 3, H, D)."""
    q, k, v = unbind(qkv, "qkv", 3, 5)
    return dense(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Output:
    """Attention of packed sequences: q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv) -> out
    (total_q, H, Dv).

    `cu_seqlens_q`, `cu_seqlens_k` (batch + 1,) int32 on q's device: sequence b has rows [cu[b], cu[b + 1]).
    Rows behind the last sequence give 0. `max_seqlen_*` are upper bounds. `return_attn_probs` adds lse (H,
    total_q) fp32 and dropout's probabilities. Values of cu_seqlens are checked on the CPU, and on GPUs with
    FLASH_ATTN_CHECK=1. On GPUs what is made of them is kept until torch's version counters of the two tensors
    change: write to them with in-place operations, not through `.data` or foreign kernels. With `block_table`
    (batch, pages) int32, k and v are pages (num_blocks, page_size, Hk, D), and sequence b has the first
    cu_seqlens_k[b + 1] - cu_seqlens_k[b] rows of its own; forward only, gathered first. Otherwise as
    `flash_attn_func`.
    """
    return varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_varlen_func` with keys and values in one tensor: kv (total_k, 2, Hk, D)."""
    k, v = unbind(kv, "kv", 2, 4)
    return varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_varlen_func` with everything in one tensor: qkv (total, 3, H, D)."""
    q, k, v = unbind(qkv, "qkv", 3, 4)
    return varlen(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        names=("cu_seqlens", "cu_seqlens", "max_seqlen", "max_seqlen"),
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, H, D) on a cache of keys and values, to which k, v are appended in place.

    `k_cache`, `v_cache` (batch of the cache, seqlen, Hk, D), or pages (num_blocks, page_size, Hk, D) with
    `block_table` (B, pages) int32. `cache_seqlens`, an int or (B,): keys in the cache before the call
    (default: all). `k`, `v` (B, seqlen_new, Hk, D) are written behind them. `rotary_cos`, `rotary_sin`
    (positions, rotary_dim / 2) turn k and q at their positions (without `causal` and window, all of q at the
    first new one). `cache_batch_idx` (B,): the sequence of the cache for each of q; `cache_leftpad` (B,):
    where its keys begin (rotary positions count from the cache's first row all the same). `num_splits`:
    parts in which the keys are processed side by side, 0 chooses.
    Masks as in `flash_attn_func` with Sk = keys after the call. Returns out (B, Sq, H, Dv), with
    `return_softmax_lse` also lse (B, H, Sq) fp32. Not differentiable. Positions outside the cache raise where
    values are read (CPU, FLASH_ATTN_CHECK=1); else new keys there are not written (padding of a batch: -1
    keys), and lengths are clamped to the cache. ALiBi as in `flash_attn_func`.
    """
    out, lse = _kvcache.with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        block_table, softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes,
        num_splits,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def flash_attn_shared_prompt_with_kvcache(
    q: Tensor,
    k_prompt: Tensor,
    v_prompt: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    prompt_seqlens: int | Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_with_kvcache` of B sequences on G prompts, each stored once and read once.

    `k_prompt`, `v_prompt` (G, P, Hk, D): sequences g * B / G to (g + 1) * B / G - 1 of q (B, Sq, H, D) stand
    on the first `prompt_seqlens[g]` keys of prompt g (default: all), then on their own in `k_cache`,
    `v_cache` (B, seqlen, Hk, D), of which `cache_seqlens` are there and behind which `k`, `v` are appended.
    Rotary positions count through the prompt. Where `causal`, every sequence must have a key of its own for
    each of its Sq queries. Other arguments, results and errors as there. Not differentiable.
    """
    out, lse = _shared_decode.with_kvcache(
        q, k_prompt, v_prompt, k_cache, v_cache, k, v, rotary_cos, rotary_sin, prompt_seqlens, cache_seqlens,
        softmax_scale, causal, softcap, rotary_interleaved, num_splits,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def flash_attn_dualkv_varlen_func(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_decoded: Tensor,
    v_decoded: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k_decoded: Tensor,
    max_seqlen_q: int,
    context_seqlen: int,
    max_seqlen_k_decoded: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Packed sequences that share one context: sequence b sees the context's P = `context_seqlen` keys, then
    its own.

    q (total_q, H, D), k_context, v_context (P, Hk, D), k_decoded, v_decoded (total_k, Hk, D) -> out (total_q,
    H, D); with `return_softmax_lse` also lse (H, total_q) fp32. `cu_seqlens_*` (batch + 1,) int32. Causal is
    aligned bottom-right: query row o of sequence b stands at P + Lk_b - Lq_b + o, among the context's keys
    too where Lq_b > Lk_b. `window_size`, `softcap` and dtypes as in `flash_attn_func`. `sinks` (H,):
    learnable logit of one more key per head with value 0 (not part of lse). Differentiable in all tensors and
    through lse. Formula: DualKV, arXiv 2605.15422.
    """
    q, k_context, v_context, k_decoded, v_decoded = autocast(q, k_context, v_context, k_decoded, v_decoded)
    checks.qkv(q, k_decoded, v_decoded, 3, ("q", "k_decoded", "v_decoded"))
    checks.qkv(q, k_context, v_context, 3, ("q", "k_context", "v_context"))
    checks.options(softcap=softcap, window_size=window_size, dtype=q.dtype)
    checks.sinks(sinks, q)
    max_seqlen_q = checks.length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k_decoded = checks.length("max_seqlen_k_decoded", max_seqlen_k_decoded)
    context_seqlen = checks.length("context_seqlen", context_seqlen)
    if context_seqlen > k_context.shape[0]:
        raise ValueError(
            f"context_seqlen must be at most k_context's {k_context.shape[0]} rows, got {context_seqlen}"
        )
    if context_seqlen < k_context.shape[0]:  # unused rows may hold anything
        k_context, v_context = k_context[:context_seqlen], v_context[:context_seqlen]
    if k_context.shape[1] != k_decoded.shape[1] or v_context.shape[2] != v_decoded.shape[2]:
        decoded, context = (
            [list(x.shape[1:]) for x in pair] for pair in ((k_decoded, v_decoded), (k_context, v_context))
        )
        raise ValueError(
            f"k_context, v_context must have the heads and head dims of the decoded {decoded}, got {context}"
        )
    checks.cu_seqlens_pair(
        ("cu_seqlens_q", cu_seqlens_q, q.shape[0], "max_seqlen_q", max_seqlen_q),
        (
            "cu_seqlens_k_decoded",
            cu_seqlens_k_decoded,
            k_decoded.shape[0],
            "max_seqlen_k_decoded",
            max_seqlen_k_decoded,
        ),
        q.device,
    )
    segments = varlen_segments(cu_seqlens_q, cu_seqlens_k_decoded, context_seqlen)
    out, lse = attention(
        q, k_decoded, v_decoded, k_context, v_context, segments, None, [],
        max_seqlen_q, max_seqlen_k_decoded, softmax_scale, causal, window_size, softcap, sinks, deterministic,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def flash_attn_shared_prompt_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SharedPromptLayout,
    *,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of groups of responses, each group's prompt stored and attended once.

    q (T, H, D), k (T, Hk, D), v (T, Hk, Dv), packed as `layout` says: [prompt 1, its responses, prompt 2,
    ...] -> out (T, H, Dv), equal to the batch in which every response carries its own copy of the prompt.
    With `return_softmax_lse` also lse (H, T) fp32. One launch per direction. Rows behind the layout's total
    give 0. Options as in `flash_attn_dualkv_varlen_func`. With a layout of `shared_prompt.ulysses`, q, k and
    v are one rank's rows, and all ranks of its group must call.
    """
    from flash_attn.shared_prompt.layout import SharedPromptLayout

    if not isinstance(layout, SharedPromptLayout):
        raise TypeError(f"layout must be a SharedPromptLayout, got {type(layout).__name__}")
    q, k, v = autocast(q, k, v)
    call = checked(q, k, v, 3, 0.0, softmax_scale, True, window_size, softcap, deterministic)
    checks.sinks(sinks, q)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"k must have q's {q.shape[0]} rows, got {k.shape[0]}")
    if q.shape[0] < layout.num_rows:
        raise ValueError(f"q must have at least the layout's {layout.num_rows} rows, got {q.shape[0]}")
    if layout.device != q.device:
        raise ValueError(f"layout must be on q's device {q.device}, got {layout.device}")
    if layout.sp_group is not None:
        from flash_attn.shared_prompt import ulysses

        return ulysses.attention(
            q, k, v, layout, softmax_scale=softmax_scale, window_size=window_size, softcap=softcap,
            sinks=sinks, deterministic=deterministic, return_softmax_lse=return_softmax_lse,
        )  # fmt: skip
    # The op builds its own plan where the layout's does not fit (rows behind it) or would have to be traced.
    plan: list[Tensor] = []
    if q.device.type == "cuda" and q.shape[0] == layout.num_rows and not torch.compiler.is_compiling():
        plan = layout.plan(
            head_dim=kernel_head_dim(q.shape[-1]), num_heads_k=k.shape[1], dtype=q.dtype,
            window_size=window_size,
        )  # fmt: skip
    batch = Batch(
        layout.segments, layout.segments_host, plan, layout.max_seqlen_q, layout.max_seqlen_k, *call.options
    )
    out, lse = attend(call, q, k, v, None, None, batch, sinks)
    return (out, lse) if return_softmax_lse else out


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
USE_TRITON_ROCM = False


def __getattr__(name: str) -> Any:
    """The autograd classes, and the extension module by the name it has here in flash-attn."""
    if name.startswith("FlashAttn") and name.endswith("Func"):
        from flash_attn import _functions

        if hasattr(_functions, name):
            return getattr(_functions, name)
    if name == "flash_attn_gpu":
        import flash_attn_2_cuda

        return flash_attn_2_cuda
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
