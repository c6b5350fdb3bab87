"""matplotlib without a display, the same in every report."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """matplotlib.pyplot for files; equal figures become equal SVG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "flash_attn"
    import matplotlib.pyplot as plt

    return plt
