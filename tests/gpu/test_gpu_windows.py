"""Sliding windows of shared prompts on the kernels: equal to windows on the replicated batch."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import CUDA, attend_segments, check_case, shared_case
from kernels import HEAD_DIMS
from numerics import assert_close, run
from windows import WINDOWS, problem, replicated

from flash_attn import reference


@pytest.mark.parametrize("head_dim", [64, 256, 512])
@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
def test_equal_to_windows_on_the_replicated_batch(
    path: int, window_size: tuple[int, int], head_dim: int
) -> None:
    if head_dim not in HEAD_DIMS[path]:
        pytest.skip(f"this path has no kernels for head dim {head_dim}")
    case = problem(window_size, head_dim=head_dim, dtype=torch.bfloat16, device=CUDA)
    got = run(case, attend_segments(case), case.dtype)
    low = run(
        case,
        lambda **t: reference.attention(**t, segments=case.table, **case.options, low=True),
        case.dtype,
    )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = replicated(case, window_size)
    magnitude = max(float(x.abs().max()) for x in want.values())
    for name, x in want.items():
        if window_size == (0, 0) and name in ("dq", "dk"):  # exactly 0; everything else is noise
            assert float(got[name].abs().max()) < 1e-4
        else:
            assert_close(name, got[name], low[name], x, case.dtype, magnitude)


@pytest.mark.parametrize("head_dim", [128, 192, 256])
@pytest.mark.parametrize("window_size", [(191, 0), (256, 0), (10**6, 0), (300, 70)], ids=str)
def test_keys_that_half_of_a_tile_of_rows_sees(
    path: int, window_size: tuple[int, int], head_dim: int
) -> None:
    """The kernels of head dims above 128 leave them out for the other half (hopper/fwd_load.h)."""
    options = {"head_dim": head_dim, "window_size": window_size, "causal": window_size[1] == 0}
    check_case(shared_case([704], [[320, 129]], **options))
