"""The decode kernels in Triton's interpreter, against the op on the same calls; and how keys are split.

Triton is part of GPU builds of torch; elsewhere `pip install triton` brings the interpreter (Linux). The
interpreter does not know bf16 products, which tests/gpu/test_gpu_kvcache.py runs.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn
from flash_attn import (
    _decode,
    _decode_again,
    _kvcache_checks,
    checks,
    flash_attn_shared_prompt_with_kvcache,
    flash_attn_with_kvcache,
)

B, CAPACITY, H, HK = 3, 200, 4, 2
LENGTHS, PADDING = [130, 0, 200], [3, 0, 100]


def test_splits_fill_the_gpu() -> None:
    def splits(programs: int, keys: int) -> int:
        return _decode.choose_splits(programs, _decode.most_splits(keys), slots=264)

    assert splits(1024, 65536) == 1  # 3.9 waves
    assert splits(4, 131072) in range(60, 67)  # one wave
    assert splits(4, 2048) == 8  # none shorter than 256 keys
    assert splits(4, 100) == 1
    assert splits(300, 65536) > 1  # 1.1 waves would waste one
    assert _decode.choose_splits(4, _decode.most_splits(8192), slots=132) == 33  # every SM, none twice
    assert _decode.choose_splits(32, _decode.most_splits(8192), slots=132) == 4  # 33 would be 8 waves
    assert _decode.choose_splits(128, _decode.most_splits(8192), slots=132) == 1
    assert _decode.most_splits(1 << 20) == 128  # capacities beyond are one entry of the cache


@pytest.mark.parametrize("missing", ["triton", "triton.language.extra.cuda"])
def test_no_triton_is_said_once(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not there, or a release whose CUDA part lacks what the kernels import."""
    if missing != "triton":
        pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "flash_attn._decode_kernel", raising=False)
    monkeypatch.delattr(flash_attn, "_decode_kernel", raising=False)
    _decode.kernels.cache_clear()
    with caplog.at_level("WARNING", "flash_attn"):
        assert _decode.kernels() is None and _decode.kernels() is None
    _decode.kernels.cache_clear()
    (record,) = caplog.records
    assert record.getMessage().startswith("flash_attn decodes through the op, because Triton does not run: ")


def test_a_merge_takes_no_more_programs_than_run_beside_what_it_waits_for() -> None:
    blocks = [_decode._merge_blocks(128, rows, num_sms=132) for rows in (32, 66, 128, 256, 5000)]
    assert blocks == [4, 4, 2, 1, 1]
    assert [_decode._merge_blocks(columns, 8, num_sms=132) for columns in (16, 64, 256)] == [1, 2, 8]


def test_what_triton_has_compiled_is_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled anew for what Triton compiles anew for; the constants go in the kernel's order."""
    compiled, launched = [], []

    class Kernel:
        arg_names = ("x", "n", "BLOCK", "OVERLAP")

        def __getitem__(self, grid: Any) -> Any:
            def compile_and_run(*arguments: Any, **options: Any) -> Any:
                compiled.append((grid, arguments, options))
                return Launcher()

            return compile_and_run

    class Launcher:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments: launched.append((grid, arguments))

    monkeypatch.setattr(_decode, "kernels", lambda: SimpleNamespace(kernel=Kernel()))
    monkeypatch.setattr(_decode, "_compiled", {})
    x = torch.zeros(64)
    y = x.clone()

    def run(*arguments: Any, block: int = 8, warps: int = 4) -> None:
        _decode._launch("kernel", (3, 2, 1), arguments, dict(OVERLAP=True, BLOCK=block), num_warps=warps)

    run(x, 32)
    assert compiled == [((3, 2, 1), (x, 32), dict(OVERLAP=True, BLOCK=8, launch_pdl=True, num_warps=4))]
    run(y, 48)
    assert len(compiled) == 1 and launched == [((3, 2, 1), (y, 48, 8, True))]
    for other in ((x, 33), (x, 1), (x, 2**31), (x[1:], 32), (x.half(), 32)):
        run(*other)
    run(x, 32, block=16)
    run(x, 32, warps=8)
    assert len(compiled) == 8 and len(launched) == 1


