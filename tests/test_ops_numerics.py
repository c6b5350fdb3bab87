"""torch.ops.flash_attn on the CPU against the reference, by the tolerance rule: each axis once, corners, a
random sweep."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics import Case, check, op, run

from flash_attn import cpu, reference
from flash_attn._calls import attention
from flash_attn._pieces import Kind, bands, cut, runs

# Two groups (one with an empty response), then a plain sequence, then two rows of static-shape padding.
PACKED: dict[str, Any] = {
    "segments": [
        [0, 37, 0, 37, 37, 37], [37, 50, 0, 37, 37, 50], [50, 50, 0, 37, 50, 50], [50, 90, 0, 37, 50, 90],
        [90, 92, 90, 92, 92, 92], [92, 93, 90, 92, 92, 93], [93, 100, 0, 0, 93, 100],
    ],
    "total_q": 102,
    "total_k": 102,
}  # fmt: skip
# Context tensors of their own; queries more, fewer and as many as keys, one sequence without keys.
DUAL: dict[str, Any] = {
    "segments": [
        [0, 4, 0, 21, 0, 9],
        [4, 40, 0, 21, 9, 12],
        [40, 45, 0, 21, 12, 12],
        [45, 52, 0, 21, 12, 19],
    ],
    "total_q": 53,
    "total_k": 20,
    "total_context": 23,
}
VARLEN: dict[str, Any] = {
    "segments": [[0, 6, 0, 0, 0, 9], [6, 16, 0, 0, 9, 12], [16, 17, 0, 0, 12, 12], [17, 30, 0, 0, 12, 25]],
    "total_q": 31,
    "total_k": 26,
}


def check_case(layout: dict[str, Any], **changes: Any) -> None:
    case = Case(**{**layout, **changes})
    check(case, op(case))


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("layout", [PACKED, DUAL, VARLEN], ids=["packed", "dual", "varlen"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_dtypes(layout: dict[str, Any], dtype: torch.dtype, causal: bool) -> None:
    check_case(layout, dtype=dtype, causal=causal)


@pytest.mark.parametrize("window", [(0, 0), (0, -1), (5, 0), (40, 3), (-1, 2), (1000, 1000)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", [PACKED, DUAL], ids=["packed", "dual"])
def test_windows(layout: dict[str, Any], window: tuple[int, int], causal: bool) -> None:
    check_case(layout, window_size=window, causal=causal)


@pytest.mark.parametrize("layout", [PACKED, DUAL], ids=["packed", "dual"])
@pytest.mark.parametrize(
    "changes",
    [
        {"softcap": 20.0},
        {"softcap": 1.0, "window_size": (11, 0)},
        {"sinks": True},
        {"with_dlse": True},
        {"with_dlse": True, "sinks": True, "softcap": 3.0},
        {"with_dlse": True, "head_dim_v": 5, "dtype": torch.bfloat16},
        {"softmax_scale": 1.7},
        {"head_dim_v": 7},
        {"scale_q": 80.0, "with_dlse": True},  # scores of about +-80
        {"sinks": True, "dtype": torch.float16},
    ],
    ids=str,
)
def test_options(layout: dict[str, Any], changes: dict[str, Any]) -> None:
    check_case(layout, **changes)


@pytest.mark.parametrize("head_dim", [1, 8, 40, 65, 72, 104, 128, 192, 256, 512])
def test_head_dims(head_dim: int) -> None:
    check_case(DUAL, head_dim=head_dim, num_heads=2, num_heads_k=1)


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("num_heads_k", [1, 3])
def test_query_heads_share_key_heads(ratio: int, num_heads_k: int) -> None:
    check_case(VARLEN, num_heads=ratio * num_heads_k, num_heads_k=num_heads_k, head_dim=8)
    q = torch.randn(31, ratio * num_heads_k, 8)
    v = torch.arange(num_heads_k, dtype=torch.float32)[None, :, None].expand(26, -1, 8)
    case = Case(**VARLEN)
    out, _ = op(case)(q, torch.randn(26, num_heads_k, 8), v)
    wanted = torch.arange(ratio * num_heads_k) // ratio
    torch.testing.assert_close(out[17:30], wanted.float()[None, :, None].expand(13, -1, 8))


def test_without_the_kernels_gqa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's kernel wants equal heads, keys are repeated and their gradients summed."""
    monkeypatch.setattr(cpu, "_kernel_knows_gqa", lambda: False)
    check_case(PACKED, num_heads=6, num_heads_k=2)


@pytest.mark.parametrize("length", [1, 15, 127, 128, 129, 257])
@pytest.mark.parametrize("response", [1, 7, 129])
def test_lengths_around_tiles(length: int, response: int) -> None:
    total = length + response
    segments = [[0, length, 0, length, length, length], [length, total, 0, length, length, total]]
    for changes in ({}, {"softcap": 5.0}, {"window_size": (100, 0)}):
        layout = {"segments": segments, "total_q": total, "total_k": total}
        check_case(layout, num_heads=1, num_heads_k=1, head_dim=8, **changes)


