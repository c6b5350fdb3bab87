"""Every message of checks.py, and what is refused by name."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flash_attn
from flash_attn import checks
from flash_attn.shared_prompt import SharedPromptLayout


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def cu(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


Q, K = rand(2, 5, 4, 8), rand(2, 5, 2, 8)
DENSE: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((None, K, K), {}, TypeError, r"q must be a tensor, got NoneType"),
    ((Q[0], K, K), {}, ValueError, r"q must be \(batch, seqlen_q, num_heads, head_dim\), got \[5, 4, 8\]"),
    ((Q, K[0], K), {}, ValueError, r"k must be \(batch, seqlen_k, num_heads_k, head_dim\), got \[5, 2, 8\]"),
    ((Q.int(), K, K), {}, TypeError, r"q must be float16, bfloat16, float32 or float64, got torch.int32"),
    ((Q, K.half(), K), {}, TypeError, r"k must have q's dtype torch.float32, got torch.float16"),
    ((Q, K, K.to("meta")), {}, ValueError, r"v must be on q's device cpu, got meta"),
    ((Q, K, K[:, :4]), {}, ValueError, r"v must have k's rows and heads \[2, 5, 2\], got \[2, 4, 2, 8\]"),
    ((Q, K[:1], K[:1]), {}, ValueError, r"k must have q's batch size 2, got \[1, 5, 2, 8\]"),
    ((Q[:, :, :3], K, K), {}, ValueError, r"q must have a multiple of k's 2 heads, got 3"),
    ((Q, K[..., :6], K), {}, ValueError, r"k must have q's head_dim 8, got 6"),
    ((Q, K, rand(2, 5, 2, 9)), {}, ValueError, r"v must have a head_dim of 1 to 8 \(that of q\), got 9"),
    ((Q, K, K), {"dropout_p": -1.0}, ValueError, r"dropout_p must be in \[0, 1\), got -1.0"),
    ((Q, K, K), {"softcap": -1.0}, ValueError, r"softcap must be >= 0 and finite \(0: none\), got -1.0"),
    ((Q, K, K), {"softcap": float("nan")}, ValueError, r"softcap must be >= 0 and finite .*, got nan"),
    ((Q, K, K), {"softcap": float("inf")}, ValueError, r"softcap must be >= 0 and finite .*, got inf"),
    ((Q, K, K), {"softcap": 1e300}, ValueError, r"softcap must be in \[1.18e-38, 3.4e\+38\] .*, got 1e\+300"),
    ((Q, K, K), {"softcap": 1e-40}, ValueError, r"softcap must be in .* \(torch.float32\), got 1e-40"),
    ((Q, K, K), {"softcap": 10**400}, ValueError, r"softcap must be .*, got 1000"),
    ((Q, K, K), {"softcap": Fraction(10**400)}, ValueError, r"softcap must be finite, got 1000"),
    ((Q, K, K), {"softcap": None}, TypeError, r"softcap must be a number, got None"),
    ((Q, K, K), {"dropout_p": "a"}, TypeError, r"dropout_p must be a number, got 'a'"),
    ((Q, K, K), {"dropout_p": "0"}, TypeError, r"dropout_p must be a number, got '0'"),
    ((Q, K, K), {"softmax_scale": "x"}, TypeError, r"softmax_scale must be a number, got 'x'"),
    ((Q, K, K), {"softmax_scale": [1.0]}, TypeError, r"softmax_scale must be a number, got \[1.0\]"),
    ((Q, K, K), {"softmax_scale": float("nan")}, ValueError, r"softmax_scale must be finite .*, got nan"),
    ((Q, K, K), {"softmax_scale": float("-inf")}, ValueError, r"softmax_scale must be finite .*, got -inf"),
    ((Q, K, K), {"softmax_scale": 1e300}, ValueError, r"must be finite \(torch.float32\), got 1e\+300"),
    ((Q, K, K), {"softmax_scale": -(10**400)}, ValueError, r"softmax_scale must be finite .*, got -1000"),
    ((Q, K, K), {"causal": "no"}, TypeError, r"causal must be a bool, got 'no'"),
    ((Q, K, K), {"causal": None}, TypeError, r"causal must be a bool, got None"),
    ((Q, K, K), {"deterministic": 2}, TypeError, r"deterministic must be a bool, got 2"),
    (
        (Q, K, K),
        {"window_size": (2**70, 0)},
        ValueError,
        r"window_size\[0\] must be an int of 64 bits, got 118",
    ),
    ((Q, K, K), {"window_size": (1,)}, ValueError, r"window_size must be \(left, right\), got \(1,\)"),
    ((Q, K, K), {"window_size": 3}, ValueError, r"window_size must be \(left, right\), got 3"),
    (
        (Q, K, K),
        {"window_size": torch.tensor(3)},
        ValueError,
        r"window_size must be \(left, right\), got tensor\(3\)",
    ),
    ((Q, K, K), {"window_size": torch.tensor([1.0, 2.0])}, TypeError, r"window_size\[0\] must be an int"),
    ((Q, K, K), {"window_size": (1.5, 0)}, TypeError, r"window_size\[0\] must be an int, got float"),
    ((Q, K, K), {"window_size": (0, None)}, TypeError, r"window_size\[1\] must be an int, got NoneType"),
]


@pytest.mark.parametrize(("args", "options", "error", "message"), DENSE)
def test_dense(args: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn.flash_attn_func(*args, **options)


def test_softcap_of_doubles_may_be_beyond_floats() -> None:
    q, k = Q.double(), K.double()
    wanted = flash_attn.flash_attn_func(q, k, k)
    torch.testing.assert_close(flash_attn.flash_attn_func(q, k, k, softcap=1e300), wanted)
    with pytest.raises(ValueError, match=r"softcap must be in .* \(torch.float64\), got 1e-320"):
        flash_attn.flash_attn_func(q, k, k, softcap=1e-320)


R, C = rand(6, 2, 8), cu(0, 2, 6)
VARLEN: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": R[None]}, ValueError, r"q must be \(total_q, num_heads, head_dim\), got \[1, 6, 2, 8\]"),
    ({"cu_seqlens_q": [0, 6]}, TypeError, r"cu_seqlens_q must be a tensor, got list"),
    ({"cu_seqlens_q": C.long()}, TypeError, r"cu_seqlens_q must be int32, got torch.int64"),
    ({"cu_seqlens_k": C.float()}, TypeError, r"cu_seqlens_k must be int32, got torch.float32"),
    ({"cu_seqlens_q": C[None]}, ValueError, r"cu_seqlens_q must be \(batch \+ 1,\) .*, got \[1, 3\]"),
    ({"cu_seqlens_q": C[:1]}, ValueError, r"cu_seqlens_q must be \(batch \+ 1,\) with batch >= 1, got \[1\]"),
    ({"cu_seqlens_q": C.to("meta")}, ValueError, r"cu_seqlens_q must be on q's device cpu, got meta"),
    ({"cu_seqlens_q": cu(1, 2, 6)}, ValueError, r"cu_seqlens_q must start at 0, got \[1, 2, 6\]"),
    ({"cu_seqlens_k": cu(0, 4, 3)}, ValueError, r"cu_seqlens_k must not decrease, got \[0, 4, 3\]"),
    (
        {"cu_seqlens_k": cu(0, 2, 7)},
        ValueError,
        r"cu_seqlens_k must end at or before the 6 rows .* got \[0, 2, 7\]",
    ),
    ({"cu_seqlens_k": cu(0, 6)}, ValueError, r"cu_seqlens_k must have cu_seqlens_q's length 3, got 2"),
    ({"max_seqlen_q": 3}, ValueError, r"max_seqlen_q must be at least the longest sequence \(4\), got 3"),
    ({"max_seqlen_k": 0}, ValueError, r"max_seqlen_k must be at least the longest sequence \(4\), got 0"),
    ({"max_seqlen_q": -1}, ValueError, r"max_seqlen_q must be >= 0, got -1"),
    ({"max_seqlen_q": 4.0}, TypeError, r"max_seqlen_q must be an int, got float"),
    ({"dropout_p": 0.5, "softcap": 1.0}, NotImplementedError, r"dropout with softcap is not supported"),
    ({"alibi_slopes": rand(3)}, ValueError, r"alibi_slopes must be \(num_heads,\) or .* \(2, 2\), got \[3\]"),
]


def varlen(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "q": R, "k": R, "v": R, "cu_seqlens_q": C, "cu_seqlens_k": C, "max_seqlen_q": 4, "max_seqlen_k": 4,
    }  # fmt: skip
    return flash_attn.flash_attn_varlen_func(**{**arguments, **changes})


@pytest.mark.parametrize(("changes", "error", "message"), VARLEN)
def test_varlen(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        varlen(**changes)


def test_numbers_and_flags_of_other_types() -> None:
    """NumPy's, integers and tensors without dimensions mean what the Python ones do."""
    wanted = flash_attn.flash_attn_func(Q, K, K, softmax_scale=0.5, causal=True, softcap=2.0)
    for causal, scale, softcap in (
        (np.bool_(True), np.float32(0.5), np.int64(2)),
        (1, torch.tensor(0.5), torch.tensor([2.0])),
        (torch.tensor(True), 0.5, 2),
    ):
        got = flash_attn.flash_attn_func(Q, K, K, softmax_scale=scale, causal=causal, softcap=softcap)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_that_are_not_positive_are_refused_on_gpus(scale: float) -> None:
    assert checks.softmax_scale(scale, "cpu", torch.float32) == scale
    with pytest.raises(NotImplementedError, match=f"softmax_scale must be > 0 on CUDA devices, got {scale}"):
        checks.softmax_scale(scale, "cuda", torch.float32)


