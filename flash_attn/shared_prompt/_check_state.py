"""What `check` changes on a model and puts back: gradients, training flags, precision, attention, random
state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch


@contextlib.contextmanager
def restored_attention(model: Any) -> Iterator[None]:
    """Puts the attention of every configuration in the model back: those of its parts may differ (text and
    vision)."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else [model]
    configs: dict[int, Any] = {id(c): c for c in (getattr(module, "config", None) for module in modules)}
    before = [(c, c._attn_implementation) for c in configs.values() if hasattr(c, "_attn_implementation")]
    try:
        yield
    finally:
        for config, name in before:
            # transformers' own attribute would also set the parts of this configuration
            inner = hasattr(config, "_attn_implementation_internal")
            setattr(config, "_attn_implementation_internal" if inner else "_attn_implementation", name)


@contextlib.contextmanager
def restored_state(model: Any, named: Mapping[str, torch.nn.Parameter]) -> Iterator[None]:
    """Runs the body in eval mode without gradients; afterwards everything is as it was, the same objects."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    parameters = [
        *named.values(),
        *(p for module in modules for p in module._parameters.values() if p is not None),
    ]
    training = [module.training for module in modules]
    gradients = [parameter.grad for parameter in parameters]
    devices = sorted({p.device.index for p in named.values() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), restored_attention(model):
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for module, flag in zip(modules, training, strict=True):
                module.training = flag
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


class Precision:
    """Casts floating-point parameters and buffers to `dtype` and puts the original storage back, bit for
    bit. In fp64 transformers' mixtures of experts run one expert after the other: their grouped products
    know no fp64.
    """

    def __init__(self, model: Any, named: Mapping[str, torch.nn.Parameter], dtype: torch.dtype) -> None:
        parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else list(named.values())
        modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
        self.dtype = dtype
        self.parameters = [p for p in parameters if p.is_floating_point()]
        self.buffers = [
            (module, name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        ]
        self.data: list[torch.Tensor] = []
        self.model, self.experts = model, None
        if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
            self.experts = getattr(model.config, "_experts_implementation", None)

    def __enter__(self) -> None:
        if self.experts is not None:
            self.model.set_experts_implementation("eager")
        self.data = [p.data for p in self.parameters]
        try:
            for parameter in self.parameters:
                parameter.grad = None  # a gradient of another dtype may not stay
                parameter.data = parameter.data.to(self.dtype)
            for module, name, buffer in self.buffers:
                module._buffers[name] = buffer.to(self.dtype)
        except BaseException:  # out of memory half way
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.experts is not None:
            self.model.set_experts_implementation(self.experts)
        for parameter, data in zip(self.parameters, self.data, strict=True):
            parameter.grad = None
            parameter.data = data
        for module, name, buffer in self.buffers:
            module._buffers[name] = buffer
