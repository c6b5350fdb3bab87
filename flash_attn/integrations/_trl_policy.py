"""Shared prompts in TRL's GRPO and RLOO trainers: one override, of the method that computes every log-prob.

Old, reference and policy passes pack their rows, run TRL's own fused LM head on the pack (its labels are
`shift_labels`: with boundary "fork" every pack row predicts one token), and return what the parent's method
returns. Temperature, final softcap, fp32 head and entropy are therefore TRL's.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch

from flash_attn.integrations._sharing import IMPLEMENTATION, METRIC
from flash_attn.integrations._transformers_cost import flop_cost_model
from flash_attn.integrations._transformers_rope import check_rope
from flash_attn.integrations._transformers_support import unwrap
from flash_attn.integrations._trl_aux_loss import RouterLogits
from flash_attn.integrations._trl_batch import SharedStep
from flash_attn.integrations._trl_cost import calibrate_passes
from flash_attn.integrations._trl_models import (
    check_settings,
    check_trainer,
    trainer_refusal,
    use_dualkv,
)
from flash_attn.integrations._trl_rows import PaddedRows
from flash_attn.integrations._trl_settings import SharedPromptSettings, SharingStats, settings_of
from flash_attn.integrations._trl_shuffle import GroupShuffleMixin
from flash_attn.integrations.transformers import packed_forward, register
from flash_attn.shared_prompt.cost_model import CostModel

LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class _Pass(NamedTuple):
    """The arguments of one call of `_get_per_token_logps_and_entropies`, without those for images."""

    model: torch.nn.Module
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    logits_to_keep: int
    batch_size: int | None
    compute_entropy: bool
    compute_aux_loss: bool

    @property
    def options(self) -> dict[str, Any]:
        """What TRL passes by name: overrides may take it as **kwargs."""
        names = ("batch_size", "compute_entropy", "compute_aux_loss")
        return {name: getattr(self, name) for name in names}


class SharedPromptMixin(GroupShuffleMixin):
    """Put before a TRL trainer that has the method: `class MyTrainer(SharedPromptMixin, GRPOTrainer)`.

    The model's attention is set to "dualkv" unless it is already. What cannot be shared runs as in the
    parent, with one `SharedPromptWarning` that names the reason, and is counted in `sharing.fallbacks` and in
    the metric `shared_prompt/fallbacks`. The metrics `shared_prompt/packed_tokens` and
    `shared_prompt/replicated_tokens` are tokens per log-prob pass of this process, padding left out.

    Where a batch is shared the parent's `_get_per_token_logps_and_entropies` is not called. An override that
    must see every pass goes before the mixin: `class MyTrainer(MyOverride, SharedPromptMixin, GRPOTrainer)`.

    LoRA dropout and dropout between layers draw one mask for a shared prompt where the parent draws one per
    row: the same in expectation. Attention dropout is refused.
    """

    model: torch.nn.Module
    ref_model: torch.nn.Module | None
    accelerator: Any
    args: Any
    _metrics: dict[str, Any]

    def __init__(self, *args: Any, shared_prompt: SharedPromptSettings | None = None, **kwargs: Any) -> None:
        check_trainer(type(self), SharedPromptMixin)
        self.shared_prompt = settings_of(shared_prompt)
        self.sharing = SharingStats()
        register(IMPLEMENTATION)
        super().__init__(*args, **kwargs)
        check_settings(self.shared_prompt, self.args, self.accelerator.num_processes)
        models = [m for m in (self.model, self.ref_model) if m is not None]
        self._refusal = trainer_refusal(self, models)
        if self._refusal is None:
            for model in models:
                use_dualkv(model)
            self._cost_model = self.shared_prompt.cost_model or flop_cost_model(self.model)

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> LogProbs:
        call = _Pass(
            model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss
        )
        images = sorted(name for name, value in multimodal.items() if value is not None)
        reason = f"multimodal inputs ({images[0]})" if images else self._refusal
        step, num_forwards, reason = self._agree(call, reason)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics[f"{METRIC}/fallbacks"].append(float(step is None))
        if step is None:
            self.sharing.count_fallback(reason or "another process cannot share", type(self).__name__)
            parent: Any = super()
            return parent._get_per_token_logps_and_entropies(*call[:4], **call.options, **multimodal)
        metrics[f"{METRIC}/packed_tokens"].append(float(step.num_packed_tokens))
        metrics[f"{METRIC}/replicated_tokens"].append(float(step.num_replicated_tokens))
        self.sharing.count_shared(step.num_packed_tokens, step.num_replicated_tokens)
        self.sharing.num_forwards += num_forwards
        return self._shared_pass(call, step, num_forwards)

    def _agree(self, call: _Pass, reason: str | None) -> tuple[SharedStep | None, int, str | None]:
        """(this process's packs, forwards of every process, None), or (None, 0, why not).

        All processes decide alike and run as many forwards, because a forward is a collective: DDP sends
        buffers, FSDP gathers parameters. The slowest process counts.
        """
        step = None
        if reason is None:
            step, reason = self._plan(call)
        facts = [1.0, 0.0, 0.0, 0.0]
        if step is not None:
            facts = [0.0, step.shared_cost, step.replicated_cost, float(len(step.packs))]
        if self.accelerator.num_processes > 1:
            here = torch.tensor([facts], device=call.input_ids.device)
            facts = self.accelerator.gather(here).amax(0).tolist()
        refused, shared, replicated, num_forwards = facts
        if refused:
            return None, 0, reason
        if shared >= replicated:
            return None, 0, "the cost model says that sharing does not pay for this batch"
        return step, int(num_forwards), None

    def _plan(self, call: _Pass) -> tuple[SharedStep | None, str | None]:
        """(this process's packs, None), or (None, why not)."""
        given, reason = PaddedRows.of(call.input_ids, call.attention_mask, call.logits_to_keep)
        if given is None:
            return None, reason
        lens = given.lens
        batch_size = call.batch_size or len(lens)
        budget = batch_size * call.input_ids.shape[1]
        if torch.is_grad_enabled():
            budget = self.shared_prompt.max_packed_tokens or budget
        step = SharedStep.of(given, max_tokens=budget, batch_size=batch_size, cost_model=self._cost_model)
        if step.shares_nothing and self.accelerator.num_processes == 1:
            return None, (
                "no prompt occurs twice in this batch (with per_device_train_batch_size a multiple of "
                "num_generations a batch holds whole groups)"
            )
        if step.over_budget:
            longest = max(sum(lens[row]) for row in step.over_budget)
            self.sharing.tell_once(
                f"a row of {longest} tokens exceeds max_packed_tokens={budget}: "
                "it runs alone, above the budget",
                key="over budget",
            )
        try:
            for packed in step.packs:
                check_rope(unwrap(call.model).config.get_text_config(), packed.layout)
        except NotImplementedError as error:
            return None, str(error)
        return step, None

    def _shared_pass(self, call: _Pass, step: SharedStep, num_forwards: int) -> LogProbs:
        """What the parent's method returns, from `num_forwards` packed forwards."""
        log_probs, entropies, aux_loss = [], [], None
        routers = RouterLogits(call.model) if call.compute_aux_loss and len(step.packs) > 1 else None
        nothing: Any = 0.0  # keeps forwards without scored tokens in the graph: DDP waits for their gradients
        with routers or contextlib.nullcontext():
            for packed in step.packs:
                outputs = self._packed_outputs(call, packed)
                log_probs.append(outputs.log_probs[0].index_select(0, packed.pred_index))
                if call.compute_entropy:
                    entropies.append(outputs.entropy[0].index_select(0, packed.pred_index))
                if packed.layout.num_response_tokens == 0:
                    nothing = nothing + 0 * outputs.log_probs.sum()
                aux_loss = outputs.aux_loss if call.compute_aux_loss else None
        if routers is not None:
            aux_loss = routers.aux_loss(step.packs)
        for _ in range(num_forwards - len(step.packs)):  # other processes have more: join their collectives
            nothing = nothing + 0 * self._packed_outputs(call, step.packs[-1]).log_probs.sum()
        rows = step.in_rows(log_probs) + nothing
        return rows, step.in_rows(entropies) if call.compute_entropy else None, aux_loss

    def _packed_outputs(self, call: _Pass, packed: Any) -> Any:
        options = {"output_router_logits": True} if call.compute_aux_loss else {}
        with self.accelerator.autocast():
            return packed_forward(
                call.model, packed, shift_labels=packed.shift_labels, fused_lm_head=True, **options
            )

    def calibrate(self, *, max_tokens: int = 8192, max_seconds: float = 60.0) -> CostModel:
        """Measures both ways on this model and machine, and decides by the result from now on.

        Runs forward and backward of both passes on random tokens, up to `max_tokens` replicated tokens, for
        about `max_seconds`. Call it before `train`. Gradients are cleared; weights and the random numbers of
        training are left alone. Process 0's result counts for all.
        """
        if self._refusal is not None:
            raise NotImplementedError(f"calibrate needs a model that can share prompts: {self._refusal}")

        def shared(ids: torch.Tensor, mask: torch.Tensor, response_width: int) -> torch.Tensor:
            call = _Pass(self.model, ids, mask, response_width, None, True, False)
            given, _ = PaddedRows.of(ids, mask, response_width)
            assert given is not None
            step = SharedStep.of(
                given, max_tokens=ids.numel(), batch_size=len(ids), cost_model=self._cost_model
            )
            return self._shared_pass(call, step, len(step.packs))[0]

        parent: Any = super()

        def replicated(ids: torch.Tensor, mask: torch.Tensor, response_width: int) -> torch.Tensor:
            call = _Pass(self.model, ids, mask, response_width, None, True, False)
            return parent._get_per_token_logps_and_entropies(*call[:4], **call.options)[0]

        self._cost_model = calibrate_passes(
            self.model, self.accelerator.device, shared=shared, replicated=replicated,
            max_tokens=max_tokens, max_seconds=max_seconds,
        )  # fmt: skip
        error = self._cost_model.fit_error or 0.0
        if error > 0.5:
            self.sharing.tell_once(
                f"the measured times do not fit a cost model (largest relative error {error:.1f}): "
                "calibrate on a machine that is otherwise idle",
                key="fit error",
            )
        return self._cost_model
