"""The operators that flash-attn writes in Triton, here in PyTorch under the same names.

Importing them raises ImportError where flash-attn's would: without Triton or without a GPU. Libraries test
for that to choose their own code.
"""

import torch

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "flash_attn.ops.triton needs Triton; flash_attn.layers and flash_attn.losses run without"
    ) from error
if not torch.cuda.is_available():
    raise ImportError(
        "flash_attn.ops.triton needs a GPU; flash_attn.layers and flash_attn.losses run without"
    )
