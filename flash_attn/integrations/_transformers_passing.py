"""Does a model hand its arguments down to the attention interface? Read from the source of its forwards.

A layout travels as a keyword argument: backbone -> layers -> attention -> attention interface. A forward on
the way that calls the next one without `**kwargs` loses it, and so does one that keeps the window to itself.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any, NamedTuple

import torch


class _Call(NamedTuple):
    callee: str  # as written, `self.self_attn`; `self.layers[]` for what a loop over self.layers calls
    keywords: frozenset[str | None]  # None for **


@functools.cache
def _calls(forward: Any) -> tuple[_Call, ...]:
    """The calls in the forward of a module class, by the function, which other packages replace; none where
    its source is not at hand."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return ()
    loops: dict[str, str] = {}  # loop variable -> the self.attribute that it runs over
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            attributes = [n for n in ast.walk(node.iter) if isinstance(n, ast.Attribute)]
            owner = next((ast.unparse(n) for n in attributes if ast.unparse(n).startswith("self.")), "")
            loops.update({n.id: f"{owner}[]" for n in ast.walk(node.target) if isinstance(n, ast.Name)})
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found.append(_Call(loops.get(name, name), frozenset(k.arg for k in node.keywords)))
    return tuple(found)


def window_is_hidden(module: Any, keywords: frozenset[str | None] | None = None) -> bool:
    """Whether the configuration gives this attention layer a window, which it does not tell attention.

    `keywords` are those of its call; None where the caller knows that it did not tell.
    """
    if keywords is not None and "sliding_window" in keywords:
        return False
    config = getattr(module, "config", None)
    layer_types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if layer_types and index is not None and index < len(layer_types):
        slides = layer_types[index] != "full_attention"
    else:
        slides = getattr(config, "sliding_window", None) is not None
    return bool(slides and getattr(config, "use_sliding_window", True))


def lost_argument(backbone: torch.nn.Module, name: str) -> str | None:
    """Why the attention module `name` of `backbone` would not get a layout, or attention its window; None
    where it does."""
    path = name.split(".")
    for i in range(len(path)):
        parent = backbone.get_submodule(".".join(path[:i]))
        if isinstance(parent, torch.nn.ModuleList):
            continue
        kind: Any = type(parent)
        callee = f"self.{path[i]}"
        if isinstance(getattr(parent, path[i]), torch.nn.ModuleList):
            callee += "[]"
        if any(call.callee == callee and None not in call.keywords for call in _calls(kind.forward)):
            return f"{kind.__name__} does not pass keyword arguments on to {callee[5:]}"
    module = backbone.get_submodule(name)
    kind = type(module)
    for call in _calls(kind.forward):
        if call.callee != "attention_interface":
            continue
        if None not in call.keywords:
            return f"attention of {kind.__name__} does not pass keyword arguments on"
        if window_is_hidden(module, call.keywords):
            return f"{kind.__name__} has a sliding window but does not tell attention its size"
    return None
