"""Modules of Triton kernels, where Triton runs. Called by _decode.py and _cross_entropy.py."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

logger = logging.getLogger("flash_attn")


def interpreted() -> bool:
    """Triton's interpreter runs the kernels on CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def load(name: str, otherwise: str, on_a_gpu: bool) -> Any:
    """flash_attn's module `name`, or None without Triton or what it needs (a C compiler, and a GPU where
    `on_a_gpu`): then a warning says `otherwise`, which is what runs instead."""
    try:
        module = importlib.import_module(f"flash_attn.{name}")
        if on_a_gpu:
            from triton.runtime import driver

            driver.active.get_current_device()
    except Exception as error:
        logger.warning("flash_attn%s, because Triton does not run: %s", otherwise, error)
        return None
    return module
