"""Ways for a layout to reach the attention layers in frameworks that drop unknown kwargs or overwrite
attention names.

Both leave the kwarg itself as the carrier, because layers capture kwargs for recomputation; a global
variable would have another value by then.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from flash_attn.integrations._transformers_attention import dualkv_attention
from flash_attn.integrations._transformers_masks import dualkv_mask
from flash_attn.integrations._transformers_receipt import is_receipt_open
from flash_attn.integrations._transformers_support import text_backbone
from flash_attn.shared_prompt.layout import SharedPromptLayout


class Injection:
    """A forward pre-hook that adds `dualkv_layout=` to a backbone's calls. Remove it, or use it as a
    context manager.

    `layout` may be set anew before each forward; with None the hook adds nothing.
    """

    def __init__(self, backbone: torch.nn.Module, layout: SharedPromptLayout | None = None) -> None:
        parameters = inspect.signature(backbone.forward).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise TypeError(
                f"backbone must pass **kwargs on to its layers, {type(backbone).__name__}.forward takes none"
            )
        self.layout = layout
        self._handle: Any = backbone.register_forward_pre_hook(
            self._add_layout, with_kwargs=True, prepend=True
        )

    @property
    def layout(self) -> SharedPromptLayout | None:
        """What the next forward gets."""
        return self._layout

    @layout.setter
    def layout(self, layout: SharedPromptLayout | None) -> None:
        if layout is not None and not isinstance(layout, SharedPromptLayout):
            raise TypeError(f"layout must be a SharedPromptLayout or None, got {type(layout).__name__}")
        self._layout = layout

    def _add_layout(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.layout is None:
            return None
        if kwargs.get("dualkv_layout") not in (None, self.layout):
            raise ValueError("dualkv_layout came as a kwarg and was also injected, with another layout")
        return args, {**kwargs, "dualkv_layout": self.layout}

    def remove(self) -> None:
        """Takes the hook away; calling it twice is harmless."""
        self._handle.remove()

    def __enter__(self) -> Injection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def inject(model: torch.nn.Module, layout: SharedPromptLayout | None = None) -> Injection:
    """Adds `dualkv_layout=layout` to every call of the model's backbone until removed: `with inject(model,
    layout): ...`.

    `model` is a transformers model, with or without LM head or wrappers, or the backbone itself. The hook
    sits outside the layers that gradient checkpointing recomputes, so backward may run after it is removed.
    """
    return Injection(text_backbone(model), layout)


class _Dispatcher:
    """Stands in a registry of transformers for `original`, as long as a `Wrapping` uses it."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.num_users = 0


class _AttentionDispatcher(_Dispatcher):
    """Calls with a layout go to `dualkv_attention`, all others to the original."""

    def __call__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dualkv_layout") is None:
            kwargs.pop("dualkv_layout", None)
            return self.original(module, *args, **kwargs)
        return dualkv_attention(module, *args, **kwargs)


class _MaskDispatcher(_Dispatcher):
    """Within a receipt `dualkv_mask`: for a pack's positions sdpa's own mask would be T x T. Masks are made
    before the layers, so nothing recomputes them later."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (dualkv_mask if is_receipt_open() else self.original)(*args, **kwargs)


_KINDS: tuple[tuple[Any, type[_Dispatcher]], ...] = (
    (AttentionInterface, _AttentionDispatcher),
    (AttentionMaskInterface, _MaskDispatcher),
)
_lock = threading.Lock()


class Wrapping:
    """Attention names that dispatch on `dualkv_layout` until `restore`; also a context manager."""

    def __init__(self, names: Sequence[str]) -> None:
        registered = AttentionInterface._global_mapping
        if isinstance(names, str) or not names or any(name not in registered for name in names):
            raise ValueError(
                f"names must be registered attention implementations ({', '.join(registered)}), got {names!r}"
            )
        self._dispatchers: list[tuple[Any, str, _Dispatcher]] = []
        with _lock:
            for name in dict.fromkeys(names):
                for registry, kind in _KINDS:
                    current = registry._global_mapping.get(name)
                    if current is None:
                        continue
                    dispatcher = current if isinstance(current, kind) else kind(current)
                    dispatcher.num_users += 1
                    self._dispatchers.append((registry, name, dispatcher))
                    registry.register(name, dispatcher)

    def restore(self) -> None:
        """Puts the original functions back once no other wrapping needs them; calling it twice is
        harmless."""
        with _lock:
            for registry, name, dispatcher in self._dispatchers:
                dispatcher.num_users -= 1
                # Somebody may have registered the name anew in between: theirs stays.
                if dispatcher.num_users == 0 and registry._global_mapping.get(name) is dispatcher:
                    registry.register(name, dispatcher.original)
            self._dispatchers = []

    def __enter__(self) -> Wrapping:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def wrap(names: Sequence[str] = ("flash_attention_2", "sdpa")) -> Wrapping:
    """Lets the attention implementations `names` take `dualkv_layout=`; calls without it run as before.

    For frameworks that overwrite the attention name of a model. Use as a context manager, or keep the
    result and call `restore()`; wrappings may be nested and left in any order. Under "sdpa", run packs by
    `packed_forward` or within a `receipt`: otherwise transformers makes a T x T mask of the pack's position
    ids, which is refused.
    """
    return Wrapping(names)