def test_forward_mode_is_refused() -> None:
    """The op has no forward-mode formula; torch would drop the tangents without a word."""
    refused = pytest.raises(NotImplementedError, match=r"forward-mode derivatives \(jvp\) are not supported")
    with refused:
        torch.func.jvp(lambda x: flash_attn.flash_attn_func(x, K, K), (Q,), (torch.ones_like(Q),))
    with torch.autograd.forward_ad.dual_level():
        flash_attn.flash_attn_func(Q, K, K)  # no tangents
        dual = torch.autograd.forward_ad.make_dual(K, torch.ones_like(K))
        with refused:
            flash_attn.flash_attn_func(Q, dual, K)
        with refused:
            flash_attn.flash_attn_func(Q, K, dual)


def test_autocast_makes_no_floats_of_integers() -> None:
    message = r"q must be float16, .* got torch.int32"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=message):
        flash_attn.flash_attn_func(Q.int(), K.int(), K.int())


def test_legal_varlen_arguments() -> None:
    """A loose max_seqlen, rows behind the end, one-element tensors as ints; a long list is cut in
    messages."""
    wanted = varlen()
    torch.testing.assert_close(varlen(max_seqlen_q=100, max_seqlen_k=100), wanted)
    torch.testing.assert_close(varlen(max_seqlen_q=torch.tensor(4)), wanted)
    shorter = varlen(cu_seqlens_q=cu(0, 2, 4), cu_seqlens_k=cu(0, 2, 4))
    assert not shorter[4:].any() and shorter[:4].all()
    with pytest.raises(ValueError, match=r"must not decrease, got \[0, 1, 2, 3, 4, 5, 6, 7, \.\.\., 0\]"):
        varlen(cu_seqlens_q=cu(*range(20), 0), cu_seqlens_k=cu(*range(20), 0))


