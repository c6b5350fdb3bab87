"""Shared prompts in TRL's DPO trainer: the fused forward of its models packs pairs and whatever shares a
prefix.

The trainer calls its models itself, at several places and through DDP or PEFT wrappers, so the override sits
where TRL's own is: `model.forward(input_ids (B, L), labels, fused_lm_head=True)` packs the rows, runs TRL's
fused LM head on the pack, and returns its per-token fields as (B, L - 1), as without sharing. One forward
stays one forward, so processes need not agree on anything.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from flash_attn.integrations._sharing import IMPLEMENTATION, METRIC
from flash_attn.integrations._transformers_cost import flop_cost_model
from flash_attn.integrations._transformers_rope import check_rope
from flash_attn.integrations._transformers_support import unwrap
from flash_attn.integrations._trl_models import check_fused_forward, trainer_refusal, use_dualkv
from flash_attn.integrations._trl_settings import SharedPromptSettings, SharingStats, settings_of
from flash_attn.integrations.transformers import multiplicity_mask, receipt, register
from flash_attn.shared_prompt import PackedBatch, pack, unpack_responses
from flash_attn.shared_prompt.cost_model import CostModel, GroupLens

PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
_KNOWN = frozenset({"input_ids", "attention_mask", "use_cache", "output_router_logits"})


class SharedPairsMixin:
    """Put before `trl.DPOTrainer`. Rows are grouped by their longest common prefixes: the two responses of
    a pair share their prompt, and pairs share what their prompts have in common (a system prompt).

    Settings, counts, metrics and fallbacks as in `SharedPromptMixin`. Reference log-probs that are computed
    once before training (`precompute_ref_log_probs`) are computed without sharing.
    """

    model: torch.nn.Module
    ref_model: torch.nn.Module | None
    _metrics: dict[str, Any]

    def __init__(self, *args: Any, shared_prompt: SharedPromptSettings | None = None, **kwargs: Any) -> None:
        self.shared_prompt = settings_of(shared_prompt)
        self.sharing = SharingStats()
        register(IMPLEMENTATION)
        super().__init__(*args, **kwargs)
        models = [m for m in (self.model, self.ref_model) if m is not None]
        for model in models:
            check_fused_forward(unwrap(model).forward, type(self).__name__)
        reason = trainer_refusal(self, models)
        cost_model = None
        if reason is None:
            cost_model = self.shared_prompt.cost_model or flop_cost_model(self.model)
            for model in models:
                use_dualkv(model)
        for model in models:
            _share_forward(unwrap(model), _Reporter(self, reason, cost_model))


class _Reporter:
    """What a forward reports to its trainer, without keeping the trainer alive."""

    def __init__(self, trainer: Any, reason: str | None, cost_model: CostModel | None) -> None:
        self._trainer = weakref.ref(trainer)
        self.reason = reason
        self.cost_model = cost_model

    def report(self, packed: PackedBatch | None, reason: str | None) -> None:
        """One forward: packed, or unshared for `reason`."""
        trainer = self._trainer()
        if trainer is None:
            return
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]
        metrics[f"{METRIC}/fallbacks"].append(float(packed is None))
        if packed is None:
            trainer.sharing.count_fallback(str(reason), type(trainer).__name__)
            return
        metrics[f"{METRIC}/packed_tokens"].append(float(packed.num_packed_tokens))
        metrics[f"{METRIC}/replicated_tokens"].append(float(packed.num_replicated_tokens))
        trainer.sharing.count_shared(packed.num_packed_tokens, packed.num_replicated_tokens)
        trainer.sharing.num_forwards += 1


def _share_forward(model: Any, reporter: _Reporter) -> None:
    """Replaces `model.forward`, which TRL's `add_fused_lm_head` has already replaced, by one that packs."""
    fused: Callable[..., Any] = model.forward

    @functools.wraps(fused)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head or "dualkv_layout" in kwargs:
            return fused(*args, fused_lm_head=fused_lm_head, labels=labels, **kwargs)
        packed, reason = _pack_rows(model, reporter, args, labels, kwargs)
        reporter.report(packed, reason)
        if packed is None:
            return fused(*args, fused_lm_head=True, labels=labels, **kwargs)
        return _packed(model, fused, packed, bool(kwargs.get("output_router_logits")))

    model.forward = types.MethodType(forward, model)


def _pack_rows(
    model: Any, reporter: _Reporter, args: tuple[Any, ...], labels: Any, kwargs: dict[str, Any]
) -> tuple[PackedBatch | None, str | None]:
    """(the pack, None), or (None, why not). A row's prompt ends at its first label."""
    if reporter.reason is not None:
        return None, reporter.reason
    extra = sorted(name for name, value in kwargs.items() if name not in _KNOWN and value is not None)
    if args or extra or labels is None or kwargs.get("attention_mask") is None:
        return None, f"the model is called with {extra[0] if extra else 'other arguments than padded rows'}"
    input_ids = kwargs["input_ids"]
    ids, mask, scored = torch.stack([
        input_ids, kwargs["attention_mask"].to(input_ids.dtype), (labels != -100).to(input_ids.dtype)
    ]).cpu()  # fmt: skip
    response = mask.bool() & (scored.cumsum(1) > 0)
    prompt = mask.bool() & ~response
    if not prompt.any(1).all():
        return None, "a row has an empty prompt"
    packed = pack(
        ids, ids, prompt_mask=prompt, response_mask=response, loss_mask=scored, longest_common_prefix=True,
        device=input_ids.device,
    )  # fmt: skip
    try:
        check_rope(model.config.get_text_config(), packed.layout)
    except NotImplementedError as error:
        return None, str(error)
    layout = packed.layout
    groups = [GroupLens(p, r) for p, r in zip(layout.prompt_lens, layout.response_lens, strict=True)]
    num_rows, width = ids.shape
    longest_prompt = int(prompt.sum(1).max())
    padded = [GroupLens(longest_prompt, (width - longest_prompt,) * num_rows)]
    if all(len(g.response_lens) == 1 for g in groups):
        return None, "no two rows of this batch begin alike"
    assert reporter.cost_model is not None
    if not reporter.cost_model.pays(groups, replicated=padded):
        return None, "the cost model says that sharing does not pay for this batch"
    return packed, None


def _packed(model: Any, fused: Callable[..., Any], packed: PackedBatch, router_logits: bool) -> Any:
    """The fused forward on the pack, with per-token fields in the caller's rows."""
    layout = packed.layout
    inputs: dict[str, Any] = {
        "input_ids": packed.input_ids, "position_ids": packed.position_ids, "use_cache": False,
        "dualkv_layout": layout, "shift_labels": packed.shift_labels, "fused_lm_head": True,
    }  # fmt: skip
    if router_logits or getattr(model.config.get_text_config(), "output_router_logits", False):
        inputs.update(
            attention_mask=multiplicity_mask(layout), dualkv_aux_weighted=True, output_router_logits=True
        )
    with receipt(model, layout):
        outputs = fused(**inputs)
    fields: dict[str, Any] = {"loss": outputs.loss, "aux_loss": outputs.aux_loss}
    for name in PER_TOKEN:
        value = getattr(outputs, name)
        if value is not None:
            rows = unpack_responses(value[0].index_select(0, packed.pred_index), packed)
            assert isinstance(rows, torch.Tensor)
            fields[name] = rows[:, 1:].to(value.dtype)  # the label of column t is token t + 1
    if layout.num_response_tokens == 0:
        fields["log_probs"] = fields["log_probs"] + 0 * outputs.log_probs.sum()
    return type(outputs)(**fields)
