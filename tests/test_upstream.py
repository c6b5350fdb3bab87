"""flash-attn's private functions and its extension module, against autograd through the public ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flash_attn_2_cuda
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn import flash_attn_interface as interface

OPTIONS = dict(softmax_scale=0.3, causal=True, window_size=(5, -1), softcap=0.0)


def qkv(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def test_dense() -> None:
    q, k, v = qkv((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    expected, lse, _ = flash_attn_func(q, k, v, **OPTIONS, return_attn_probs=True)
    tail = (0.0, 0.3, True, 5, -1, 0.0, None)
    out, softmax_lse, mask, rng_state = interface._flash_attn_forward(q, k, v, *tail, False)
    torch.testing.assert_close((out, softmax_lse), (expected.detach(), lse.detach()))
    assert mask.numel() == 0 and rng_state.shape == (2,) and rng_state.dtype == torch.int64
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    softmax_d = interface._flash_attn_backward(dout, q, k, v, out, softmax_lse, *grads, *tail, False)
    torch.testing.assert_close(tuple(grads), wanted)
    assert softmax_d.shape == (2, 4, 128)
    torch.testing.assert_close(softmax_d[..., :5], (dout * out).sum(-1).transpose(1, 2).float())
    assert interface._wrapped_flash_attn_backward is interface._flash_attn_backward


def test_varlen() -> None:
    q, k, v = qkv((6, 4, 8), (9, 2, 8), (9, 2, 8))
    cu_q, cu_k = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 5, 9], dtype=torch.int32)
    lengths = (cu_q, cu_k, 4, 5)
    expected, lse, _ = flash_attn_varlen_func(q, k, v, *lengths, **OPTIONS, return_attn_probs=True)
    tail = (0.0, 0.3, True, 5, -1, 0.0, None)
    out, softmax_lse, _, _ = interface._flash_attn_varlen_forward(q, k, v, *lengths, *tail)
    torch.testing.assert_close((out, softmax_lse), (expected.detach(), lse.detach()))
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    softmax_d = interface._flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, *grads, *lengths, *tail, False
    )
    torch.testing.assert_close(tuple(grads), wanted)
    assert softmax_d.shape == (4, 6 + 2 * 128)
    torch.testing.assert_close(softmax_d[:, :6], (dout * out).sum(-1).t().float())


@pytest.mark.parametrize("packed", [False, True])
def test_autocast_casts_neither_direction(packed: bool) -> None:
    q, k, v = (x.detach().float() for x in qkv((1, 5, 4, 8), (1, 7, 2, 8), (1, 7, 2, 8)))
    tail = (0.0, 0.3, True, -1, -1, 0.0, None)
    forward, backward, lengths = interface._flash_attn_forward, interface._flash_attn_backward, ()
    if packed:
        forward, backward = interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward
        lengths = (torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0, 7], dtype=torch.int32), 5, 7)
        q, k, v = q[0], k[0], v[0]

    def run() -> list[Tensor]:
        out, lse, _, _ = forward(q, k, v, *lengths, *tail, False)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        backward(torch.ones_like(out), q, k, v, out, lse, *grads, *lengths, *tail, False)
        return [out, lse, *grads]

    wanted = run()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(), wanted, rtol=0, atol=0)


def test_a_ring_of_two_key_shares() -> None:
    """What ring attention does: merge forwards by lse, then a backward per share with that out and lse."""
    q, k, v = qkv((1, 6, 2, 4), (1, 8, 2, 4), (1, 8, 2, 4))
    expected = flash_attn_func(q, k, v)
    shares = [(k[:, :3], v[:, :3]), (k[:, 3:], v[:, 3:])]
    tail = (0.0, 0.5, False, -1, -1, 0.0, None)
    parts = [interface._flash_attn_forward(q, *share, *tail, False)[:2] for share in shares]
    lse = torch.stack([x for _, x in parts]).logsumexp(0)
    out = sum(o * (x - lse).exp().transpose(1, 2)[..., None] for o, x in parts)
    torch.testing.assert_close(out, expected.detach())
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    dq, dks, dvs = torch.zeros_like(q), [], []
    for share in shares:
        grads = [torch.empty_like(x) for x in (q, *share)]
        interface._flash_attn_backward(dout, q, *share, out, lse, *grads, *tail, False)
        dq, dks, dvs = dq + grads[0], [*dks, grads[1]], [*dvs, grads[2]]
    torch.testing.assert_close((dq, torch.cat(dks, 1), torch.cat(dvs, 1)), wanted)


def test_the_extension_module() -> None:
    q, k, v = (x.detach() for x in qkv((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)))
    tail = (0.0, 0.3, True, 5, -1, 0.0)
    expected = interface._flash_attn_forward(q, k, v, *tail, None, False)
    into = torch.empty_like(q)
    out, lse, _, _ = flash_attn_2_cuda.fwd(q, k, v, into, None, *tail, False, None)
    assert out is into
    torch.testing.assert_close((out, lse), expected[:2])
    dout = torch.randn_like(out)
    dq, dk, dv, _ = flash_attn_2_cuda.bwd(
        dout, q, k, v, out, lse, None, None, None, None, *tail, False, None, None
    )
    grads = [torch.empty_like(x) for x in (q, k, v)]
    interface._flash_attn_backward(dout, q, k, v, out, lse, *grads, *tail, None, False)
    torch.testing.assert_close([dq, dk, dv], grads)

    q, k, v, dout = (x.flatten(0, 1) for x in (q, k, v, dout))
    lengths = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 7, 14], dtype=torch.int32)
    rest = (5, 7, 0.0, 0.3, False, True, 5, -1, 0.0)
    packed, packed_lse, _, _ = flash_attn_2_cuda.varlen_fwd(
        q, k, v, None, *lengths, None, None, None, None, *rest, False, None
    )
    torch.testing.assert_close((packed, packed_lse), (out.flatten(0, 1), lse.transpose(0, 1).flatten(1)))
    packed_grads = flash_attn_2_cuda.varlen_bwd(
        dout, q, k, v, packed, packed_lse, None, None, None, *lengths, None, *rest, False, None, None
    )
    torch.testing.assert_close(packed_grads[:3], [x.flatten(0, 1) for x in grads])


def test_the_extension_modules_kvcache() -> None:
    q, k_cache, v_cache = (x.detach() for x in qkv((2, 1, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)))
    k, v = torch.randn(2, 2, 1, 2, 8, dtype=torch.float64)
    lengths = torch.tensor([3, 6], dtype=torch.int32)
    mine, theirs = ((k_cache.clone(), v_cache.clone()) for _ in range(2))
    expected = interface.flash_attn_with_kvcache(
        q, *theirs, k, v, cache_seqlens=lengths, softmax_scale=0.3, causal=True, return_softmax_lse=True
    )
    into = torch.empty_like(q)
    out, lse = flash_attn_2_cuda.fwd_kvcache(
        q, *mine, k, v, lengths, None, None, None, None, None, None, into, 0.3, True, -1, -1, 0.0, True, 0
    )
    assert out is into
    torch.testing.assert_close((out, lse), expected)
    torch.testing.assert_close(mine, theirs)


def test_wrong_arguments() -> None:
    q, k, v = (x.detach() for x in qkv((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)))
    tail = (0.0, 0.3, True, 5, -1, 0.0, None, False)
    out, lse, _, _ = interface._flash_attn_forward(q, k, v, *tail)
    with pytest.raises(
        ValueError, match=r"softmax_lse must be \(batch, num_heads, seqlen_q\), got \[4, 10\]"
    ):
        interface._flash_attn_backward(
            q, q, k, v, out, lse.transpose(0, 1).flatten(1), None, None, None, *tail
        )
    cu = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 7, 14], dtype=torch.int32), 5, 7
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"softmax_lse must be \(num_heads, total_q\), got \[2, 4, 5\]"):
        interface._flash_attn_varlen_backward(
            packed[0], *packed, packed[0], lse, None, None, None, *cu, *tail
        )
    for name in ("leftpad_k", "seqused_k"):
        with pytest.raises(ValueError, match=rf"{name} must be \(batch,\) = \[2\] on cpu, got \[3\]"):
            interface._flash_attn_varlen_forward(*packed, *cu, *tail[:-1], **{name: cu[0]})
    with pytest.raises(ValueError, match="head_dim must be at most 256, got 512"):
        interface._get_block_size_n(torch.device("cpu"), 512, False, False)


def test_helpers() -> None:
    x = torch.zeros(3, 4).t()
    assert interface.maybe_contiguous(x).stride(-1) == 1
    assert interface.maybe_contiguous(None) is None
    assert interface.round_multiple(129, 128) == 256
    assert interface._get_block_size_n(torch.device("cpu"), 128, True, False) == 32


def test_gradients_of_other_tensors_are_refused() -> None:
    """Shapes that would broadcast, or be viewed, into numbers of something else."""
    q, k, v = (x.detach() for x in qkv((4, 2, 8), (4, 2, 8), (4, 2, 8)))
    cu = torch.tensor([0, 4], dtype=torch.int32)
    good = dict(dout=q, q=q, k=k, v=v, out=q, softmax_lse=torch.zeros(2, 4), dq=None, dk=None, dv=None,
                cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4, dropout_p=0.0,
                softmax_scale=0.3, causal=True, window_size_left=-1, window_size_right=-1, softcap=0.0,
                alibi_slopes=None, deterministic=False)  # fmt: skip
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    for change, error, message in (
        ({"dout": q[:, :1]}, ValueError, r"dout must be \[4, 2, 8\], got \[4, 1, 8\]"),
        ({"out": q[:, :1]}, ValueError, r"out must be \[4, 2, 8\], got \[4, 1, 8\]"),
        ({"dout": None}, TypeError, "dout must be a tensor, got NoneType"),
        ({"dout": q.float()}, TypeError, "dout must have q's dtype torch.float64, got torch.float32"),
        ({"dk": torch.empty(8, 2, 4)}, ValueError, r"dk must be \[4, 2, 8\], got \[8, 2, 4\]"),
        ({"cu_seqlens_q": cu.long()}, TypeError, "cu_seqlens_q must be int32, got torch.int64"),
        ({"max_seqlen_k": 3}, ValueError, r"max_seqlen_k must be at least the longest sequence \(4\), got 3"),
    ):
        with pytest.raises(error, match=message):
            interface._flash_attn_varlen_backward(**good | change)
        if not any(name in change for name in lengths):
            dense = {name: x for name, x in (good | change).items() if name not in lengths}
            for name, x in dense.items():
                dense[name] = x[None] if isinstance(x, Tensor) else x
            with pytest.raises(error, match=message.replace(r"\[", r"\[1, ")):
                interface._flash_attn_backward(**dense)


CU = torch.tensor([0, 2, 5], dtype=torch.int32)
CLASSES = {
    "FlashAttnFunc": ("flash_attn_func", [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)], ()),
    "FlashAttnKVPackedFunc": ("flash_attn_kvpacked_func", [(2, 5, 4, 8), (2, 7, 2, 2, 8)], ()),
    "FlashAttnQKVPackedFunc": ("flash_attn_qkvpacked_func", [(2, 5, 3, 4, 8)], ()),
    "FlashAttnVarlenFunc": ("flash_attn_varlen_func", [(5, 4, 8), (5, 2, 8), (5, 2, 8)], (CU, CU, 3, 3)),
    "FlashAttnVarlenKVPackedFunc": (
        "flash_attn_varlen_kvpacked_func", [(5, 4, 8), (5, 2, 2, 8)], (CU, CU, 3, 3)
    ),
    "FlashAttnVarlenQKVPackedFunc": ("flash_attn_varlen_qkvpacked_func", [(5, 3, 4, 8)], (CU, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_the_autograd_classes(name: str) -> None:
    function, shapes, lengths = CLASSES[name]
    tensors = qkv(*shapes)
    table = (None,) if name == "FlashAttnVarlenFunc" else ()
    options = (0.0, 0.3, True, (5, -1), 0.0, None, False, True, *table)  # ..., return_softmax, block_table
    apply = getattr(interface, name).apply
    got = apply(*tensors, *lengths, *options, True)
    wanted = getattr(interface, function)(*tensors, *lengths, **OPTIONS, return_attn_probs=True)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    grads = [torch.autograd.grad(x[0].square().sum(), tensors) for x in (got, wanted)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert not apply(*tensors, *lengths, *options, False)[0].requires_grad


def test_names_that_the_interface_looks_up() -> None:
    from flash_attn.flash_attn_interface import FlashAttnFunc, flash_attn_gpu

    assert flash_attn_gpu is flash_attn_2_cuda and FlashAttnFunc is interface.FlashAttnFunc
    assert interface.USE_TRITON_ROCM is False
    with pytest.raises(AttributeError, match="has no attribute 'FlashAttnOtherFunc'"):
        _ = interface.FlashAttnOtherFunc
