"""Sequence parallelism: one pack spread over the ranks of a process group, forward and backward.

    batch = shard(packed, group)                   # this rank's rows; the layout carries the group
    hidden = backbone(batch.input_ids, position_ids=batch.position_ids, dualkv_layout=batch.layout)
    found = log_probs(hidden, batch, head.weight)  # every label's, on every rank, in packed.labels' order

Rows are spread after prompts were stored once, so ranks share P + sum R tokens. Attention exchanges heads
for rows (Ulysses) or brings the keys to the queries (context parallel); the LM head's rows are dealt out
evenly, which also brings a prompt's last hidden state to the ranks that need it (boundary "shared").

Every rank computes the same loss from the same log-probs. Gradients of parameters are then parts of one sum:
add them over the group (FSDP2: `set_gradient_divide_factor(1.0)` where the loss is normalised globally).
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch
import torch.distributed as dist

from flash_attn.shared_prompt import _sharded_method
from flash_attn.shared_prompt._exchange import RowExchange, gather_chunks, take_rows
from flash_attn.shared_prompt._fail_together import fail_together
from flash_attn.shared_prompt._log_probs_checks import check_options, check_pack_rows, check_values
from flash_attn.shared_prompt._sharded_layout import Method, ShardedLayout, shard_layout
from flash_attn.shared_prompt._sharded_method import AttentionShape, Choice
from flash_attn.shared_prompt._ulysses_attention import Options, ulysses_attention
from flash_attn.shared_prompt.layout import SharedPromptLayout, move, outside_inference_mode
from flash_attn.shared_prompt.log_probs import TILE_ELEMENTS, LogProbs
from flash_attn.shared_prompt.log_probs import log_probs as _log_probs
from flash_attn.shared_prompt.packing import IGNORE_INDEX, PackedBatch

__all__ = [
    "AttentionShape", "Choice", "ShardedBatch", "ShardedLayout", "attention", "choose_method",
    "fail_together", "gather_rows", "local_rows", "log_probs", "shard", "shard_layout",
]  # fmt: skip


class ShardedBatch:
    """One rank's part of a `PackedBatch`, with C = layout.num_rows rows, the same on all ranks.

    - `packed`: the whole batch, for `unpack_responses` and `pack_responses`.
    - `input_ids` (1, C), `position_ids` (1, C) or (K, 1, C): what this rank's model is called with, together
      with `layout` (`dualkv_layout=batch.layout`). Rows of padding have id 0 and position 0.
    - `labels` (m,): this rank's share of the labels that count, `label_index` (n,) where all of those lie in
      packed.labels, `share` (begin, end) of this rank in them. `log_probs` brings it their hidden rows.
    """

    __slots__ = (
        "_exchange", "input_ids", "label_index", "labels", "layout", "packed", "position_ids", "share",
    )  # fmt: skip
    packed: PackedBatch
    layout: ShardedLayout
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    label_index: torch.Tensor
    share: tuple[int, int]
    _exchange: RowExchange

    def __init__(self, packed: PackedBatch, layout: ShardedLayout) -> None:
        self.packed, self.layout = packed, layout
        self.input_ids = local_rows(packed.input_ids[0], layout)[None]
        positions = packed.position_ids.flatten(0, -2).t()
        self.position_ids = local_rows(positions, layout).t().reshape(*packed.position_ids.shape[:-1], -1)
        labels, pred_index = packed.labels.cpu(), packed.pred_index.cpu()
        counted = (labels != IGNORE_INDEX).nonzero()[:, 0]
        num_ranks, num_labels = layout.sp_group.size(), counted.numel()
        bounds = [num_labels * rank // num_ranks for rank in range(num_ranks + 1)]
        needs = [layout.place[pred_index[counted[a:b]]] for a, b in itertools.pairwise(bounds)]
        self._exchange = RowExchange(needs, layout.num_rows, layout.rank).to(layout.device)
        self.share = (bounds[layout.rank], bounds[layout.rank + 1])
        self.label_index = move(counted, layout.device)
        self.labels = packed.labels.index_select(0, self.label_index[slice(*self.share)])

    @property
    def num_packed_tokens(self) -> int:
        """Tokens that all ranks together process, padding left out."""
        return self.packed.num_packed_tokens

    @property
    def shift_labels(self) -> torch.Tensor:
        """(1, C): the token that each of this rank's rows must predict, -100 where none. Only boundary
        "fork", where the predicting row is always on the same rank."""
        labels = self.packed.shift_labels[0].index_select(0, self.layout.rows)
        return labels.masked_fill(self.layout.is_padding, IGNORE_INDEX)[None]


@outside_inference_mode
def shard(
    packed: PackedBatch,
    group: dist.ProcessGroup,
    *,
    method: Method | Literal["auto"] = "ulysses",
    num_chunks: int = 1,
    shape: AttentionShape | None = None,
) -> ShardedBatch:
    """This rank's part of `packed`, which every rank of `group` holds in the same way.

    `method` "ulysses": attention exchanges heads for rows; the number of query heads must be a multiple of
    the group's size, key heads may be fewer (they are then sent several times). `num_chunks` > 1: in so many
    steps, each exchange beside the attention of another step. "context": queries stay put and the keys they
    see are brought to them, gradients of keys are added in fp32; cheaper where key heads are few and ranks
    many. "auto": what `choose_method` measures for the model's attention `shape`.

    Reads labels and row indices on the host: for a pack on a GPU this waits for it, once.
    """
    if not isinstance(packed, PackedBatch):
        raise TypeError(f"packed must be a PackedBatch, got {type(packed).__name__}")
    if method != "auto":
        return ShardedBatch(packed, shard_layout(packed.layout, group, method, num_chunks))
    if shape is None:
        raise ValueError('shape must be given with method "auto": AttentionShape(num_heads, ...), got None')
    if not isinstance(shape, AttentionShape):
        raise TypeError(f"shape must be an AttentionShape, got {type(shape).__name__}")
    choice = choose_method(packed.layout, group, shape)
    return ShardedBatch(packed, shard_layout(packed.layout, group, choice.method, choice.num_chunks))


def choose_method(
    layout: SharedPromptLayout, group: dist.ProcessGroup, shape: AttentionShape, *, repeats: int = 3
) -> Choice:
    """The fastest method for this pack and group, measured: a collective call.

    Times forward and backward of one attention layer each way, on random rows with the pack's own lengths,
    and remembers the answer per group, shape and size of pack (within a factor of two).
    """
    return _sharded_method.choose(_attend, layout, group, shape, repeats)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: ShardedLayout, **options: Any) -> Any:
    from flash_attn import flash_attn_shared_prompt_func

    return flash_attn_shared_prompt_func(q, k, v, layout, **options)


def local_rows(values: torch.Tensor, layout: ShardedLayout) -> torch.Tensor:
    """This rank's rows of per-pack-row `values` (T, ...) that every rank has: (layout.num_rows, ...), padding
    0."""
    if values.shape[:1] != (layout.whole.num_rows,):
        raise ValueError(
            f"values must have the {layout.whole.num_rows} rows of the pack, got {list(values.shape)}"
        )
    padding = layout.is_padding.view(-1, *[1] * (values.dim() - 1))
    return values.index_select(0, layout.rows).masked_fill(padding, 0)


def gather_rows(values: torch.Tensor, layout: ShardedLayout) -> torch.Tensor:
    """Per-row values of all ranks (layout.num_rows, ...) as (T, ...) in the pack's order, on every rank.

    For values of critics, for instance. Backward expects that all ranks computed the same loss.
    """
    if values.shape[:1] != (layout.num_rows,):
        raise ValueError(f"values must have this rank's {layout.num_rows} rows, got {list(values.shape)}")
    gathered = gather_chunks(values, layout.sp_group)
    return gathered.index_select(0, move(layout.place, values.device))


def log_probs(
    hidden: torch.Tensor,
    batch: ShardedBatch,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    compute_entropy: bool = True,
    tile_elements: int = TILE_ELEMENTS,
) -> LogProbs:
    """`flash_attn.shared_prompt.log_probs` of the whole batch from this rank's hidden rows, on every rank.

    hidden (C, hidden_size) or (1, C, hidden_size) -> log-probs and entropy (n,) in the order of
    `batch.packed.labels`, 0 at ignored labels. Each rank computes an equal share of the labels, whichever
    rank holds their rows. `temperature` is a number or one per label of the whole batch. The gradient of
    `weight` is this rank's part. Collective, forward and backward; every rank must derive the same loss.
    """
    check_pack_rows(hidden, batch.layout.num_rows)
    rows = hidden.flatten(0, -2) if hidden.dim() == 3 else hidden
    group, (begin, end) = batch.layout.sp_group, batch.share
    own = batch.label_index[begin:end]
    # Of all labels, on every rank: what only one rank refused would leave the others waiting.
    vocab_size = rows.shape[-1] if weight is None else weight.shape[0]
    labels = batch.packed.labels
    check_options(labels, vocab_size, temperature, softcap, IGNORE_INDEX, tile_elements, rows.dtype)
    check_values(labels, None, vocab_size, rows.shape[0], IGNORE_INDEX)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.reshape(-1).index_select(0, own)
    received = take_rows(rows, batch._exchange, group, expand=False)
    found = _log_probs(
        received, batch.labels, weight, bias, pred_index=batch._exchange.take, temperature=temperature,
        softcap=softcap, compute_entropy=compute_entropy, tile_elements=tile_elements,
    )  # fmt: skip
    values = torch.stack([x for x in found if x is not None])
    longest = max(-(-batch.label_index.numel() // group.size()), 1)
    padded = torch.nn.functional.pad(values.t(), (0, 0, 0, longest - values.shape[1]))
    gathered = gather_chunks(padded, group).index_select(0, _places(batch, longest))
    whole = gathered.new_zeros(batch.packed.labels.shape[0], gathered.shape[1])
    whole = whole.index_copy(0, batch.label_index, gathered)
    return LogProbs(whole[:, 0], whole[:, 1] if compute_entropy else None)


def _places(batch: ShardedBatch, longest: int) -> torch.Tensor:
    """Where each counted label's value lies among the ranks' chunks of `longest`."""
    num_ranks, n = batch.layout.sp_group.size(), batch.label_index.numel()
    bounds = torch.tensor([n * rank // num_ranks for rank in range(num_ranks + 1)])
    rank = torch.repeat_interleave(bounds.diff())
    return move(rank * longest + torch.arange(n) - bounds[rank], batch.layout.device)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: SharedPromptLayout,
    *,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What `flash_attn_shared_prompt_func` does with a sharded layout: call that.

    q (C, H, D), k (C, Hk, D), v (C, Hk, Dv), this rank's rows -> out (C, H, Dv), lse (H, C). Collective.
    """
    from flash_attn import _calls, _checked, checks

    if not isinstance(layout, ShardedLayout):
        raise TypeError(f"layout must be a ShardedLayout, got {type(layout).__name__}")
    if q.shape[0] != layout.num_rows:
        raise ValueError(f"q must have this rank's {layout.num_rows} rows, got {q.shape[0]}")
    window = (int(window_size[0]), int(window_size[1]))
    if layout.context is not None:
        return _context(
            q, k, v, layout, softmax_scale, window, softcap, sinks, deterministic, return_softmax_lse
        )
    head_dim_v, scale = v.shape[-1], _checked.scale_of(softmax_scale, q)
    checks.no_forward_mode(q, k, v, sinks)
    padded, padded_v = _checked.op_head_dims(q, v)
    widths = (padded, padded, padded_v)
    q, k, v = (_calls.unit_stride_rows(x, d) for x, d in zip((q, k, v), widths, strict=True))
    with_lse = return_softmax_lse or sinks is not None
    options = Options(scale, window, float(softcap), checks.flag("deterministic", deterministic), with_lse)
    out, lse = ulysses_attention(q, k, v, layout, options)
    out = out[..., :head_dim_v]
    if sinks is not None:
        assert lse is not None
        out = _calls.apply_sinks(out, lse, sinks)
    return (out, lse.t()) if return_softmax_lse and lse is not None else out


def _context(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: ShardedLayout,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
    sinks: torch.Tensor | None,
    deterministic: bool,
    return_softmax_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Keys and values are brought to this rank's queries in one exchange."""
    from flash_attn import _calls, _checked

    keys = layout.context
    assert keys is not None
    head_dim = k.shape[-1]
    brought = take_rows(torch.cat([k, v], -1), keys.exchange, layout.sp_group, expand=True)
    k, v = brought[..., :head_dim], brought[..., head_dim:]
    plan: list[torch.Tensor] = []
    if q.device.type == "cuda":
        plan = layout.plan(
            head_dim=_checked.kernel_head_dim(head_dim), num_heads_k=k.shape[1], dtype=q.dtype,
            window_size=window_size,
        )  # fmt: skip
    out, lse = _calls.attention(
        q, k, v, None, None, keys.segments, keys.segments_host, plan, keys.max_seqlen_q, keys.max_seqlen_k,
        softmax_scale, True, window_size, softcap, sinks, deterministic,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out
