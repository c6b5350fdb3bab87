"""Long lists of items, again and again, in a process that is ended where it stands still.

Kernels whose warps wait for each other can do so for ever when one of them comes late; it takes many items
to see it once. The forward of head dims 192 and 256 lets a warpgroup leave out tiles, whose stages it must
not release before all of its warps have waited for them (hopper/README.md, Windows).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 90  # beside the other shards of a suite; alone about a tenth
SCRIPT = Path(__file__).with_name("repeat_steps.py")
PROBLEMS = {
    "window": ["--head-dim", "256", "--window", "1023"],
    "long responses": ["--head-dim", "256", "--responses", "28", "--prompt", "4096", "--forwards", "40"],
    "window, 192": ["--head-dim", "192", "--window", "1000", "--prompt", "8192", "--forwards", "60"],
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_repeats_end_and_are_bitwise_equal(path: int, problem: str) -> None:
    if path != 90:
        pytest.skip("of the Hopper kernels")
    command = [sys.executable, str(SCRIPT), *PROBLEMS[problem]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"stood still for {LIMIT_S} s after: {error.stdout or b''!r}")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
