"""Shared prompts in veRL (0.9.1, its default trainer, FSDP and FSDP2): two settings, no fork.

    actor_rollout_ref.model.external_lib=flash_attn.integrations.verl
    +actor_rollout_ref.model.override_config.attn_implementation=dualkv

veRL imports this module in the driver and in every worker, which is what activates it: actor and reference
engines then store, project and attend each prompt once per micro-batch, and the driver deals whole groups to
ranks. `actor/shared_prompt/packed_tokens`, `replicated_tokens` and `fallbacks` in the metrics tell how much
was shared, per mini-batch and rank. Critics do with the same two settings of `critic.model` (and
critic.shuffle=False, which keeps rows of a prompt side by side), else they run as before.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

from verl.utils.device import get_device_name, get_vendor
from verl.workers.engine import EngineRegistry
from verl.workers.engine import utils as engine_utils
from verl.workers.engine.fsdp import transformer_impl

from flash_attn.integrations._sharing import INSTALLED
from flash_attn.integrations._verl_engine import SharedPromptCritic, SharedPromptEngine
from flash_attn.integrations._verl_plan import StepPlan
from flash_attn.integrations._verl_trainer import install
from flash_attn.integrations.transformers import register

__all__ = ["SharedPromptCritic", "SharedPromptEngine", "TESTED_VERSIONS", "activate"]

TESTED_VERSIONS = ("0.9.1",)
"""Releases of veRL that the test-suite ran on."""

BACKENDS = ("fsdp", "fsdp2")
ENGINES: dict[str, Any] = {"language_model": SharedPromptEngine, "value_model": SharedPromptCritic}


def activate() -> None:
    """Done on import; calling it again does nothing. Raises RuntimeError where veRL would not use the
    plug-in."""
    register()
    device = os.getenv("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.getenv("VERL_ENGINE_VENDOR") or get_vendor()
    for model_type, backend in itertools.product(ENGINES, BACKENDS):
        engine = ENGINES[model_type]
        if _engine_class(model_type, backend) is not engine:
            EngineRegistry.register(model_type, backend, device, vendor)(engine)
        if _engine_class(model_type, backend) is not engine:
            raise RuntimeError(
                f"the engine of {device} ({vendor}) for {backend} must be {engine.__name__}, "
                f"got {_engine_class(model_type, backend)}"
            )
    _take_over_micro_batches()
    # The driver has it loaded when it reads the model's settings; workers need not load it.
    trainer = sys.modules.get("verl.trainer.ppo.v1.trainer_base")
    if trainer is not None:
        install(trainer.PPOTrainer)


def _engine_class(model_type: str, backend: str) -> Any:
    try:
        return EngineRegistry.get_engine_cls(model_type, backend)
    except ValueError:  # none for this device
        return None


def _take_over_micro_batches() -> None:
    """Batches that carry a plan are split by it, all others by veRL."""
    original: Any = engine_utils.prepare_micro_batches
    current: Any = transformer_impl.prepare_micro_batches
    if hasattr(current, INSTALLED):
        return
    if current is not original:
        raise RuntimeError(
            f"veRL's FSDP engine must split mini-batches by prepare_micro_batches, got {current!r}"
        )

    def prepare_micro_batches(data: Any, *args: Any, **kwargs: Any) -> Any:
        plan = StepPlan.of(data)
        return original(data, *args, **kwargs) if plan is None else plan.micro_batches(data)

    prepare_micro_batches.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(prepare_micro_batches, INSTALLED, True)
    transformer_impl.prepare_micro_batches = prepare_micro_batches


activate()