def test_wide_windows_run_on_triangles() -> None:
    """A window of 140 keys over 700 rows: cut into mirrored triangles, no tile by tile work."""
    table = [[0, 700, 0, 0, 0, 700]]
    kinds = {piece.kind for piece in cut(table, True, 139, -1)}
    assert Kind.REVERSED in kinds and Kind.BAND not in kinds
    check_case(
        {"segments": table, "total_q": 700, "total_k": 700}, num_heads=2, head_dim=8, window_size=(139, 0)
    )


def test_window_counts_keys_across_the_seam() -> None:
    """A window of W keys with itself: the response token at position 60 of prompt 50 sees 21..60 for W =
    40."""
    segments = [[0, 50, 0, 50, 50, 50], [50, 80, 0, 50, 50, 80]]
    case = Case(segments, 80, 80, num_heads=1, num_heads_k=1, head_dim=8, window_size=(39, 0))
    q, k = torch.zeros(80, 1, 8), torch.randn(80, 1, 8)
    v = torch.eye(80)[:, None]
    q, k = (torch.nn.functional.pad(x, (0, 72)) for x in (q, k))
    out, _ = attention(
        q, k, v, None, None, case.table, None, [], 80, 80, None, True, (39, 0), 0.0, None, False,
    )  # fmt: skip
    assert out[60, 0].nonzero().flatten().tolist() == list(range(21, 61))


@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_rows_without_keys_and_rows_behind_the_last_segment(softcap: float) -> None:
    """Exact zeros and -inf there, and NaN in unused rows reaches nothing."""
    case = Case(
        [[0, 5, 0, 0, 0, 2], [5, 8, 0, 0, 2, 2], [8, 12, 0, 0, 2, 6]], 15, 9, softcap=softcap, with_dlse=True
    )
    clean = run(case, op(case), torch.float32)
    empty = torch.tensor([0, 1, 2, 5, 6, 7, 12, 13, 14])
    assert not clean["out"][empty].any() and torch.isneginf(clean["lse"][:, empty]).all()
    assert not clean["dq"][empty].any() and not clean["dk"][6:].any() and not clean["dv"][6:].any()
    for name in ("q", "k", "v"):
        case.tensors[name][12 if name == "q" else 6 :] = torch.nan
    case.dout[12:] = torch.nan
    poisoned = run(case, op(case), torch.float32)
    for name, x in clean.items():
        torch.testing.assert_close(poisoned[name], x, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "begin", "end", "last"),
    [("q", 3, 4, 4), ("q", 91, 92, 92), ("k", 0, 37, 90), ("k", 20, 37, 90), ("k", 90, 92, 93)],
)
def test_nan_scores_reach_the_rows_that_see_them_and_no_others(
    name: str, begin: int, end: int, last: int
) -> None:
    """torch's kernels may take NaN scores for masked ones where there are few: out 0 and lse 0."""
    case = Case(**PACKED)
    clean = run(case, op(case), torch.float32)
    case.tensors[name][begin:end] = torch.nan
    got = run(case, op(case), torch.float32)
    sees = torch.zeros(case.total_q, dtype=torch.bool)
    sees[begin:last] = True
    for x in (got["out"], got["lse"].t(), got["dq"]):
        assert torch.isnan(x[sees]).all()
    torch.testing.assert_close(got["out"][~sees], clean["out"][~sees])
    torch.testing.assert_close(got["lse"][:, ~sees], clean["lse"][:, ~sees])


@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_infinite_scores_give_nan(scale: float) -> None:
    """From infinite inputs, and from finite ones whose product overflows."""
    case = Case(**VARLEN, causal=False, softmax_scale=scale)
    case.tensors["q"][0] = torch.inf if scale == 1.0 else 1e30
    out, lse = op(case)(**case.tensors)
    assert torch.isnan(out[0]).all() and torch.isnan(lse[:, 0]).all()
    assert out[17:30].isfinite().all() or scale > 1.0


@pytest.mark.parametrize("softmax_scale", [-0.4, 0.0])
@pytest.mark.parametrize(
    "changes", [{}, {"causal": False}, {"window_size": (30, 0)}, {"softcap": 3.0}, {"dtype": torch.bfloat16}],
    ids=str,
)  # fmt: skip
def test_scales_that_are_not_positive(softmax_scale: float, changes: dict[str, Any]) -> None:
    check_case(PACKED, softmax_scale=softmax_scale, with_dlse=True, **changes)


def test_nothing_at_all() -> None:
    for segments, total in (([], 0), ([], 3), ([[0, 0, 0, 0, 0, 0]], 2)):
        case = Case(segments, total, total)
        results = run(case, op(case), torch.float32)
        assert not results["out"].any() and torch.isneginf(results["lse"]).all() and not results["dk"].any()