@pytest.mark.parametrize("lengths", [torch.tensor([130, 7, 70, 7])[::2], torch.tensor([70]).expand(2)])
def test_nothing_is_launched_between_the_kernels(lengths: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two kernels that run side by side does not wait for what stands between them."""
    order: list[str] = []
    contiguous: list[bool] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            order.append(str(func))
            return func(*args, **(kwargs or {}))

    def launch(name: str, grid: Any, arguments: tuple[Any, ...], constants: Any, **options: Any) -> None:
        order.append(name)
        contiguous.extend(x.is_contiguous() for x in arguments if isinstance(x, Tensor))

    monkeypatch.setattr(_decode, "_launch", launch)
    q, k_prompt, v_prompt = torch.randn(4, 1, H, 16), torch.randn(2, 130, HK, 16), torch.randn(2, 130, HK, 16)
    k, v = torch.randn(4, 40, HK, 16), torch.randn(4, 40, HK, 16)
    own = _decode.Keys(k, v, torch.arange(1, 9)[::2], 0)
    with Operations():
        _decode.decode(q, own, 0.25, 0.0, prompt=_decode.Keys(k_prompt, v_prompt, lengths, 0))
    assert order[-3:] == ["partial", "partial", "merge"] and "aten.clone.default" in order
    assert contiguous and all(contiguous)


@pytest.fixture
def interpreter() -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it when it is imported
        pytest.skip("run by `make kernels`, with TRITON_INTERPRET=1")


def both(monkeypatch: pytest.MonkeyPatch, function: Any, *args: Any, **kwargs: Any) -> None:
    """function on the kernels and through the op; what it writes into caches too."""
    results, launches = [], []
    launch = _decode._Launch.run

    def count(self: Any, *arguments: Any, **options: Any) -> None:
        launches.append(choice)
        launch(self, *arguments, **options)

    for choice in ("", "op"):
        monkeypatch.setenv("FLASH_ATTN_DECODE", choice)
        copies = [x.clone() for x in args]
        with monkeypatch.context() as patch:
            patch.setattr(_decode._Launch, "run", count)
            out, lse = function(*copies, return_softmax_lse=True, **kwargs)
        results.append((out, lse, *copies))
    assert launches and "op" not in launches and bool(results[0][0].isfinite().all())
    tolerance = 2e-3 if args[0].dtype == torch.float16 else 2e-6
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance, equal_nan=True)  # caches have some


def tensors(seqlen_q: int, head_dim: int, dtype: torch.dtype, head_dim_v: int | None = None) -> list[Tensor]:
    shapes = [(seqlen_q, H, head_dim), (CAPACITY, HK, head_dim), (CAPACITY, HK, head_dim_v or head_dim)]
    made = [torch.randn(B, *shape).to(dtype) for shape in shapes]
    for x in made[1:]:
        for b, n in enumerate(LENGTHS):
            x[b, n:] = 0 if dtype == torch.float16 else 1e30  # what is not there must reach nothing
    return made


CASES: dict[str, tuple[int, int, torch.dtype, dict[str, Any]]] = {
    "one split": (1, 16, torch.float32, dict(num_splits=1)),
    "splits": (1, 16, torch.float32, dict(num_splits=5)),
    "more splits than tiles": (1, 16, torch.float32, dict(num_splits=9)),
    "fp16": (1, 32, torch.float16, dict(num_splits=2)),
    "queries, causal": (3, 24, torch.float32, dict(num_splits=2, causal=True)),
    "window": (2, 16, torch.float32, dict(num_splits=2, causal=True, window_size=(40, 0))),
    "window on both sides": (2, 16, torch.float32, dict(window_size=(70, 1))),
    "softcap": (1, 16, torch.float32, dict(softcap=2.0, softmax_scale=0.7)),
    "window of the second tile": (1, 16, torch.float32, dict(window_size=(10, 0))),
    "left padding": (1, 16, torch.float32, dict(num_splits=2, cache_leftpad=torch.tensor(PADDING).int())),
    "alibi": (2, 16, torch.float32, dict(alibi_slopes=torch.tensor([0.5, 0.2, 0.1, 0.05]), num_splits=3)),
    "alibi, causal": (2, 16, torch.float32, dict(alibi_slopes=torch.rand(B, H), causal=True)),
    "rows of two tiles": (20, 16, torch.float32, dict(causal=True)),
}


def unseen(seqlen_q: int, options: dict[str, Any]) -> list[int]:
    """Keys in front of all that a sequence's queries see: padding, and what has left the window."""
    left = options.get("window_size", (CAPACITY, 0))[0]
    padding = PADDING if "cache_leftpad" in options else [0] * B
    return [max(pad, n - seqlen_q - left, 0) for pad, n in zip(padding, LENGTHS, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_op(case: str, interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seqlen_q, head_dim, dtype, options = CASES[case]
    x = tensors(seqlen_q, head_dim, dtype)
    for b, begin in enumerate(unseen(seqlen_q, options)):
        for cache in x[1:]:
            cache[b, :begin] = torch.nan
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    both(monkeypatch, flash_attn_with_kvcache, *x, cache_seqlens=lengths, **options)


def test_lengths_of_all_kinds(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.where(x < 1e29, 0.5) for x in tensors(1, 16, torch.float32, head_dim_v=8))
    for lengths in (None, 150, torch.tensor(LENGTHS)):
        both(monkeypatch, flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths)
    index = torch.tensor([2, 0, 0], dtype=torch.int32)
    both(monkeypatch, flash_attn_with_kvcache, q, k, v, cache_seqlens=90, cache_batch_idx=index)


def test_appending(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = [y.where(y < 1e29, 0.5) for y in tensors(2, 16, torch.float32)]
    new = [torch.randn(B, 2, HK, 16), torch.randn(B, 2, HK, 16)]
    lengths = torch.tensor([130, 0, 198], dtype=torch.int32)
    both(monkeypatch, flash_attn_with_kvcache, *x, *new, cache_seqlens=lengths, causal=True)
    both(monkeypatch, flash_attn_with_kvcache, *x, *new, cache_seqlens=17)
    index = torch.tensor([2, 0, 1], dtype=torch.int32)
    both(monkeypatch, flash_attn_with_kvcache, *x, *new, cache_seqlens=lengths, cache_batch_idx=index)


def test_a_call_like_one_before(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches are made again with its own tensors; another kind of call is looked at."""
    kernels, again, looked = _decode.kernels(), [], []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(kernels, name)
            self.arg_names = self.kernel.arg_names

        def __getitem__(self, grid: Any) -> Any:
            def first(*arguments: Any, **options: Any) -> Any:
                self.kernel[grid](*arguments, **options)
                return Compiled(self)

            return first

    class Compiled(Kernel):
        def __init__(self, kernel: Kernel) -> None:
            super().__init__(kernel.name)

        def __getitem__(self, grid: Any) -> Any:
            return lambda *everything: (again.append(self.name), self.kernel[grid](*everything))

    shapes = _kvcache_checks.shapes
    named = {name: Kernel(name) for name in ("append", "partial", "merge")}
    monkeypatch.setattr(_decode, "kernels", lambda: SimpleNamespace(**named))
    monkeypatch.setattr(_decode, "_compiled", {})
    monkeypatch.setattr(_decode_again, "_known", {})
    monkeypatch.setattr(checks, "values_are_read", lambda x: False)
    monkeypatch.setattr(_kvcache_checks, "shapes", lambda *x: (looked.append(1), shapes(*x)))
    angle = torch.randn(CAPACITY, 8)
    tables = dict(rotary_cos=angle.cos(), rotary_sin=angle.sin(), causal=True, num_splits=2)

    def call(begin: list[int], new: int = 1, **options: Any) -> tuple[int, list[str]]:
        """How often arguments were looked at, and what was launched as before."""
        x = [y.where(y < 1e29, 0.5) for y in tensors(1, 16, torch.float32)]
        x += [torch.randn(B, new, HK, 16), torch.randn(B, new, HK, 16)]
        results = []
        for choice in ("op", ""):
            monkeypatch.setenv("FLASH_ATTN_DECODE", choice)
            again.clear(), looked.clear()
            given = [y.clone() for y in x]
            rest = dict(cache_seqlens=torch.tensor(begin, dtype=torch.int32)) | tables | options
            results.append((*flash_attn_with_kvcache(*given, return_softmax_lse=True, **rest), *given))
        torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)
        return len(looked), list(again)

    assert call([130, 0, 198]) == (1, [])
    for begin in ([3, 199, 0], [130, 0, 198]):
        assert call(begin) == (0, ["append", "partial", "merge"])
    column = torch.stack([torch.tensor([5, 6, 7])] * 2, 1)[:, 0]
    for other in (
        dict(causal=False), dict(window_size=(5, 0)), dict(softcap=2.0), dict(softmax_scale=0.3), dict(new=2),
        dict(rotary_interleaved=False), dict(num_splits=1), dict(cache_seqlens=torch.tensor([1, 2, 3])),
        dict(cache_leftpad=torch.zeros(3, dtype=torch.int32)), dict(cache_seqlens=7),
        dict(cache_seqlens=column), dict(rotary_sin=torch.randn(CAPACITY, 16)[:, :8]),
        dict(cache_batch_idx=torch.tensor([2, 0, 1], dtype=torch.int32)),
    ):  # fmt: skip
        assert call([30, 7, 60], **other)[0] == 1, other
    assert call([30, 7, 60], cache_seqlens=column)[0] == 1  # would be copied: never as before
    assert call([30, 7, 60]) == (0, ["append", "partial", "merge"])
    monkeypatch.setattr(_decode_again, "_known", {})
    q, k, v = (y.where(y < 1e29, 0.5) for y in tensors(1, 16, torch.float32))
    lengths = torch.tensor([90, 60, 30], dtype=torch.int32)
    flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths)  # one tensor for two
    strided = torch.cat([v, v], -1)[..., :16]  # v's shape
    outs = [flash_attn_with_kvcache(q, k, x, cache_seqlens=lengths) for x in (v, strided)]
    for out in outs:
        _decode_again._known.clear()
        fresh = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
        torch.testing.assert_close(out, fresh, rtol=0, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_rotary(
    rotary_dim: int, causal: bool, interleaved: bool, interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (y.where(y < 1e29, 0.5) for y in tensors(2, 16, torch.float32))
    new = [torch.randn(B, 2, HK, 16), torch.randn(B, 2, HK, 16)]
    angle = torch.randn(CAPACITY + 5, rotary_dim // 2)
    tables = dict(rotary_cos=angle.cos(), rotary_sin=angle.sin(), causal=causal)
    tables |= dict(rotary_interleaved=interleaved)
    for lengths in (torch.tensor([130, 0, 198], dtype=torch.int32), 60):
        both(monkeypatch, flash_attn_with_kvcache, q, k, v, *new, cache_seqlens=lengths, **tables)
    pages = [x[:, :192].reshape(9, 64, HK, 16) for x in (k, v)]
    table = torch.randperm(9).int().view(3, 3)
    lengths = torch.tensor([130, 0, 63], dtype=torch.int32)
    options = dict(cache_seqlens=lengths, block_table=table, **tables)
    both(monkeypatch, flash_attn_with_kvcache, q, *pages, *new, **options)


def test_strided_vectors(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, indices, pages and tables that are columns of something wider."""

    def column(x: Tensor) -> Tensor:
        return torch.stack((x, torch.full_like(x, 77)), -1)[..., 0]

    q, k, v = (y.where(y < 1e29, 0.5) for y in tensors(1, 16, torch.float32))
    new = [torch.randn(B, 1, HK, 16), torch.randn(B, 1, HK, 16)]
    angle = torch.randn(CAPACITY, 8)
    tables = dict(rotary_cos=column(angle.cos()), rotary_sin=angle.sin(), causal=True)
    lengths = column(torch.tensor([130, 0, 199], dtype=torch.int32))
    index = column(torch.tensor([2, 0, 1], dtype=torch.int32))
    options = dict(cache_seqlens=lengths, cache_batch_idx=index, cache_leftpad=column(lengths // 4))
    both(monkeypatch, flash_attn_with_kvcache, q, k, v, *new, **options, **tables)
    pages = [x[:, :192].reshape(9, 64, HK, 16) for x in (k, v)]
    table = column(torch.randperm(9).int().view(3, 3))
    options = dict(cache_seqlens=lengths.clamp(max=180), block_table=table)
    both(monkeypatch, flash_attn_with_kvcache, q, *pages, *new, **options)


@pytest.mark.parametrize("paged", [False, True])
def test_padding_of_a_batch(paged: bool, interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of -1 keys, as transformers pads captured batches with, write nothing."""
    monkeypatch.setattr(checks, "values_are_read", lambda x: False)
    q, k, v = (y.where(y < 1e29, 0.5) for y in tensors(1, 16, torch.float32))
    new = [torch.randn(B, 1, HK, 16), torch.randn(B, 1, HK, 16)]
    lengths = torch.tensor([-1, 130, -1])
    options: dict[str, Any] = dict(cache_seqlens=lengths, causal=True)
    if paged:
        k, v = (x[:, :192].reshape(9, 64, HK, 16) for x in (k, v))
        options["block_table"] = torch.tensor([[-1] * 3, [4, 0, 7], [-1] * 3]).int()
    both(monkeypatch, flash_attn_with_kvcache, q, k, v, *new, **options)


@pytest.mark.parametrize("page", [64, 128])
def test_pages(page: int, interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(B, 1, H, 16)
    k, v = torch.randn(12, page, HK, 16), torch.randn(12, page, HK, 16)
    table = torch.randperm(12).int().view(3, 4)
    lengths = torch.tensor([page + 7, 0, 4 * page], dtype=torch.int32)
    options = dict(cache_seqlens=lengths, block_table=table, num_splits=3)
    both(monkeypatch, flash_attn_with_kvcache, q, k, v, **options)


def test_shared_prompt(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of six sequences, two queries each: 24 rows of a kv head on a prompt."""
    q = torch.randn(12, 2, H, 16)
    k_prompt, v_prompt = torch.randn(2, 130, HK, 16), torch.randn(2, 130, HK, 16)
    k, v = torch.randn(12, 40, HK, 16), torch.randn(12, 40, HK, 16)
    lengths = torch.arange(2, 38, 3)
    options = dict(prompt_seqlens=torch.tensor([130, 70]), cache_seqlens=lengths, causal=True)
    for num_splits in (0, 2):
        both(
            monkeypatch, flash_attn_shared_prompt_with_kvcache, q, k_prompt, v_prompt, k, v,
            num_splits=num_splits, **options,
        )  # fmt: skip


@pytest.mark.parametrize("turned", ["k_prompt", "v_prompt"])
def test_transposed_prompts(turned: str, interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels read rows of unit stride: other prompts are copied."""
    x = dict(
        q=torch.randn(4, 1, H, 16), k_cache=torch.randn(4, 40, HK, 16), v_cache=torch.randn(4, 40, HK, 16)
    )
    x |= dict(k_prompt=torch.randn(2, 70, HK, 16), v_prompt=torch.randn(2, 70, HK, 16))
    found = [flash_attn_shared_prompt_with_kvcache(**x, cache_seqlens=30)]
    x[turned] = x[turned].transpose(1, 3).contiguous().transpose(1, 3)
    for choice in ("", "op"):
        monkeypatch.setenv("FLASH_ATTN_DECODE", choice)
        found.append(flash_attn_shared_prompt_with_kvcache(**x, cache_seqlens=30))
        torch.testing.assert_close(found[-1], found[0], rtol=2e-6, atol=2e-6)


def test_what_the_kernels_do_not_take(
    interpreter: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = tensors(1, 16, torch.float32)
    assert _decode.usable(q, k, v, None)
    assert not _decode.usable(torch.randn(B, 40, H, 16), k, v, None)  # 80 rows: a prefill
    assert not _decode.usable(q, k.transpose(1, 3).contiguous().transpose(1, 3), v, None)
    assert not _decode.usable(q, torch.randn(4, 100, HK, 16), v, torch.zeros(B, 2).int())  # cut tiles
    monkeypatch.setenv("FLASH_ATTN_DECODE", "cuda")
    with pytest.raises(ValueError, match="FLASH_ATTN_DECODE must be 'op' or not set, got 'cuda'"):
        _decode.usable(q, k, v, None)
    monkeypatch.delenv("FLASH_ATTN_DECODE")
    large = [torch.randn(B, n, heads, 264) for n, heads in ((1, H), (8, HK), (8, HK))]
    assert not _decode.usable(*large, None)
    monkeypatch.setattr(_decode, "interpreted", lambda: False)
    _decode.kernels.cache_clear()
    with caplog.at_level("WARNING", "flash_attn"):
        assert _decode.kernels() is None  # no GPU for Triton here
    assert "flash_attn decodes through the op, because Triton does not run: " in caplog.text
    _decode.kernels.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(_decode, "kernels", lambda: None)
    assert not _decode.usable(q, k, v, None)