def test_packed_tensors() -> None:
    with pytest.raises(
        ValueError, match=r"qkv must be \(batch, seqlen, 3, num_heads, head_dim\), got \[2, 5, 4, 8\]"
    ):
        flash_attn.flash_attn_qkvpacked_func(Q)
    with pytest.raises(TypeError, match="kv must be a tensor, got NoneType"):
        flash_attn.flash_attn_kvpacked_func(Q, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"kv must be \(batch, seqlen, 2, num_heads, head_dim\), got"):
        flash_attn.flash_attn_kvpacked_func(Q, Q)
    with pytest.raises(ValueError, match=r"qkv must be \(total, 3, num_heads, head_dim\), got \[6, 2, 8\]"):
        flash_attn.flash_attn_varlen_qkvpacked_func(R, C, 4)
    with pytest.raises(ValueError, match=r"max_seqlen must be at least the longest sequence \(4\), got 1"):
        flash_attn.flash_attn_varlen_qkvpacked_func(rand(6, 3, 2, 8), C, 1)


DUAL: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"k_context": rand(3, 1, 8), "v_context": rand(3, 1, 8)},
        ValueError,
        r"k_context, v_context must have the heads",
    ),
    ({"v_context": rand(3, 2, 6)}, ValueError, r"k_context, v_context must have the heads and head dims of"),
    ({"k_context": rand(3, 2, 6)}, ValueError, r"k_context must have q's head_dim 8, got 6"),
    ({"v_decoded": rand(5, 2, 8)}, ValueError, r"v_decoded must have k_decoded's rows and heads"),
    ({"context_seqlen": 4}, ValueError, r"context_seqlen must be at most k_context's 3 rows, got 4"),
    ({"context_seqlen": -1}, ValueError, r"context_seqlen must be >= 0, got -1"),
    ({"context_seqlen": None}, TypeError, r"context_seqlen must be an int, got NoneType"),
    (
        {"cu_seqlens_k_decoded": cu(0, 6)},
        ValueError,
        r"cu_seqlens_k_decoded must have cu_seqlens_q's length 3, got 2",
    ),
    (
        {"max_seqlen_k_decoded": 1},
        ValueError,
        r"max_seqlen_k_decoded must be at least the longest sequence \(4\)",
    ),
    ({"sinks": rand(3)}, ValueError, r"sinks must be \(num_heads,\) = \(2,\), got \[3\]"),
    ({"sinks": cu(0, 1)}, TypeError, r"sinks must be a floating point tensor, got torch.int32"),
    ({"sinks": 1.0}, TypeError, r"sinks must be a floating point tensor, got float"),
    ({"sinks": rand(2).to("meta")}, ValueError, r"sinks must be on q's device cpu, got meta"),
    ({"softcap": -0.5}, ValueError, r"softcap must be >= 0"),
]


