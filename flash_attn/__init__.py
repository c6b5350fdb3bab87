"""FlashAttention's API with shared-prompt attention: the prompt of N responses is stored, projected and
attended once.

Importing this package loads no GPU library and needs no GPU; CPU tensors run on an exact CPU implementation.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # flash-attn-4 ships flash_attn.cute next to us
__version__ = "2.8.3+dualkv.0.1.0"

from flash_attn import _left_out, _ownership
from flash_attn._backend import backend, is_available, why_unavailable
from flash_attn.flash_attn_interface import (
    flash_attn_dualkv_varlen_func,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_shared_prompt_func,
    flash_attn_shared_prompt_with_kvcache,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

_left_out.install()
_ownership.warn_of_other_copies(__version__, __file__, __path__)

__all__ = [
    "__version__",
    "backend",
    "flash_attn_dualkv_varlen_func",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_shared_prompt_func",
    "flash_attn_shared_prompt_with_kvcache",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "is_available",
    "why_unavailable",
]
