"""Lets veRL's training workers run on CPUs, over gloo. Import before veRL, with VERL_PLATFORM=cpu.

veRL asks a "platform" for its devices and has none for CPUs; only what its FSDP2 engine asks for is here.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch

os.environ.setdefault("VERL_PLATFORM", "cpu")

from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_DEVICE = types.SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in ("current_device", "synchronize", "is_available")},
    max_memory_allocated=lambda *_: 0, max_memory_reserved=lambda *_: 0, memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0, empty_cache=lambda: None, set_device=lambda *_: None,
    manual_seed=torch.manual_seed, manual_seed_all=torch.manual_seed, mem_get_info=lambda *_: (0, 0),
    get_device_name=lambda *_: "CPU",
)  # fmt: skip


@PlatformRegistry.register("cpu")
class CpuPlatform(PlatformBase):
    """The one device is "cpu"; memory is not counted."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    profiler_stop = profiler_start

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def register_plain_engine() -> None:
    """veRL's FSDP2 engines, registered for CPUs too: what runs without the plug-in."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cpu")(FSDPEngineWithLMHead)
    EngineRegistry.register("value_model", ["fsdp", "fsdp2"], "cpu")(FSDPEngineWithValueHead)