@pytest.mark.parametrize(("changes", "error", "message"), DUAL)
def test_dualkv(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": R, "k_context": R[:3], "v_context": R[:3], "k_decoded": R, "v_decoded": R, "cu_seqlens_q": C,
        "cu_seqlens_k_decoded": C, "max_seqlen_q": 4, "context_seqlen": 3, "max_seqlen_k_decoded": 4,
    }  # fmt: skip
    flash_attn.flash_attn_dualkv_varlen_func(**arguments)
    with pytest.raises(error, match=message):
        flash_attn.flash_attn_dualkv_varlen_func(**{**arguments, **changes})


def test_shared_prompt() -> None:
    layout = SharedPromptLayout.from_lengths(
        prompt_lens=[3], response_lens=[[4]], device="cpu", boundary="shared"
    )
    call = flash_attn.flash_attn_shared_prompt_func
    x = rand(7, 2, 8)
    with pytest.raises(TypeError, match=r"layout must be a SharedPromptLayout, got Tensor"):
        call(x, x, x, C)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"k must have q's 7 rows, got 6"):
        call(x, x[:6], x[:6], layout)
    with pytest.raises(ValueError, match=r"q must have at least the layout's 7 rows, got 6"):
        call(x[:6], x[:6], x[:6], layout)
    with pytest.raises(ValueError, match=r"layout must be on q's device meta, got cpu"):
        meta = x.to("meta")
        call(meta, meta, meta, layout)
    with pytest.raises(ValueError, match=r"sinks must be \(num_heads,\)"):
        call(x, x, x, layout, sinks=rand(5))


