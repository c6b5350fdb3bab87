"""Rotary embeddings against multiplication by complex numbers, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)


def tables(seqlen: int, rotary_dim: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    angle = torch.randn(seqlen, rotary_dim // 2, dtype=torch.float64)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def by_complex(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """x (rows, H, D) whose row i stands at position[i]."""
    half = cos.shape[1]
    pairs = x[..., : 2 * half]
    pairs = (
        pairs.unflatten(-1, (half, 2)) if interleaved else pairs.unflatten(-1, (2, half)).transpose(-1, -2)
    )
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[position][:, None]
    )
    turned = turned if interleaved else turned.transpose(-1, -2)
    return torch.cat((turned.flatten(-2), x[..., 2 * half :]), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [4, 10])
def test_dense(interleaved: bool, rotary_dim: int) -> None:
    x = torch.randn(2, 5, 3, 10, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(9, rotary_dim)
    out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=3)
    expected = by_complex(x.flatten(0, 1), cos, sin, (torch.arange(5) + 3).repeat(2), interleaved)
    torch.testing.assert_close(out.flatten(0, 1), expected)
    if rotary_dim == 4:
        torch.testing.assert_close(apply_rotary_emb_torch(x, cos[3:8], sin[3:8], interleaved), out)
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad((out * weight).sum(), x)
    (wanted,) = torch.autograd.grad((expected * weight.flatten(0, 1)).sum(), x)
    torch.testing.assert_close(grad, wanted)


def test_a_sequence_has_its_own_offset() -> None:
    x = torch.randn(3, 4, 2, 8, dtype=torch.float64)
    cos, sin = tables(12, 8)
    offsets = torch.tensor([0, 5, 8])
    out = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
    expected = by_complex(x.flatten(0, 1), cos, sin, (torch.arange(4) + offsets[:, None]).flatten(), False)
    torch.testing.assert_close(out.flatten(0, 1), expected)


@pytest.mark.parametrize("offsets", [0, torch.tensor([1, 2, 3, 0])])
def test_packed(offsets: int | Tensor) -> None:
    lengths = torch.tensor([3, 0, 4, 1])
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    x = torch.randn(8, 2, 6, dtype=torch.float64)
    cos, sin = tables(8, 6)
    position = torch.cat([torch.arange(n) for n in lengths.tolist()])
    if isinstance(offsets, Tensor):
        position = position + offsets.repeat_interleave(lengths)
    out = apply_rotary_emb(x, cos, sin, True, seqlen_offsets=offsets, cu_seqlens=cu_seqlens, max_seqlen=4)
    torch.testing.assert_close(out, by_complex(x, cos, sin, position, True))


def test_rows_beyond_the_tables_stay() -> None:
    x = torch.randn(1, 4, 1, 4, dtype=torch.float64)
    cos, sin = tables(5, 4)
    out = apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([3]))
    torch.testing.assert_close(out[:, 2:], x[:, 2:], rtol=0, atol=0)
    assert not torch.equal(out[:, :2], x[:, :2])


@pytest.mark.parametrize("form", ["three", "heads"])
def test_qkv_in_place(form: str) -> None:
    shape = (2, 5, 3, 2, 8) if form == "three" else (2, 5, 8, 8)
    num_heads_q = None if form == "three" else 4
    leaf = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    tables_q, tables_k = tables(6, 8), tables(6, 4)
    x = leaf * 1
    out = apply_rotary_emb_qkv_(x, *tables_q, *tables_k, seqlen_offsets=1, num_heads_q=num_heads_q)
    assert out.data_ptr() == x.data_ptr()
    if form == "three":
        q, k, v = leaf.unbind(2)
    else:
        q, k, v = leaf.split([4, 2, 2], 2)
    parts = [
        apply_rotary_emb(q, *tables_q, seqlen_offsets=1),
        apply_rotary_emb(k, *tables_k, seqlen_offsets=1),
        v,
    ]
    expected = torch.stack(parts, 2) if form == "three" else torch.cat(parts, 2)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad((out * weight).sum(), leaf)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), leaf)
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_in_place_on_leaves_and_compiled(compiled: bool, leaf: bool) -> None:
    """A leaf is written to, as flash-attn does; a compiled call has the gradients of an eager one."""
    given = torch.randn(2, 5, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    before, (cos, sin) = given.detach().clone().requires_grad_(), tables(6, 8)
    torch._dynamo.reset()  # torch.compile does not notice that another call's tensor is a leaf
    call = torch.compile(apply_rotary_emb_qkv_, backend="aot_eager") if compiled else apply_rotary_emb_qkv_
    x = given if leaf else given * 1
    out = call(x, cos, sin)
    wanted = torch.stack([*(apply_rotary_emb(before[:, :, i], cos, sin) for i in (0, 1)), before[:, :, 2]], 2)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(x, out)
    weight = torch.randn_like(out)
    out.backward(weight)
    wanted.backward(weight)
    torch.testing.assert_close(given.grad, before.grad)


def test_kv_in_place() -> None:
    kv = torch.randn(2, 5, 2, 3, 8, dtype=torch.float64)
    cos, sin = tables(5, 8)
    expected = torch.stack((apply_rotary_emb(kv[:, :, 0], cos, sin), kv[:, :, 1]), 2)
    assert apply_rotary_emb_kv_(kv, cos, sin) is kv
    torch.testing.assert_close(kv, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_half(interleaved: bool) -> None:
    x = torch.randn(2, 3, 1, 6, dtype=torch.float64)
    quarter = torch.zeros(3, 3, dtype=torch.float64), torch.ones(3, 3, dtype=torch.float64)
    torch.testing.assert_close(rotate_half(x, interleaved), apply_rotary_emb(x, *quarter, interleaved))


@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_module_scores_depend_on_distances_alone(scale_base: float | None) -> None:
    rotary = RotaryEmbedding(8, scale_base=scale_base)
    q, k = torch.randn(1, 1, 1, 8).expand(1, 12, 1, 8), torch.randn(1, 1, 1, 8).expand(1, 12, 1, 8)
    q_out, kv_out = rotary(q.clone(), torch.stack((k, k), 2))
    scores = q_out[0, :, 0] @ kv_out[0, :, 0, 0].T
    for distance in range(12):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    packed = rotary(torch.stack((q, k, k), 2))
    torch.testing.assert_close(packed[:, :, 0], q_out)
    torch.testing.assert_close(packed[:, :, 1], kv_out[:, :, 0])
    frequency = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    if scale_base is None:
        angle = torch.arange(12)[:, None] * frequency
        torch.testing.assert_close(q_out, apply_rotary_emb(q, angle.cos(), angle.sin()), rtol=1e-5, atol=1e-5)


def test_module_keeps_its_frequencies_in_fp32() -> None:
    exact, rounded = RotaryEmbedding(16), RotaryEmbedding(16).half()
    qkv = torch.randn(1, 300, 3, 1, 16)
    torch.testing.assert_close(rounded(qkv.clone()), exact(qkv.clone()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 2, 8)}, r"x must be \(batch, seqlen, num_heads, head_dim\), got \[3, 2, 8\]"),
        (
            {"cos": torch.zeros(5, 3)},
            r"cos and sin must be \(seqlen, rotary_dim / 2\), got \[5, 3\], \[5, 4\]",
        ),
        ({"x": torch.zeros(1, 3, 2, 6)}, r"cos must have at most head_dim / 2 = 3 columns, got 4"),
        ({"seqlen_offsets": 4}, r"cos must have rows for 4 \+ 3 positions, got 5 rows"),
        (
            {"seqlen_offsets": torch.zeros(2)},
            r"seqlen_offsets must be an int or \(batch,\) = \[1\], got \[2\]",
        ),
        (
            {"x": torch.zeros(3, 2, 8), "cu_seqlens": torch.tensor([0, 3])},
            "max_seqlen must be given with cu_seqlens",
        ),
    ],
)
def test_wrong_arguments(change: dict, message: str) -> None:
    arguments = {"x": torch.zeros(1, 3, 2, 8), "cos": torch.zeros(5, 4), "sin": torch.zeros(5, 4), **change}
    with pytest.raises(ValueError, match=message):
        apply_rotary_emb(**arguments)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0, 3, 2, 4], r"cu_seqlens must not decrease, got \[0, 3, 2, 4\]"),
        ([1, 4], r"cu_seqlens must start at 0, got \[1, 4\]"),
        ([0, 5], r"cu_seqlens must end at or before the 4 rows it describes, got \[0, 5\]"),
        ([0, 4], r"max_seqlen must be at least the longest sequence \(4\), got 3"),
        ([0], r"cu_seqlens must be \(batch \+ 1,\) with batch >= 1, got \[1\]"),
    ],
)
def test_cu_seqlens_that_describe_no_rows_are_refused(cu_seqlens: list[int], message: str) -> None:
    x, table = torch.zeros(4, 2, 8), torch.zeros(5, 4)
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(ValueError, match=message):
            apply_rotary_emb(x, table, table, cu_seqlens=torch.tensor(cu_seqlens, dtype=dtype), max_seqlen=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": [0, 4]}, "cu_seqlens must be a tensor, got list"),
        ({"cu_seqlens": torch.zeros(2)}, "cu_seqlens must be int32 or int64, got torch.float32"),
        ({"seqlen_offsets": torch.zeros(1)}, "seqlen_offsets must be int32 or int64, got torch.float32"),
        ({"seqlen_offsets": 0.5}, "seqlen_offsets must be an int, got float"),
        ({"max_seqlen": 4.0}, "max_seqlen must be an int, got float"),
    ],
)
def test_wrong_kinds_of_packed_arguments(change: dict, message: str) -> None:
    table = torch.zeros(5, 4)
    arguments = {"cu_seqlens": torch.tensor([0, 4]), "max_seqlen": 4, **change}
    with pytest.raises(TypeError, match=message):
        apply_rotary_emb(torch.zeros(4, 2, 8), table, table, **arguments)


def test_gradients_of_the_tables() -> None:
    x, (cos, sin) = torch.randn(2, 5, 3, 8, dtype=torch.float64), tables(5, 8)
    cos, sin = cos.double().requires_grad_(), sin.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda c, s: apply_rotary_emb(x, c, s), (cos, sin))
    message = "gradients of cos and sin are not supported in place"
    with pytest.raises(NotImplementedError, match=message):
        apply_rotary_emb(x.clone(), cos, sin.detach(), inplace=True)
    with pytest.raises(NotImplementedError, match=message):
        apply_rotary_emb_kv_(torch.stack((x, x), 2), cos.detach(), sin)
    with pytest.raises(NotImplementedError, match=message):
        apply_rotary_emb_qkv_(torch.stack((x, x, x), 2), cos, sin)
    with torch.no_grad():
        turned = apply_rotary_emb(x.clone(), cos, sin, inplace=True)
    torch.testing.assert_close(turned, apply_rotary_emb(x, cos, sin).detach())


def test_wrong_packed_arguments() -> None:
    cos = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"qkv must be .*got \[1, 3, 7, 8\], num_heads_q = 2"):
        apply_rotary_emb_qkv_(torch.zeros(1, 3, 7, 8), cos, cos, num_heads_q=2)
    with pytest.raises(ValueError, match=r"kv must be .*got \[1, 3, 3, 1, 8\]"):
        apply_rotary_emb_kv_(torch.zeros(1, 3, 3, 1, 8), cos, cos)
    with pytest.raises(ValueError, match="max_seqlen must be given where seqlen_offset is a tensor"):
        RotaryEmbedding(8)(torch.zeros(1, 3, 3, 1, 8), seqlen_offset=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"x must be floating point, got torch.int64"):
        apply_rotary_emb(torch.zeros(1, 3, 2, 8, dtype=torch.int64), cos, cos)


def test_tables_of_inference_mode_are_not_kept_for_gradients() -> None:
    module = RotaryEmbedding(8).eval()
    with torch.inference_mode():
        module(torch.zeros(1, 8, 3, 1, 8))
    qkv = torch.randn(1, 8, 3, 1, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(module(qkv * 1).sum(), qkv)
    (wanted,) = torch.autograd.grad(RotaryEmbedding(8)(qkv * 1).sum(), qkv)
    torch.testing.assert_close(grad, wanted)


def test_offsets_without_max_seqlen_reach_as_far_as_the_calls_before() -> None:
    module, offsets = RotaryEmbedding(8), torch.tensor([4, 1], dtype=torch.int32)
    module(torch.zeros(1, 8, 3, 1, 8))
    qkv = torch.randn(2, 2, 3, 1, 8)
    turned = module(qkv.clone(), seqlen_offset=offsets)
    torch.testing.assert_close(turned, RotaryEmbedding(8)(qkv.clone(), seqlen_offset=offsets, max_seqlen=8))


@pytest.mark.parametrize("dynamic", [False, True])
def test_module_compiled_in_one_graph(dynamic: bool) -> None:
    """Its tables made in the graph, and kept from a call before."""
    torch._dynamo.reset()
    module = RotaryEmbedding(8)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seqlen in (5, 5, 4):
        qkv = torch.randn(2, seqlen, 3, 2, 8)
        torch.testing.assert_close(compiled(qkv.clone()), RotaryEmbedding(8)(qkv.clone()))
