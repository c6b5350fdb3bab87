"""Shared prompts in OpenRLHF (0.11.2, PPO and GRPO on Ray): a launcher in front of its own, no fork.

    python -m flash_attn.integrations.openrlhf  <arguments of openrlhf.cli.train_ppo_ray>

It starts Ray with a hook that every worker runs first. There, when OpenRLHF's modules are imported, the
forward of its `Actor` is replaced: old, reference and policy log-probs store, project and attend each prompt
once per micro-batch, and micro-batches are drawn from whole groups. `shared_prompt/packed_tokens`,
`replicated_tokens` and `fallbacks` in the actor's metrics tell how much was shared.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["TESTED_VERSIONS", "activate", "launch", "runtime_env", "setup_worker"]

TESTED_VERSIONS = ("0.11.2",)
"""Releases of OpenRLHF that the test-suite ran on."""

HOOK = "flash_attn.integrations.openrlhf.setup_worker"
TRAINER = "openrlhf.cli.train_ppo_ray"
# Defaults of OpenRLHF's own call of ray.init, which our call takes the place of.
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
}


def activate() -> None:
    """Replaces `Actor.forward` and the sampling of micro-batches in this process; calling it again does
    nothing. Imports OpenRLHF."""
    for name in _PATCHES:
        _patch(importlib.import_module(name))


def setup_worker() -> None:
    """What every Ray worker runs first: `activate`, put off until OpenRLHF is imported (vLLM's workers never
    do)."""
    for name in _PATCHES:
        if name in sys.modules:
            _patch(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def runtime_env() -> dict[str, Any]:
    """The `runtime_env` of `ray.init`: OpenRLHF's own, and the hook."""
    variables = {name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()}
    return {"env_vars": variables, "worker_process_setup_hook": HOOK}


def launch(arguments: Sequence[str]) -> None:
    """Runs OpenRLHF's trainer with these command-line arguments, on a Ray that has the hook."""
    import ray

    if ray.is_initialized():
        raise RuntimeError("ray must not be initialised before launch: its workers would not have the hook")
    setup_worker()
    ray.init(runtime_env=runtime_env())
    sys.argv = [TRAINER, *arguments]
    runpy.run_module(TRAINER, run_name="__main__")


def _patch_actor(module: ModuleType) -> None:
    from flash_attn.integrations import _openrlhf_actor

    _openrlhf_actor.install(module.Actor)


def _patch_trainer(module: ModuleType) -> None:
    from flash_attn.integrations import _openrlhf_trainer

    _openrlhf_trainer.install(module)


_PATCHES = {"openrlhf.models.actor": _patch_actor, "openrlhf.trainer.ray.ppo_actor": _patch_trainer}


def _patch(module: ModuleType) -> None:
    _PATCHES[module.__name__](module)


class _Finder(importlib.abc.MetaPathFinder):
    """Patches a module right after it was executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, original: Any) -> None:
        self.original = original

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.original.exec_module(module)
        _patch(module)

    def __getattr__(self, name: str) -> Any:  # get_source, get_data, ...: for tracebacks and inspect
        return getattr(self.original, name)


if __name__ == "__main__":
    launch(sys.argv[1:])