def test_devices_and_dtypes_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs no GPU to be said: fp32 and large heads are refused for CUDA tensors."""

    class OnGpu:
        type = "cuda"

    class Fake(Tensor):
        @property
        def device(self) -> Any:  # type: ignore[override]
            return on_gpu

    on_gpu = OnGpu()

    def fake(x: Tensor) -> Tensor:
        return x.as_subclass(Fake)

    small = [fake(x) for x in (Q, K, K)]
    with pytest.raises(
        NotImplementedError, match=r"q must be float16 or bfloat16 on CUDA devices, got torch.float32"
    ):
        checks.qkv(*small, 4)
    large = [fake(rand(1, 2, 2, 520, dtype=torch.float16)) for _ in range(3)]
    with pytest.raises(NotImplementedError, match="head_dim must be at most 512 on CUDA devices, got 520"):
        checks.qkv(*large, 4)
    on_gpu.type = "xpu"
    with pytest.raises(NotImplementedError, match="flash_attn runs on CPU and CUDA devices, got xpu"):
        checks.qkv(*small, 4)


def test_values_are_not_read_while_tracing() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, c: flash_attn.flash_attn_varlen_func(x, x, x, c, c, 6, 6),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(R, C), varlen())
    with pytest.raises(ValueError, match=r"segments\[1\] must"):  # the op itself still checks
        compiled(R, cu(0, 2, 7))


def test_numbers_may_be_symbolic_while_tracing() -> None:
    torch._dynamo.reset()
    call = flash_attn.flash_attn_func
    compiled = torch.compile(
        lambda x, scale, softcap: call(x, x, x, softmax_scale=scale, softcap=softcap, causal=True),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    for scale, softcap in ((0.3, 2.5), (0.7, 3.5), (0.9, 4.5)):
        wanted = call(K, K, K, softmax_scale=scale, softcap=softcap, causal=True)
        torch.testing.assert_close(compiled(K, scale, softcap), wanted)


def test_gpu_values_are_read_on_demand_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        device = torch.device("cuda")

    assert not checks.values_are_read(OnGpu())  # type: ignore[arg-type]
    monkeypatch.setenv("FLASH_ATTN_CHECK", "1")
    assert checks.values_are_read(OnGpu())  # type: ignore[arg-type]
    with torch._subclasses.FakeTensorMode():
        assert not checks.values_are_read(torch.empty(1))
    assert not checks.values_are_read(torch.empty(1, device="meta"))


def test_backend_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash_attn.backend("cpu") == "cpu"
    monkeypatch.setenv("FLASH_ATTN_BACKEND", "triton")
    with pytest.raises(ValueError, match="FLASH_ATTN_BACKEND must be 'cuda' or 'composed', got 'triton'"):
        flash_attn.backend()
    monkeypatch.delenv("FLASH_ATTN_BACKEND")
    with pytest.raises(NotImplementedError, match="flash_attn runs on CPU and CUDA devices, got xpu"):
        flash_attn.backend("xpu")


def test_a_missing_library_is_a_reason_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn import _backend

    monkeypatch.setattr(torch.version, "cuda", None)
    assert flash_attn.why_unavailable() == "torch is built without CUDA" and not flash_attn.is_available()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device is there: "):
        flash_attn.backend("cuda")
    assert flash_attn.why_unavailable() == "torch.cuda.is_available() is False"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_backend, "_load_library", lambda: "the compiled library is not built")
    assert flash_attn.why_unavailable() == "the compiled library is not built"
    _backend._gpu_backend.cache_clear()
    assert flash_attn.backend("cuda") == "composed"
    monkeypatch.setenv("FLASH_ATTN_BACKEND", "cuda")
    with pytest.raises(RuntimeError, match="FLASH_ATTN_BACKEND=cuda, but the compiled library is not built"):
        flash_attn.backend("cuda")
    monkeypatch.setattr(_backend, "_load_library", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(RuntimeError, match="GPUs before sm_80 are not supported, got sm_75"):
        flash_attn.backend("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(_backend, "_built", lambda: "sm70: fp16 64")
    with pytest.raises(RuntimeError, match=r"has no kernels for sm_90 \(built: sm70: fp16 64\)"):
        flash_attn.backend("cuda")
    monkeypatch.setattr(_backend, "_built", lambda: "sm90: bf16 64; sm80: bf16 64")
    assert flash_attn.backend("cuda") == "cuda-sm90a"
    monkeypatch.setenv("FLASH_ATTN_FORCE_ARCH", "80")
    assert flash_attn.backend("cuda") == "cuda-sm80"
    monkeypatch.setenv("FLASH_ATTN_FORCE_ARCH", "75")
    with pytest.raises(ValueError, match="FLASH_ATTN_FORCE_ARCH must be 80 or 90, got '75'"):
        flash_attn.backend("cuda")
    _backend._gpu_backend.cache_clear()


def test_backend_names_the_kernels_of_a_head_dim(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Hopper without sm_90a kernels for a head dim runs the sm_80 ones, and says so."""
    from types import SimpleNamespace

    from flash_attn import _backend

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_backend, "_gpu_backend", lambda *_: "cuda-sm90a")
    library = SimpleNamespace(
        built=lambda: "sm80: fp16 64, bf16 64 512; sm90: fp16 512, bf16 64 256",
        unsupported=lambda index, head_dim, dtype: "" if head_dim <= 512 else f"no kernel for {head_dim}",
    )
    monkeypatch.setattr(torch.ops, "flash_attn_cuda", library, raising=False)
    _backend._kernels_backend.cache_clear()
    with caplog.at_level("INFO", logger="flash_attn"):
        assert flash_attn.backend("cuda") == flash_attn.backend("cuda", head_dim=256) == "cuda-sm90a"
        assert not caplog.messages
        assert flash_attn.backend("cuda", head_dim=512) == "cuda-sm80"
        assert caplog.messages == [
            "flash_attn: head dim 512 in torch.bfloat16 runs on cuda-sm80, not cuda-sm90a"
        ]
    with pytest.raises(NotImplementedError, match="no kernel for 520"):
        flash_attn.backend("cuda", head_dim=520)
    _backend._kernels_backend.cache_clear()


def test_other_owners_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from importlib import metadata

    from flash_attn import _ownership

    class Owner:
        version = "2.8.3"

        def locate_file(self, path: str) -> str:
            return f"/elsewhere/{path}"

    monkeypatch.setattr(metadata, "distribution", lambda name: Owner())
    (tmp_path / "flash_attn_interface.py").touch()
    search = [str(tmp_path), *flash_attn.__path__]
    with pytest.warns(RuntimeWarning) as caught:
        _ownership.warn_of_other_copies(flash_attn.__version__, flash_attn.__file__, search)
    texts = [str(w.message) for w in caught]
    assert len(texts) == 2 and str(tmp_path) in texts[0] and "/elsewhere/flash_attn" in texts[1]
    assert all(flash_attn.__path__[0] in text for text in texts)
    Owner.version = flash_attn.__version__
    assert _ownership.other_copies(flash_attn.__version__, flash_attn.__file__, flash_attn.__path__) == []
