"""What is remembered by a tensor, for as long as it lives: torch's WeakIdKeyDictionary, whose look-ups take 2
us each, in 0.2.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch import Tensor

Value = TypeVar("Value")


class ByTensor(Generic[Value]):
    """One value for a tensor: for the object, whatever it holds."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Value]] = {}

    def get(self, x: Tensor) -> Value | None:
        known = self._known.get(id(x))
        return known[1] if known is not None and known[0]() is x else None

    def set(self, x: Tensor, value: Value) -> None:
        key = id(x)
        self._known[key] = weakref.ref(x, lambda _: self._known.pop(key, None)), value

    def __len__(self) -> int:
        return len(self._known)
