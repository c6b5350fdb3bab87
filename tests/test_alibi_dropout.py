"""ALiBi and dropout on the CPU: the mask against its definition, numerics against the reference, and what
the public and private functions of flash-attn return."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from alibi_dropout_cases import attend_extras, bias_of, extras_case, weights_of
from numerics import check
from torch import Tensor

import flash_attn
from flash_attn import _alibi_dropout, _calls, _extras, _ops
from flash_attn import flash_attn_interface as interface

CPU = torch.device("cpu")
CASES: list[dict[str, Any]] = [
    dict(alibi="heads"),
    dict(alibi="batch", causal=False),
    dict(alibi="batch", window_size=(9, 4), causal=False, softcap=3.0),
    dict(dropout_p=0.3),
    dict(dropout_p=0.17, causal=False, num_heads_k=4),
    dict(dropout_p=0.5, alibi="heads", window_size=(20, 0), num_heads_k=1),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_numerics(options: dict[str, Any], dtype: torch.dtype) -> None:
    case, extras = extras_case([21, 0, 40, 5], [37, 3, 40, 2], dtype=dtype, with_dlse=True, **options)
    check(case, attend_extras(case, extras))


def test_philox_gives_the_published_words() -> None:
    """Random123's known answers for counter and key 0, and all ones."""
    zero, ones = torch.zeros((), dtype=torch.int64), torch.tensor(0xFFFFFFFF)
    for rounds, x, expected in (
        (7, zero, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (10, zero, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (10, ones, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        assert tuple(map(int, _alibi_dropout.philox((x,) * 4, (x, x), rounds))) == expected


def philox_in_integers(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(7):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ key[0], b & 0xFFFFFFFF, (a >> 32) ^ counter[3] ^ key[1], a & 0xFFFFFFFF,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_the_mask_is_what_its_definition_says() -> None:
    state = torch.tensor([-0x123456789ABCDEF, 0x2222333344445555])
    rows, positions = torch.tensor([[5, 70000]]), torch.arange(11, 60)[None]
    found = _alibi_dropout.random_bytes(state, rows, positions, 3)
    assert found.shape == (1, 3, 2, 49)
    seed = int(state[0]) % (1 << 64)
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for head in range(3):
        for i, row in enumerate((5, 70000)):
            for j, position in enumerate(range(11, 60)):
                words = philox_in_integers([position // 16, row, head, 0x44445555], key)
                inside = position % 16
                word = words[inside % 8 // 2]
                assert int(found[0, head, i, j]) == word >> (8 * (inside // 8 * 2 + inside % 2)) & 0xFF


@pytest.mark.parametrize(
    ("dropout_p", "expected"), [(0.5, 128), (0.1, 230), (0.25, 192), (1e-6, 255), (0.9999, 1), (0.17, 212)]
)
def test_resolution(dropout_p: float, expected: int) -> None:
    assert _alibi_dropout.keep_below(dropout_p) == expected


def test_statistics() -> None:
    """Kept fraction, rows, heads and neighbours as independent draws: within 4.5 standard deviations."""
    state = torch.tensor([11, 3])
    rows, positions = torch.arange(400)[None], torch.arange(512)[None]
    kept = (_alibi_dropout.random_bytes(state, rows, positions, 2)[0] < 230).double()
    p, n = 230 / 256, kept.numel()
    assert abs(float(kept.mean()) - p) < 4.5 * math.sqrt(p * (1 - p) / n)
    centred = (kept - p) / math.sqrt(p * (1 - p))
    for a, b in (
        (centred[0], centred[1]),
        (centred[:, 1:], centred[:, :-1]),
        (centred[..., 1:], centred[..., :-1]),
        (centred[..., 16:], centred[..., :-16]),
        (centred[:, 8:], centred[:, :-8]),
    ):
        assert abs(float((a * b).mean())) < 4.5 / math.sqrt(a.numel())


def qkv(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def test_the_state_comes_from_torchs_generator() -> None:
    q, k, v = qkv(2, 9, 2, 8)
    torch.manual_seed(7)
    first = [flash_attn.flash_attn_func(q, k, v, dropout_p=0.4) for _ in range(2)]
    torch.manual_seed(7)
    again = flash_attn.flash_attn_func(q, k, v, dropout_p=0.4)
    assert torch.equal(first[0], again) and not torch.equal(first[0], first[1])


def test_the_mean_over_masks_is_attention() -> None:
    q, k, v = (x.detach() for x in qkv(1, 8, 2, 4, dtype=torch.float32))
    expected = flash_attn.flash_attn_func(q, k, v)
    total = sum(flash_attn.flash_attn_func(q, k, v, dropout_p=0.25) for _ in range(600)) / 600
    assert float((total - expected).abs().max()) < 0.15 and float((total - expected).mean().abs()) < 0.02


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_probabilities_and_lse_of_the_dense_function(causal: bool) -> None:
    """S_dmask is P, negative where dropped; the causal lse is that of S + slope * key's position."""
    q, k, v = qkv(2, 9, 4, 8)
    slopes = torch.rand(2, 4)
    options = dict(causal=causal, alibi_slopes=slopes, return_attn_probs=True)
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, dropout_p=0.4, **options)
    assert probabilities.shape == (2, 4, 128, 128)
    p = probabilities[..., :9, :9].double()
    torch.testing.assert_close(
        torch.einsum("bhqk,bkhd->bqhd", p.clamp_min(0.0) / 0.6, v), out, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(p.abs().sum(-1), torch.ones(2, 4, 9, dtype=torch.float64), rtol=1e-5, atol=0)
    assert 0.2 < float((p < 0).sum() / (p != 0).sum()) < 0.6
    assert not probabilities[..., 9:, :].any() and not probabilities[..., 9:].any()
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
    position = torch.arange(9)
    distance = (position[:, None] - position).abs()
    bias = position.expand(9, 9) if causal else -distance
    s = s + slopes[:, :, None, None] * bias
    if causal:
        s = s.masked_fill(position > position[:, None], -torch.inf)
    torch.testing.assert_close(lse, torch.logsumexp(s, -1), rtol=1e-6, atol=1e-6)
    _, without, empty = flash_attn.flash_attn_func(q, k, v, **options)
    torch.testing.assert_close(without, lse)
    assert empty.numel() == 0


def test_probabilities_under_autocast_are_those_of_its_dtype() -> None:
    q, k, v = qkv(1, 9, 2, 8, dtype=torch.bfloat16)
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            results.append(flash_attn.flash_attn_func(q, k, v, dropout_p=0.4, return_attn_probs=True))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
def test_packed_functions(alibi: bool) -> None:
    """Dense, varlen and packed calls of one batch have one mask: rows and keys' positions decide."""
    q, k, v = qkv(2, 6, 2, 8)
    options = dict(dropout_p=0.3, causal=True, alibi_slopes=torch.tensor([0.5, 0.1]) if alibi else None)
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    kv, all_three = torch.stack([k, v], 2), torch.stack([q, k, v], 2)
    flat = [x.flatten(0, 1) for x in (q, k, v, kv, all_three)]
    calls = (
        lambda: flash_attn.flash_attn_func(q, k, v, **options),
        lambda: flash_attn.flash_attn_kvpacked_func(q, kv, **options),
        lambda: flash_attn.flash_attn_qkvpacked_func(all_three, **options),
        lambda: flash_attn.flash_attn_varlen_func(*flat[:3], cu, cu, 6, 6, **options),
        lambda: flash_attn.flash_attn_varlen_kvpacked_func(flat[0], flat[3], cu, cu, 6, 6, **options),
        lambda: flash_attn.flash_attn_varlen_qkvpacked_func(flat[4], cu, 6, **options),
    )
    results = []
    for call in calls:
        torch.manual_seed(1)
        results.append(call().reshape(2, 6, 2, 8))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_private_functions(packed: bool) -> None:
    """The forward returns its state, with which the backward has its mask; lse in flash-attn's convention."""
    q, k, v = qkv(2, 9, 4, 8)
    slopes = torch.rand(4)
    tail = (0.3, 0.5, True, -1, 0, 0.0, slopes)
    lengths: tuple[Any, ...] = ()
    forward, backward = interface._flash_attn_forward, interface._flash_attn_backward
    public = flash_attn.flash_attn_func
    inputs = (q, k, v)
    if packed:
        cu = torch.tensor([0, 9, 18], dtype=torch.int32)
        lengths, inputs = (cu, cu, 9, 9), tuple(x.flatten(0, 1) for x in inputs)
        forward, backward = interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward
        public = flash_attn.flash_attn_varlen_func
    torch.manual_seed(5)
    out, lse, probabilities, rng_state = forward(*inputs, *lengths, *tail, True)
    assert rng_state.any() and probabilities.shape == (2, 4, 128, 128)
    assert forward(*inputs, *lengths, *tail, False)[2].numel() == 0
    torch.manual_seed(5)
    expected = public(*inputs, *lengths, dropout_p=0.3, softmax_scale=0.5, causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(out, expected.detach())
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, inputs, dout)
    grads = [torch.empty_like(x) for x in inputs]
    backward(dout, *inputs, out, lse, *grads, *lengths, *tail, False, rng_state)
    torch.testing.assert_close(tuple(grads), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="rng_state must be the forward's where dropout_p > 0, got None"):
        backward(dout, *inputs, out, lse, *grads, *lengths, *tail, False)


def test_the_ops_obey_torchs_rules() -> None:
    """Schema, fake shapes, autograd registration; and a compiled call without a graph break."""
    case, extras = extras_case([5, 7], [5, 7], alibi="heads", dropout_p=0.5)
    tensors = [x.requires_grad_() for x in case.tensors.values()]
    arguments = (*tensors, case.table, 7, 7, 0.3, True, -1, -1, 0.0, False, *extras)
    torch.library.opcheck(torch.ops.flash_attn.fwd_extras.default, arguments)
    out, lse = torch.ops.flash_attn.fwd_extras(*arguments)
    gradients = (torch.randn_like(out), None, *(x.detach() for x in (*tensors, out, lse)), *arguments[3:])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.flash_attn.bwd_extras.default, gradients, test_utils=checks)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(q, k, v, alibi_slopes=extras.alibi_slopes, dropout_p=0.2).sum()

    inputs = [torch.randn(1, 6, h, 16, requires_grad=True) for h in (4, 2, 2)]
    torch.compile(step, backend="aot_eager", fullgraph=True)(*inputs).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


def test_rows_behind_the_last_sequence_are_zeros() -> None:
    case, extras = extras_case([5, 7], [5, 7], alibi="batch", dropout_p=0.5)
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 3)).requires_grad_() for x in case.tensors.values())
    with torch.no_grad():
        q[12:], k[12:], v[12:] = torch.nan, torch.nan, torch.nan
    out, lse = attend_extras(case, extras)(q, k, v)
    wanted, _ = attend_extras(case, extras)(**case.tensors)
    torch.testing.assert_close(out[:12], wanted)
    assert not out[12:].any() and (lse[:, 12:] == -torch.inf).all()
    for grad in torch.autograd.grad(out[:12].sum(), (q, k, v)):
        assert not grad[12:].any() and grad.isfinite().all()


Q = torch.randn(2, 5, 4, 8)
ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"alibi_slopes": [1.0]}, TypeError, "alibi_slopes must be a float32 tensor, got list"),
    (
        {"alibi_slopes": torch.zeros(4).double()},
        TypeError,
        "alibi_slopes must be a float32 tensor, got torch.fl",
    ),
    (
        {"alibi_slopes": torch.zeros(3)},
        ValueError,
        r"alibi_slopes must be \(num_heads,\) or .* \(2, 4\), got \[3\]",
    ),
    (
        {"alibi_slopes": torch.zeros(4, device="meta")},
        ValueError,
        "alibi_slopes must be on q's device cpu, got meta",
    ),
    ({"alibi_slopes": torch.zeros(4).requires_grad_()}, NotImplementedError, "gradients of alibi_slopes"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
    ({"dropout_p": 0.5, "softcap": 2.0}, NotImplementedError, "dropout with softcap is not supported"),
]


@pytest.mark.parametrize(("options", "error", "message"), ERRORS, ids=str)
def test_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn.flash_attn_func(Q, Q, Q, **options)


STATES: list[tuple[Any, type[Exception], str]] = [
    ((1, 2), TypeError, "rng_state must be an int64 tensor, got tuple"),
    (torch.zeros(2), TypeError, "rng_state must be an int64 tensor, got torch.float32"),
    (torch.zeros(3, dtype=torch.int64), ValueError, r"rng_state must be \(2,\), got \[3\]"),
    (
        torch.zeros(2, dtype=torch.int64, device="meta"),
        ValueError,
        "rng_state must be on q's device cpu, got meta",
    ),
]


@pytest.mark.parametrize(("state", "error", "message"), STATES, ids=str)
def test_wrong_states(state: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _calls.extras_of(Q, 2, 0.5, None, 0.0, state)


def test_gpus_without_the_library_run_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    case, extras = extras_case([5, 7], [5, 9], alibi="batch", dropout_p=0.5)
    rest = (case.table, 7, 9, 0.3, True, -1, -1, 0.0, False, *extras)
    q, k, v = case.tensors.values()
    out, lse = torch.ops.flash_attn.fwd_extras(q, k, v, *rest)
    grads = torch.ops.flash_attn.bwd_extras(case.dout, None, q, k, v, out, lse, *rest)
    monkeypatch.setattr(_extras, "backend", lambda device: "composed")
    assert all(map(torch.equal, _extras._forward_cuda(q, k, v, *rest), (out, lse)))
    composed = _extras._backward_cuda(case.dout, None, q, k, v, out, lse, *rest)
    assert all(map(torch.equal, composed, grads))


def test_libraries_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.ops, "flash_attn_cuda", SimpleNamespace())
    with pytest.raises(
        NotImplementedError, match="library has no kernels with ALiBi and dropout: build it anew"
    ):
        _ops._refuse_missing_extras(device, 64, torch.float16)
    library = SimpleNamespace(fwd_extras=None, unsupported=lambda *a: "" if a[1] == 64 else f"not built: {a}")
    monkeypatch.setattr(torch.ops, "flash_attn_cuda", library)
    _ops._refuse_missing_extras(device, 64, torch.float16)
    with pytest.raises(NotImplementedError, match=r"not built: \(0, 128, torch.float16, True\)"):
        _ops._refuse_missing_extras(device, 128, torch.float16)


def test_large_head_dims_are_refused_on_gpus() -> None:
    q = torch.empty(1, 4, 2, 512, device="meta")
    with pytest.raises(NotImplementedError, match="ALiBi and dropout run head_dim <= 256 on GPUs, got 512"):
        _calls.extras_of(_OnGpu(q), 1, 0.5, None, 0.0, None)  # type: ignore[arg-type]


class _OnGpu:
    """A tensor that says it lies on a GPU, where there is none."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.device = x.shape, torch.device("cuda", 0)


def test_the_oracle_knows_positions() -> None:
    table = torch.tensor([[0, 1, 0, 0, 0, 3]])
    assert bias_of(table, torch.tensor([2.0]), 1, 3).tolist() == [[[-4.0, -2.0, 0.0]]]
    weights = weights_of(table, 0.5, torch.tensor([1, 0]), 1, 1, 3)
    assert set(weights.flatten().tolist()) <= {0.0, 2.0}


def test_slopes_made_in_a_graph_of_dynamic_shapes() -> None:
    def attend(x: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(x, x, x, causal=True, alibi_slopes=torch.tensor([0.5, 0.25]))

    torch._dynamo.reset()
    x = torch.randn(1, 8, 2, 8)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(x), attend(x))


def test_probabilities_are_refused_by_name_while_compiling() -> None:
    torch._dynamo.reset()
    x = torch.randn(1, 8, 2, 8)
    compiled = torch.compile(
        lambda x: flash_attn.flash_attn_func(x, x, x, dropout_p=0.5, return_attn_probs=True),
        fullgraph=True,
        backend="eager",
    )
    with pytest.raises(Exception, match="return_attn_probs with dropout needs an eager call"):
        compiled(x)  # torch wraps the error in one of its own
