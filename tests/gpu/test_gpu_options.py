"""Windows, softcap, sinks, scales, splits, deterministic mode, chunks, padding: by the one rule."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import attend_segments, check_case, poisoned, shared_case, varlen_case
from numerics import Case, assert_close, run

from flash_attn import reference

PROMPT_AND_RESPONSES = ([150], [[70, 0, 130, 9]])
WINDOWS = [(0, 0), (1, 0), (39, 0), (200, 0), (10**9, 0), (-1, 20), (64, 64), (5, 300), (70, -1)]


@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
def test_windows(path: int, window_size: tuple[int, int]) -> None:
    for causal in (True, False):
        check_case(shared_case(*PROMPT_AND_RESPONSES, window_size=window_size, causal=causal))
        check_case(varlen_case([150, 70], [70, 200], 130, window_size=window_size, causal=causal))


def test_window_counts_keys_across_the_border(path: int) -> None:
    """40 keys including self: with P = 50 the response token at position 60 sees 21..60."""
    case = shared_case([50], [[30]], window_size=(39, 0), num_heads=1, num_heads_k=1, head_dim=64)
    for name in ("q", "k"):
        case.tensors[name].zero_()  # equal weights
    positions = torch.arange(80, device="cuda", dtype=torch.float32)
    case.tensors["v"].copy_(positions[:, None, None])
    out, lse = attend_segments(case)(**case.tensors)
    assert torch.allclose(lse[0, 60].exp(), torch.tensor(40.0, device="cuda"))
    assert abs(float(out[60].float().mean()) - (21 + 60) / 2) < 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_plain_attention(path: int, causal: bool, dtype: torch.dtype) -> None:
    check_case(varlen_case([500, 33, 500], [500, 33, 500], causal=causal, dtype=dtype, head_dim=128))


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_softcap(path: int, softcap: float, deterministic: bool) -> None:
    check_case(shared_case(*PROMPT_AND_RESPONSES, softcap=softcap, scale_q=4.0), deterministic)


def test_sinks(path: int) -> None:
    check_case(shared_case(*PROMPT_AND_RESPONSES, sinks=True))


@pytest.mark.parametrize("softmax_scale", [1.0, 0.01])
def test_softmax_scale(path: int, softmax_scale: float) -> None:
    check_case(shared_case(*PROMPT_AND_RESPONSES, softmax_scale=softmax_scale, scale_q=0.2))


def test_large_scores(path: int) -> None:
    check_case(shared_case(*PROMPT_AND_RESPONSES, scale_q=10.0))  # scores of about +-80


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients(path: int, head_dim: int) -> None:
    check_case(shared_case(*PROMPT_AND_RESPONSES, head_dim=head_dim), deterministic=True)
    check_case(varlen_case([150, 70], [70, 200], 130, head_dim=head_dim), deterministic=True)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("context_rows", [8000, 1])
def test_split_context_items(path: int, context_rows: int, deterministic: bool) -> None:
    """Short prompts: rows of a context item are cut in up to four parts, whose partial sums are added."""
    for options in ({}, {"window_size": (100, 0)}, {"causal": False, "head_dim": 128}):
        check_case(shared_case(*PROMPT_AND_RESPONSES, **options), deterministic, context_rows)
        check_case(varlen_case([150, 70], [70, 200], 130, **options), deterministic, context_rows)


def test_head_chunks(path: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """dq's accumulator in several launches, or the separate pass where one head exceeds the limit."""
    monkeypatch.setenv("FLASH_ATTN_DQ_ACCUM_MB", "1")
    # 1.2 MB a kv head: separate pass; then 3 heads a launch.
    check_case(shared_case([900], [[100, 200]], num_heads=6, num_heads_k=3))
    check_case(shared_case([500], [[100, 200]], num_heads=5, num_heads_k=5))


def padded(values: dict[str, torch.Tensor], rows: int, value: float) -> dict[str, torch.Tensor]:
    out = {}
    for name, x in values.items():
        out[name] = torch.cat([x, x.new_full((rows, *x.shape[1:]), value)])
    return out


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_nan_behind_the_last_row_reaches_nothing(path: int, deterministic: bool) -> None:
    """Rows behind the last segment are NaN in q, k, v and dout; outputs and gradients there are zeros."""
    case = shared_case([100], [[40, 30]], head_dim=128)
    pad = 75
    wide = Case(case.segments, case.total_q + pad, case.total_k + pad, **options_of(case))
    wide.tensors = padded(case.tensors, pad, float("nan"))
    wide.dout = torch.cat([case.dout, case.dout.new_full((pad, *case.dout.shape[1:]), float("nan"))])
    wide.dlse = torch.nn.functional.pad(case.dlse, (0, pad), value=float("nan"))
    attend = attend_segments(wide, deterministic)
    with poisoned():
        got = run(wide, attend, case.dtype)
    want = {
        dtype: run(
            case,
            lambda low=(dtype == case.dtype), **t: reference.attention(
                **t, segments=case.table, **case.options, low=low
            ),
            dtype,
        )
        for dtype in (case.dtype, torch.float64)
    }
    for name, x in got.items():
        rows = case.total_q
        body, tail = (x[:, :rows], x[:, rows:]) if name == "lse" else (x[:rows], x[rows:])
        dtype = torch.float32 if name == "lse" else case.dtype
        assert_close(name, body, want[case.dtype][name], want[torch.float64][name], dtype)
        assert (tail == (-torch.inf if name == "lse" else 0)).all(), name


def options_of(case: Case) -> dict:
    names = ("num_heads", "num_heads_k", "head_dim", "dtype", "device", "with_dlse")
    return {name: getattr(case, name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_sweep(path: int, seed: int) -> None:
    import numpy as np

    rng = np.random.default_rng(seed)
    options = dict(
        head_dim=int(rng.choice([32, 64, 96, 128, 192, 256])),
        num_heads=int(rng.choice([1, 2, 4])) * 2,
        num_heads_k=int(rng.choice([1, 2])),
        dtype=[torch.bfloat16, torch.float16][rng.integers(2)],
        causal=bool(rng.random() < 0.7),
        window_size=tuple(int(x) for x in rng.choice([-1, -1, 3, 60, 300], 2)),
        softcap=float(rng.choice([0.0, 0.0, 10.0])),
        seed=seed,
    )
    prompts = [int(x) for x in rng.integers(1, 400, rng.integers(1, 4))]
    responses = [[int(x) for x in rng.integers(0, 200, rng.integers(0, 9))] for _ in prompts]
    context_rows = int(rng.choice([0, 1, 8000]))
    check_case(
        shared_case(prompts, responses, pad=int(rng.integers(0, 90)), **options),
        bool(rng.random() < 0.4),
        context_rows,
    )
