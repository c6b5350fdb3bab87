"""Proof that every attention layer of a forward used the layout: a packed batch is silently wrong where one
did not.

`dualkv_attention` reports each call here; `receipt` compares, when the forward is done, the modules that
reported with those the model has. Recomputation in backward (gradient checkpointing) happens later or again
and changes nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from flash_attn.integrations._transformers_support import remembered_attention_modules, text_backbone
from flash_attn.shared_prompt.layout import SharedPromptLayout

_active = threading.local()


class Receipt:
    """Which attention modules of one forward saw the layout.

    `expected` are the names of the model's attention modules, `seen` of those that used `layout`,
    `unshared` of those that ran without it.
    """

    def __init__(self, model: torch.nn.Module, layout: SharedPromptLayout) -> None:
        self.layout = layout
        backbone = text_backbone(model)
        self._names = {id(module): name for name, module in remembered_attention_modules(backbone)}
        self._seen: set[int] = set()
        self._unshared: set[int] = set()

    @property
    def expected(self) -> list[str]:
        return list(self._names.values())

    @property
    def seen(self) -> list[str]:
        return [name for key, name in self._names.items() if key in self._seen]

    @property
    def unshared(self) -> list[str]:
        return [name for key, name in self._names.items() if key in self._unshared]

    def report(self, module: torch.nn.Module, layout: SharedPromptLayout | None) -> None:
        if id(module) in self._names:
            (self._seen if layout is self.layout else self._unshared).add(id(module))

    def check(self) -> None:
        """Raises RuntimeError naming the attention layers that did not use the layout."""
        missing = [
            name for key, name in self._names.items() if key not in self._seen or key in self._unshared
        ]
        if missing or not self._names:
            raise RuntimeError(
                f"{len(self._names) - len(missing)} of {len(self._names)} attention layers used the "
                f"shared-prompt layout; the result is wrong. Missing: {', '.join(missing[:8])}"
                f'{", ..." if missing[8:] else ""}. Is the attention implementation "dualkv" (register) or '
                "wrapped (wrap), and does the model pass dualkv_layout on (else: inject)? Layers inside a "
                "graph of torch.compile cannot be counted: call the model itself with dualkv_layout=."
            )


def record(module: torch.nn.Module, layout: SharedPromptLayout | None) -> None:
    """Called by the attention function."""
    if not torch.compiler.is_compiling():
        for receipt in getattr(_active, "receipts", ()):
            receipt.report(module, layout)


def is_receipt_open() -> bool:
    """Whether this thread runs a pack whose receipt will be checked."""
    return bool(getattr(_active, "receipts", ()))


@contextlib.contextmanager
def receipt(model: torch.nn.Module, layout: SharedPromptLayout) -> Iterator[Receipt]:
    """Checks, on leaving without an exception, that every attention layer of `model` used `layout` within
    the block."""
    entry = Receipt(model, layout)
    receipts = _active.__dict__.setdefault("receipts", [])
    receipts.append(entry)
    try:
        yield entry
    finally:
        receipts.remove(entry)
    entry.check()
