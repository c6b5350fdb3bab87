"""ALiBi and dropout on the GPU: by the one rule against the reference with the same mask, equal to the CPU,
and dropout's statistics."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_cases import DEFAULTS, poisoned
from numerics import check, run

import flash_attn
from flash_attn import _alibi_dropout, _calls, _ops
from flash_attn._extras import Extras

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from alibi_dropout_cases import attend_extras, extras_case

DTYPES = [torch.bfloat16, torch.float16]
MODES = [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)]
LENGTHS = ([150, 0, 3, 200], [200, 7, 130, 1])
OPTIONS: list[dict[str, Any]] = [
    dict(alibi="heads"),
    dict(alibi="batch", causal=False),
    dict(alibi="batch", softcap=5.0, scale_q=4.0),
    dict(dropout_p=0.1),
    dict(dropout_p=0.5, causal=False, window_size=(39, 20)),
    dict(dropout_p=0.17, alibi="heads", window_size=(70, 0)),
]


def check_extras(deterministic: bool, lengths: tuple[list[int], list[int]] = LENGTHS, **options: Any) -> None:
    case, extras = extras_case(*lengths, **{**DEFAULTS, **options})
    with poisoned():
        check(case, attend_extras(case, extras, deterministic))


@pytest.mark.parametrize(("dtype", "deterministic"), MODES, ids=["bf16", "fp16", "bf16-deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], head_dim: int, deterministic: bool, dtype: torch.dtype) -> None:
    check_extras(deterministic, head_dim=head_dim, dtype=dtype, **options)


@pytest.mark.parametrize(("dtype", "deterministic"), MODES, ids=["bf16", "fp16", "bf16-deterministic"])
@pytest.mark.parametrize("head_dim", [40, 96, 192, 256])
def test_head_dims(head_dim: int, deterministic: bool, dtype: torch.dtype) -> None:
    for options in (dict(alibi="batch", dropout_p=0.3), dict(dropout_p=0.2, causal=False)):
        check_extras(deterministic, head_dim=head_dim, dtype=dtype, num_heads=6, num_heads_k=3, **options)


def test_many_short_sequences() -> None:
    """No tile holds two sequences, whose masks and slopes differ."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 40, (2, 90), generator=generator).tolist()
    check_extras(False, (lengths[0], lengths[1]), alibi="batch", dropout_p=0.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_equal_to_the_cpu(dtype: torch.dtype) -> None:
    """Equal states give equal masks: where one probability fewer were dropped, out would differ by far."""
    case, extras = extras_case(*LENGTHS, **{**DEFAULTS, "dtype": dtype}, alibi="batch", dropout_p=0.4)
    on_gpu = run(case, attend_extras(case, extras), dtype)
    host, moved = extras_case(
        *LENGTHS, **{**DEFAULTS, "dtype": dtype, "device": "cpu"}, alibi="batch", dropout_p=0.4
    )
    assert torch.equal(moved.rng_state, extras.rng_state.cpu())
    for name, x in run(host, attend_extras(host, moved), dtype).items():
        torch.testing.assert_close(
            on_gpu[name].cpu(), x, rtol=0.02, atol=0.04, msg=lambda m, n=name: f"{n}: {m}"
        )


def mask_of(rng_state: torch.Tensor, dropout_p: float, rows: int, keys: int) -> torch.Tensor:
    """The kernel's own mask of one head, read through v: equal scores, keys one-hot in slices of 64."""
    q = torch.zeros(rows, 1, 64, dtype=torch.float16, device="cuda")
    k = torch.zeros(keys, 1, 64, dtype=torch.float16, device="cuda")
    table = torch.tensor([[0, rows, 0, 0, 0, keys]], dtype=torch.int32, device="cuda")
    kept = []
    for begin in range(0, keys, 64):
        v = torch.zeros_like(k)
        columns = torch.arange(min(64, keys - begin), device="cuda")
        v[begin + columns, 0, columns] = 1.0
        out, _ = _calls.attention(
            q, k, v, None, None, table, None, [], rows, keys, None, False, (-1, -1), 0.0, None, False,
            Extras(None, dropout_p, rng_state),
        )  # fmt: skip
        kept.append(out[:, 0, : len(columns)] > 0)
    return torch.cat(kept, 1)


def test_the_mask_itself() -> None:
    state = torch.tensor([0x7123456789ABCDEF, 77], device="cuda")
    mask = mask_of(state, 0.3, 333, 459)
    rows, positions = torch.arange(333, device="cuda")[None], torch.arange(459, device="cuda")[None]
    expected = _alibi_dropout.random_bytes(state, rows, positions, 1)[0, 0]
    assert torch.equal(mask, expected < _alibi_dropout.keep_below(0.3))
    p = _alibi_dropout.keep_below(0.3) / 256
    assert abs(float(mask.double().mean()) - p) < 4.5 * math.sqrt(p * (1 - p) / mask.numel())


@pytest.mark.parametrize("dropout_p", [0.1, 0.17])
def test_public_functions_drop_the_fraction_asked_for(dropout_p: float) -> None:
    """As flash-attn's own test: the dropped fraction from S_dmask within 0.01, and out from it."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 300, 4, 64, dtype=torch.float16, device="cuda") for _ in range(3))
    out, lse, probabilities = flash_attn.flash_attn_func(
        q, k, v, dropout_p, causal=True, return_attn_probs=True
    )
    assert probabilities.shape == (2, 4, 384, 384) and lse.shape == (2, 4, 300)
    p = probabilities[:, :, :300, :300].float()
    seen = torch.ones(300, 300, device="cuda").tril().bool()
    assert abs(float((p < 0)[:, :, seen].float().mean()) - dropout_p) < 0.01
    from_mask = torch.einsum("bhqk,bkhd->bqhd", p.clamp_min(0.0) / (1 - dropout_p), v.float())
    torch.testing.assert_close(out.float(), from_mask, rtol=0.01, atol=0.01)


def test_states_come_from_torchs_generator_also_in_a_graph() -> None:
    q, k, v = (torch.randn(1, 128, 2, 64, dtype=torch.float16, device="cuda") for _ in range(3))

    def call() -> torch.Tensor:
        return flash_attn.flash_attn_func(q, k, v, dropout_p=0.5)

    torch.cuda.manual_seed(3)
    first = [call(), call()]
    torch.cuda.manual_seed(3)
    assert torch.equal(first[0], call()) and not torch.equal(first[0], first[1])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append(out.clone())
    assert not torch.equal(*replays) and all(x.isfinite().all() for x in replays)


def test_long_rows() -> None:
    check_extras(
        False, ([1500], [2100]), alibi="heads", dropout_p=0.1, head_dim=128, num_heads=2, num_heads_k=1
    )
    check_extras(
        True, ([2100], [1500]), alibi="heads", dropout_p=0.1, head_dim=64, num_heads=2, num_heads_k=1
    )


def test_head_dim_512_is_refused_by_name() -> None:
    q = torch.randn(1, 4, 2, 512, dtype=torch.float16, device="cuda")
    with pytest.raises(NotImplementedError, match="ALiBi and dropout run head_dim <= 256 on GPUs, got 512"):
        flash_attn.flash_attn_func(q, q, q, dropout_p=0.1)
    table = torch.tensor([[0, 4, 0, 0, 0, 4]], dtype=torch.int32, device="cuda")
    options = dict(num_heads_k=2, dtype=torch.float16, causal=True, window_size=(-1, -1), separate=True)
    with pytest.raises(NotImplementedError, match=r"no flash_attn kernel .*for head_dim 512"):
        _ops.plan_tables(table, 4, 4, None, 0, head_dim=512, **options)