def test_odd_strides_and_expanded_gradients() -> None:
    case = Case(**PACKED, num_heads=3, num_heads_k=3, head_dim=8)
    buffer = torch.randn(3, 3, 102, 10)
    views = {n: buffer[i].transpose(0, 1)[..., 1:9].requires_grad_() for i, n in enumerate("qkv")}
    plain = {n: x.detach().clone().contiguous().requires_grad_() for n, x in views.items()}
    outs = [op(case)(**x)[0] for x in (views, plain)]
    torch.testing.assert_close(outs[0], outs[1])
    grads = [
        torch.autograd.grad(o.sum(), list(x.values())) for o, x in zip(outs, (views, plain), strict=True)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_merged_parts_keep_a_float32_natural_log_lse() -> None:
    """Scores of +-80 in two parts, one of them empty for some rows: lse is logsumexp, fp32, (H, T)."""
    case = Case(**DUAL, dtype=torch.bfloat16, scale_q=80.0)
    _, lse = op(case)(**case.tensors)
    tensors = {n: x.double() for n, x in case.tensors.items()}
    _, ref = reference.attention(**tensors, segments=case.table, **case.options)
    assert lse.dtype == torch.float32 and lse.shape == (4, 53)
    torch.testing.assert_close(lse.double(), ref, rtol=1e-5, atol=1e-4)


def peak_mib(function: Any) -> float:
    """Growth of this process's peak resident size while `function` runs (Linux)."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    function()
    return (status("VmHWM") - before) / 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_memory_stays_linear(softcap: float) -> None:
    """Prompt of 16384 with 8 responses of 512: scores alone would take 1.7 GiB per head."""
    length, num, response = 16384 if softcap == 0.0 else 8192, 8, 512
    segments = [[0, length, 0, length, length, length]]
    for begin in range(length, length + num * response, response):
        segments.append([begin, begin + response, 0, length, begin, begin + response])
    total = length + num * response
    case = Case(segments, total, total, num_heads=1, num_heads_k=1, head_dim=8, softcap=softcap)
    assert peak_mib(lambda: run(case, op(case), torch.float32)) < 200


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    separate = rng.random() < 0.4
    num_context = rng.choice([0, 1, 5, 17, 40])
    segments, q_row, k_row = [], 0, 0 if separate else num_context
    for _ in range(rng.randint(1, 5)):
        rows, keys = rng.choice([0, 1, 2, 9, 33]), rng.choice([0, 1, 3, 9, 30])
        begin = rng.randint(0, num_context) if rng.random() < 0.2 else 0
        segments.append([q_row, q_row + rows, begin, num_context, k_row, k_row + keys])
        q_row, k_row = q_row + rows, k_row + keys
    head_dim, num_heads_k = rng.choice([4, 8, 16, 24]), rng.choice([1, 2, 3])
    return Case(
        segments, q_row + rng.choice([0, 0, 3]), k_row + rng.choice([0, 0, 3]),
        num_context if separate else None,
        num_heads=num_heads_k * rng.choice([1, 2, 3]), num_heads_k=num_heads_k, head_dim=head_dim,
        head_dim_v=rng.choice([head_dim, head_dim, 3]), dtype=rng.choice(DTYPES), causal=rng.random() < 0.7,
        window_size=(rng.choice([-1, -1, 0, 1, 7, 20]), rng.choice([-1, -1, 0, 2, 9])),
        softcap=rng.choice([0.0, 0.0, 0.0, 5.0]), sinks=rng.random() < 0.3, with_dlse=rng.random() < 0.3,
        seed=seed,
    )  # fmt: skip


def sweep(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds:
        width = random.Random(seed).choice([0, 3, 128])  # from all triangles to tiles wherever a window cuts
        monkeypatch.setattr(cpu, "cut", lambda *a, width=width: cut(*a, min_band_width=width))
        case = random_case(seed)
        check(case, op(case))


def test_random_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(range(40), monkeypatch)


@pytest.mark.slow
def test_long_random_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(range(1000, 3000), monkeypatch)


def test_pieces_cover_the_mask_exactly_once() -> None:
    """Brute force: the pieces' own masks add up to the reference's mask."""
    for seed in range(300):
        rng, case = random.Random(seed), random_case(seed)
        table = case.table.tolist()
        pieces = cut(table, case.causal, *case.window_size, min_band_width=rng.choice([0, 4, 128]))
        for parts in (pieces, list(bands(table, case.causal, *case.window_size))):
            covered = torch.zeros(case.total_q, (case.total_context or 0) + case.total_k, dtype=torch.int32)
            for r in runs(parts):
                p, row, key = (
                    r.piece,
                    torch.arange(r.piece.num_rows)[:, None],
                    torch.arange(r.piece.num_keys)[None],
                )
                shape = {
                    Kind.FULL: row >= 0,
                    Kind.CAUSAL: key <= row,
                    Kind.REVERSED: key >= row,
                    Kind.BAND: (key >= row + p.lower) & (key < row + p.upper),
                }[p.kind]
                for i in range(r.count):
                    q_begin = p.q_begin + i * r.q_step
                    k_begin = p.k_begin + i * r.k_step + (0 if p.context else case.total_context or 0)
                    covered[q_begin : q_begin + p.num_rows, k_begin : k_begin + p.num_keys] += shape.int()
            mask = reference.segment_mask(
                case.table, case.total_q, case.total_k, case.total_context, case.causal, case.window_size
            )
            assert torch.equal(covered, mask.int()), case
