"""Modules of flash-attn that this package does not have: importing one says what to use instead.

They need further compiled extensions or a model zoo of their own. The finder stands last, so that a module
which another distribution puts into `flash_attn` (flash-attn-4's `cute`) is found first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

LEFT_OUT = {
    "flash_attn.flash_attn_triton": "flash_attn.flash_attn_func",
    "flash_attn.flash_attn_triton_amd": "flash_attn.flash_attn_func on NVIDIA GPUs",
    "flash_attn.flash_attn_triton_og": "flash_attn.flash_attn_func",
    "flash_attn.flash_blocksparse_attention": "torch.nn.attention.flex_attention",
    "flash_attn.flash_blocksparse_attn_interface": "torch.nn.attention.flex_attention",
    "flash_attn.fused_softmax": "torch.softmax",
    "flash_attn.layers.patch_embed": "torch.nn.Conv2d",
    "flash_attn.models": "transformers",
    "flash_attn.modules": "transformers",
    "flash_attn.ops.activations": "torch.nn.functional",
    "flash_attn.ops.fused_dense": "torch.nn.Linear",
    "flash_attn.ops.layer_norm": "torch.nn.LayerNorm, or flash_attn.ops.triton.layer_norm",
    "flash_attn.ops.rms_norm": "torch.nn.RMSNorm, or flash_attn.ops.triton.layer_norm",
    "flash_attn.ops.triton.k_activations": "torch.nn.functional",
    "flash_attn.ops.triton.linear": "torch.nn.Linear",
    "flash_attn.ops.triton.mlp": "torch.nn.Linear",
    "flash_attn.utils.benchmark": "torch.utils.benchmark",
    "flash_attn.utils.generation": "transformers",
    "flash_attn.utils.library": "torch.library",
    "flash_attn.utils.pretrained": "transformers",
    "flash_attn.utils.testing": "torch.testing",
    "flash_attn.utils.torch": "torch.amp",
}


class _Pointer(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        raise ImportError(
            f"{spec.name} is not part of this package; use {LEFT_OUT[spec.name]}, or upstream flash-attn",
            name=spec.name,
        )

    def exec_module(self, module: ModuleType) -> None:
        raise AssertionError("create_module raised")


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, _Pointer()) if name in LEFT_OUT else None


def install() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
