"""flash-attn's autograd classes, by the names and positions that older code calls them by:

    FlashAttnFunc.apply(q, k, v, dropout_p, softmax_scale, causal, ..., is_grad_enabled)
Each is the public function of its name. flash_attn_interface hands them out when they are asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_attn import flash_attn_interface as interface


class _Function:
    """`apply` takes the public function's arguments by position, then is_grad_enabled."""

    function: Any

    @classmethod
    def apply(cls, *args: Any) -> Any:
        *arguments, is_grad_enabled = args
        with torch.set_grad_enabled(bool(is_grad_enabled) and torch.is_grad_enabled()):
            return cls.function(*arguments)


class FlashAttnFunc(_Function):
    function = staticmethod(interface.flash_attn_func)


class FlashAttnKVPackedFunc(_Function):
    function = staticmethod(interface.flash_attn_kvpacked_func)


class FlashAttnQKVPackedFunc(_Function):
    function = staticmethod(interface.flash_attn_qkvpacked_func)


class FlashAttnVarlenFunc(_Function):
    function = staticmethod(interface.flash_attn_varlen_func)


class FlashAttnVarlenKVPackedFunc(_Function):
    function = staticmethod(interface.flash_attn_varlen_kvpacked_func)


class FlashAttnVarlenQKVPackedFunc(_Function):
    function = staticmethod(interface.flash_attn_varlen_qkvpacked_func)
