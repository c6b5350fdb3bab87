"""What is only measured on a GPU says so in one line where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def require_gpu(otherwise: str = "") -> None:
    """Ends the script where torch sees no GPU; `otherwise`: the arguments with which it needs none."""
    if not torch.cuda.is_available():
        without = f" (on a CPU: {otherwise})" if otherwise else ""
        sys.exit(f"{Path(sys.argv[0]).name} needs an NVIDIA GPU{without}")
