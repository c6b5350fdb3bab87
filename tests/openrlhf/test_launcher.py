"""The launcher: what Ray's workers get, whole groups in micro-batches, metrics of the real trainer."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer
from openrlhf.trainer.ray import ppo_actor
from test_actor import actor_of, batch

from flash_attn.integrations import openrlhf as launcher
from flash_attn.integrations._openrlhf_trainer import GroupSampler, _prompt, install

WORKER = """
import ray
from flash_attn.integrations import openrlhf as launcher
ray.init(num_cpus=1, include_dashboard=False, runtime_env=launcher.runtime_env())

@ray.remote
def look():
    import os, sys
    before = "openrlhf.models.actor" in sys.modules
    from openrlhf.models.actor import Actor
    import inspect
    source = inspect.getsource(Actor)
    return before, hasattr(Actor.forward, "__wrapped__"), "class Actor" in source, os.environ["NCCL_DEBUG"]

print(ray.get(look.remote()))
"""


def test_workers_patch_openrlhf_when_they_import_it() -> None:
    """A real Ray: nothing is imported before, and the actor's forward is replaced when it is."""
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=300)
    assert "(False, True, True, 'WARN')" in done.stdout, done.stdout + done.stderr


def test_launch_starts_ray_and_runs_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    seen: dict[str, Any] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: "ray" in seen)
    monkeypatch.setattr(ray, "init", lambda **kwargs: seen.update(ray=kwargs))
    monkeypatch.setattr(
        launcher.runpy, "run_module", lambda name, run_name: seen.update(run=(name, run_name, list(sys.argv)))
    )
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    launcher.launch(["--actor.model_name_or_path", "m"])
    assert seen["ray"]["runtime_env"]["worker_process_setup_hook"] == launcher.HOOK
    assert seen["ray"]["runtime_env"]["env_vars"]["NCCL_DEBUG"] == "INFO"
    assert seen["run"] == (
        "openrlhf.cli.train_ppo_ray", "__main__", [launcher.TRAINER, "--actor.model_name_or_path", "m"],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="ray must not be initialised before launch"):
        launcher.launch([])


def experience() -> Any:
    inputs = batch()
    shape = inputs["action_mask"].shape
    made = Experience(
        sequences=inputs["sequences"], attention_mask=inputs["attention_mask"],
        action_mask=inputs["action_mask"], action_log_probs=-torch.rand(shape),
        base_action_log_probs=-torch.rand(shape), advantages=torch.randn(shape),
        rollout_log_probs=-torch.rand(shape), info={},
    )  # fmt: skip
    return made


@pytest.fixture
def replay_buffer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    buffer = NaiveReplayBuffer(2, cpu_offload=False, packing_samples=True)
    for _ in range(3):
        buffer.append(experience())
    return buffer


def test_micro_batches_hold_whole_groups(replay_buffer: Any) -> None:
    """15 rows of two prompts, 9 and 6: any order has one change of prompt."""
    orders = []
    for seed in range(4):
        torch.manual_seed(seed)
        loader = ppo_actor.DataLoader(
            replay_buffer, batch_size=3, shuffle=True, drop_last=True, collate_fn=lambda rows: rows
        )
        rows = [row for rows in loader for row in rows]
        prompts = [_prompt(row) for row in rows]
        assert len(rows) == 15 and {len(p) for p in prompts} == {7, 3}
        assert sum(a != b for a, b in itertools.pairwise(prompts)) == 1
        orders.append([tuple(row.sequences.tolist()) for row in rows])
    assert len({str(order) for order in orders}) > 1
    assert sorted(GroupSampler(replay_buffer)) == list(range(15))
    loader = ppo_actor.DataLoader(replay_buffer, batch_size=15, shuffle=False, collate_fn=lambda rows: rows)
    assert all(row is item for row, item in zip(next(iter(loader)), replay_buffer.items, strict=True))


def test_a_training_step_reports_what_was_shared(replay_buffer: Any) -> None:
    """The real training_step; its strategy is replaced by plain autograd."""
    args = SimpleNamespace(
        train=SimpleNamespace(dynamic_batch_enable=False),
        algo=SimpleNamespace(kl=SimpleNamespace(use_loss=False)),
        actor=SimpleNamespace(entropy_coef=0.1, aux_loss_coef=0.0),
    )
    trainer = ppo_actor.ActorPPOTrainer.__new__(ppo_actor.ActorPPOTrainer)
    trainer.actor, trainer.args, trainer.replay_buffer = actor_of("qwen3", packing=True), args, replay_buffer
    trainer.ema_model, trainer.aux_loss, trainer.actor_optim = None, False, None
    trainer.actor_loss_fn = ppo_actor.PolicyLoss()
    trainer.actor_scheduler = SimpleNamespace(get_last_lr=lambda: [0.0])
    trainer.strategy = SimpleNamespace(
        ring_attn_group=None, args=args, backward=lambda loss, *_: loss.backward(),
        optimizer_step=lambda *_, **__: None, get_grad_norm=lambda actor: 0.0,
    )  # fmt: skip
    status = trainer.training_step(experience(), 0.0, 0, {})
    metrics = status["metrics"]
    assert metrics["shared_prompt/packed_tokens"] < metrics["shared_prompt/replicated_tokens"]
    assert metrics["shared_prompt/fallbacks"] == 0.0
    assert status["weights"]["shared_prompt/packed_tokens"] is None
    assert all(p.grad is not None for p in trainer.actor.model.parameters())


def test_a_trainer_that_other_decorators_wrap_is_taken_over_once() -> None:
    class Trainer:
        @functools.wraps(ppo_actor.ActorPPOTrainer.training_step)
        def training_step(self, *args: Any, **kwargs: Any) -> None: ...

    @functools.wraps(torch.utils.data.DataLoader)
    def loader(*args: Any, **kwargs: Any) -> None: ...

    module: Any = SimpleNamespace(DataLoader=loader, ActorPPOTrainer=Trainer)
    step = Trainer.training_step
    install(module)
    once = (module.DataLoader, Trainer.training_step)
    assert once[0] is not loader and once[1] is not step
    install(module)
    assert (module.DataLoader, Trainer.training_step) == once
