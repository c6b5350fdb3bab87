"""matplotlib without a display, the same in every report."""

from __future__ import annotations

from typing import Any

COLORS = {  # of what is compared: ours is blue in every plot
    "ours": "#1f4e9c", "ours-sm90a": "#1f4e9c", "ours, sm_90a": "#1f4e9c",
    "ours-deterministic": "#5b8fd6", "ours-sm80": "#a9c6ec", "ours, sm_80": "#a9c6ec",
    "best FA4": "#d95f02", "fa4-two-call": "#d95f02", "fa4-block-sparse": "#f0a35e", "fa4-gather": "#8c3b00",
    "fa4-replicated": "#c49a6c",
    "best FA3": "#e377c2", "fa3-two-call": "#e377c2", "fa3-gather": "#b5559a", "fa3-replicated": "#f2b6dc",
    "cuDNN two-call": "#4d4d4d", "cudnn-two-call": "#4d4d4d",
    "cudnn-replicated": "#808080", "cudnn-padded": "#808080",
    "FlexAttention": "#7b5ea7", "flex": "#7b5ea7",
    "FA2 two-call": "#c4a000", "fa2-two-call": "#c4a000",
    "FA2 replicated": "#b22222", "fa2-replicated": "#b22222",
    "gather-varlen": "#2a9d8f", "prefix-grouper": "#d16ba5",
}  # fmt: skip
REPLICATED = "#9a9a9a"  # where the two ways are shared (ours) and replicated


def thousands(tokens: int) -> str:
    """4096 as 4K."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def pyplot() -> Any:
    """matplotlib.pyplot for files; equal figures become equal SVG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "flash_attn"
    import matplotlib.pyplot as plt

    return plt
