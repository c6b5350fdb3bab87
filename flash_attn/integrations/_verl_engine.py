"""veRL's FSDP engines with shared prompts: every micro-batch runs packed, in old, reference and policy passes
and in those of a critic.

Registered for this machine's device and vendor, which veRL asks for before its built-in engine; so nothing of
veRL's is replaced. Losses, temperature, entropy, static padding, fused LM heads and the slicing of
sequence parallelism are the parent's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.device import get_device_id
from verl.utils.metric.utils import AggregationType, Metric
from verl.utils.ulysses import get_ulysses_sequence_parallel_group
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from flash_attn.integrations._sharing import IMPLEMENTATION, METRIC
from flash_attn.integrations._transformers_cost import flop_cost_model
from flash_attn.integrations._transformers_rope import check_rope, length_dependent_rope
from flash_attn.integrations._transformers_support import unwrap
from flash_attn.integrations._verl_attention import ULYSSES_NAME, register_ulysses
from flash_attn.integrations._verl_batch import HostRows, PackedStep
from flash_attn.integrations._verl_plan import Limits, StepPlan, agree, lengthen, rows_of_micro_batches
from flash_attn.integrations._verl_settings import EngineAccount, check_model, refusal, wants_sharing
from flash_attn.integrations.transformers import Injection, inject, receipt
from flash_attn.shared_prompt.ulysses import shard_layout


class SharedPromptEngine(FSDPEngineWithLMHead):
    """`FSDPEngineWithLMHead` that stores, projects and attends each prompt once per micro-batch.

    `sharing` counts what was shared and what was not. Engines of models with another attention than "dualkv"
    behave as their parent, unless `external_lib` names this plug-in: then they raise ValueError.
    """

    sharing: EngineAccount
    _shares: bool
    _run_plan: StepPlan | None = None
    _step: PackedStep | None = None
    _injection: Injection | None = None

    def initialize(self) -> None:
        """Builds the model as the parent does, then refuses models that packs would be wrong for."""
        self.sharing = EngineAccount()
        self._shares = wants_sharing(self.model_config, self.engine_config)
        super().initialize()

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        if self._shares:
            check_model(module, training=not self.engine_config.forward_only)
            self._cost_model = flop_cost_model(module)
            # veRL also keeps the setting as an attribute, which goes into checkpoints: they would not load
            # where "dualkv" is unknown.
            for config in (unwrap(module).config, self.model_config.hf_config):
                vars(config).pop("attn_implementation", None)
            if self.use_ulysses_sp:
                register_ulysses()
            name = ULYSSES_NAME if self.use_ulysses_sp else IMPLEMENTATION
            # Critics are loaded with flash_attention_2, whatever their settings say.
            if unwrap(module).config._attn_implementation != name:
                unwrap(module).set_attn_implementation(name)
        return module

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """The parent's loop over micro-batches of whole groups; over the parent's own where a rank cannot
        share."""
        if not self._shares:
            return super().forward_backward_batch(data, loss_function, forward_only)
        plan = self._plan(data)
        if plan is None:
            output = super().forward_backward_batch(data, loss_function, forward_only)
            tokens = int(data["input_ids"].offsets()[-1])
            counts = {"packed_tokens": tokens, "replicated_tokens": tokens, "fallbacks": 1}
        else:
            output = self._run(plan, data, loss_function, forward_only)
            self._count(plan)
            counts = {
                "packed_tokens": plan.num_packed_tokens,
                "replicated_tokens": plan.num_replicated_tokens,
                "fallbacks": 0,
            }
        for name, value in counts.items():
            # veRL puts "actor/" before it.
            output["metrics"][f"{METRIC}/{name}"] = Metric(AggregationType.SUM, float(value))
        return output

    def _plan(self, data: TensorDict) -> StepPlan | None:
        """The micro-batches of this rank's rows; None where this rank or another cannot share, counted."""
        reason, error, host = refusal(data), None, None
        rows: list[list[int]] = []
        if reason is None:
            host = HostRows.of(data)
            try:
                limits = Limits.of(data, self.ulysses_sequence_parallel_size)
                rows = rows_of_micro_batches(host, limits, self._cost_model)
            except ValueError as found:
                error = found
            reason = self._rope_refusal(host, rows)
        refused, count = agree(reason, error, len(rows), len(data), self.get_data_parallel_group())
        if refused or host is None:
            reason = reason or "another rank cannot share its rows"
            self.sharing.count_fallback(reason, "veRL's own engine")
            return None
        return StepPlan(lengthen(rows, count, host), host)

    def _count(self, plan: StepPlan) -> None:
        self.sharing.count_shared(plan.num_packed_tokens, plan.num_replicated_tokens)
        if plan.num_packed_tokens == plan.num_replicated_tokens:
            self.sharing.tell_once(
                "no prompt stands twice in a micro-batch: nothing is shared. Micro-batches hold one row, "
                "rollout.n is 1, or actor.shuffle takes groups apart"
            )

    def _rope_refusal(self, host: HostRows, rows: list[list[int]]) -> str | None:
        config = unwrap(self.module).config.get_text_config()
        try:
            for own in rows if length_dependent_rope(config) else ():
                check_rope(config, host.pack(own).layout)
        except NotImplementedError as error:
            return str(error)
        return None

    def _run(
        self, plan: StepPlan, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> Any:
        self._run_plan, self._injection = plan, inject(self.module)
        try:
            output = super().forward_backward_batch(plan.attach(data), loss_function, forward_only)
            plan.check_done()
        finally:
            self._injection.remove()
            self._run_plan = self._injection = None
        return output

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> Any:
        """One micro-batch, packed; raises RuntimeError when an attention layer ignored the layout."""
        if self._run_plan is None or self._injection is None:
            return super().forward_step(micro_batch, loss_function, forward_only)
        packed = self._run_plan.next_pack()
        pad = self._get_packed_pad_size(packed.num_packed_tokens)
        pad += -(packed.num_packed_tokens + pad) % self.ulysses_sequence_parallel_size
        self._step = PackedStep(micro_batch, packed, pad, get_device_id())
        layout = self._step.layout
        if self.use_ulysses_sp:
            layout = shard_layout(layout, get_ulysses_sequence_parallel_group())
        self._injection.layout = layout
        try:
            with receipt(self.module, layout):
                return super().forward_step(micro_batch, loss_function, forward_only)
        finally:
            self._step = self._injection.layout = None

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        """The parent's inputs, of the pack."""
        if self._step is None:
            return super().prepare_model_inputs(micro_batch)
        inputs, arguments = super().prepare_model_inputs(self._step.batch)
        if arguments["pad_size"] != self._step.pad:
            raise RuntimeError(
                f"veRL padded the pack by {arguments['pad_size']} rows, the layout holds {self._step.pad}"
            )
        return inputs, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        """The parent's outputs of the pack, in the micro-batch's rows: log_probs, entropy, ... nested (B,
        P + R)."""
        if self._step is None:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        found = super().prepare_model_outputs(output, output_args, self._step.batch, logits_processor_func)
        return self._step.outputs_in_rows(found)


class SharedPromptCritic(SharedPromptEngine, FSDPEngineWithValueHead):
    """The same for critics: values of the pack's rows, where the parent's engine has log-probs."""
