"""Draws docs/layout.png: the rows of a batch with its prompt replicated, and with the prompt stored once.

python docs/draw_layout.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

NUM_RESPONSES, PROMPT, RESPONSE = 4, 6.0, 1.6
PROMPT_COLOR, COPY_COLOR = "#2f6fde", "#b9cdf3"
RESPONSE_COLORS = ("#e07a30", "#e0a030", "#c2506e", "#4f9d69")
GAP, HEIGHT = 0.08, 0.7


def block(axes: Axes, left: float, bottom: float, width: float, color: str, text: str) -> None:
    """One run of tokens."""
    shape = FancyBboxPatch((left, bottom), width - GAP, HEIGHT, boxstyle="round,pad=0,rounding_size=0.08")
    shape.set(facecolor=color, edgecolor="none")
    axes.add_patch(shape)
    white = color not in (COPY_COLOR,)
    color = "white" if white else "#40527a"
    axes.text(left + (width - GAP) / 2, bottom + HEIGHT / 2, text, ha="center", va="center", color=color)


def draw(path: Path) -> None:
    """Both layouts to the same scale, one above the other."""
    figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
    top = NUM_RESPONSES + 1.9
    axes.text(0, top, "replicated: N x (P + R) tokens", weight="bold", va="bottom")
    for i, color in enumerate(RESPONSE_COLORS):
        bottom = top - 0.9 - i * 0.85
        block(
            axes,
            0,
            bottom,
            PROMPT,
            PROMPT_COLOR if i == 0 else COPY_COLOR,
            "prompt" if i == 0 else "same prompt again",
        )
        block(axes, PROMPT, bottom, RESPONSE, color, f"response {i + 1}")
    axes.text(
        0, 1.35, "shared: P + N x R tokens, in every layer, forward and backward", weight="bold", va="bottom"
    )
    block(axes, 0, 0.45, PROMPT, PROMPT_COLOR, "prompt")
    for i, color in enumerate(RESPONSE_COLORS):
        left = PROMPT + i * RESPONSE
        block(axes, left, 0.45, RESPONSE, color, f"response {i + 1}")
        axes.annotate(
            "",
            xy=(PROMPT * (0.62 - 0.12 * i), 0.42),
            xytext=(left + RESPONSE / 2, 0.42),
            arrowprops={
                "arrowstyle": "->",
                "color": color,
                "connectionstyle": f"arc3,rad=-{0.16 + 0.01 * i}",
            },
        )
    axes.text(0, -1.35, "each response attends the prompt and itself", color="#555555")
    axes.set(xlim=(-0.1, PROMPT + NUM_RESPONSES * RESPONSE + 0.1), ylim=(-1.75, top + 0.5))
    axes.axis("off")
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_name("layout.png"))
