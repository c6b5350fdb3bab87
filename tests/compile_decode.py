"""Compiles the decode kernels for GPUs without having one, through the calls that launch them.

The interpreter accepts what the compiler does not.

    python tests/compile_decode.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flash_attn import _decode, _decode_kernel, checks
from flash_attn import flash_attn_shared_prompt_with_kvcache as on_prompts
from flash_attn import flash_attn_with_kvcache as decode

BATCH, CAPACITY, HEADS, HEADS_K = 2, 8192, 32, 4


class NoGpu:
    """What Triton asks its driver when it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Compiled:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names, self.count = kernel, kernel.arg_names, 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            self.kernel.warmup(*arguments, grid=grid, **options)
            self.count += 1

        return run


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(
    batch: int = BATCH, seqlen_q: int = 1, heads_k: int = HEADS_K, head_dim: int = 128, page: int = 0,
    new: int = 0, rotary_dim: int = 0, dtype: torch.dtype = torch.bfloat16, **options: Any,
) -> None:  # fmt: skip
    shape = (batch * CAPACITY // page, page) if page else (batch, CAPACITY)
    k, v = (empty(*shape, heads_k, head_dim, dtype=dtype) for _ in "kv")
    options.setdefault("cache_seqlens", ints(*[0] * batch))
    if page:
        options["block_table"] = ints(*range(shape[0])).view(batch, -1)
    if new:
        options["k"] = options["v"] = empty(batch, new, heads_k, head_dim, dtype=dtype)
    if rotary_dim:
        options["rotary_cos"] = options["rotary_sin"] = empty(CAPACITY, rotary_dim // 2)
    decode(empty(batch, seqlen_q, HEADS, head_dim, dtype=dtype), k, v, **options)


CALLS: list[dict[str, Any]] = [
    dict(batch=1), dict(batch=8, new=1), dict(batch=64, num_splits=1), dict(num_splits=128),
    dict(new=1, rotary_dim=128, page=256, causal=True), dict(cache_seqlens=700, causal=True),
    dict(new=2, seqlen_q=2, rotary_dim=64, rotary_interleaved=True, causal=True, page=64),
    dict(alibi_slopes=torch.zeros(HEADS), softcap=3.0, window_size=(100, 0)),
    dict(cache_leftpad=ints(0, 0), cache_batch_idx=ints(0, 1)), dict(dtype=torch.float16, seqlen_q=8),
    dict(heads_k=HEADS), dict(head_dim=16), dict(head_dim=80), dict(head_dim=192),
    dict(head_dim=256, seqlen_q=4),
]  # fmt: skip


def main() -> None:
    # No GPU: tensors on the CPU are launched as if they were on one.
    for name, value in dict(interpreted=lambda: True, _num_sms=lambda _: 132).items():
        setattr(_decode, name, value)
    checks.values_are_read = lambda _: False
    for capability in (80, 90):
        kernels = {name: Compiled(getattr(_decode_kernel, name)) for name in ("append", "partial", "merge")}
        for name, value in dict(kernels=SimpleNamespace(**kernels), _overlaps=capability >= 90).items():
            setattr(_decode, name, lambda *_, value=value: value)
        driver.set_active(NoGpu(capability))
        for options in CALLS:
            call(**options)
        prompt, own = empty(2, CAPACITY, HEADS_K, 128), empty(32, 1024, HEADS_K, 128)
        lengths = ints(*[0] * 32)
        on_prompts(empty(32, 1, HEADS, 128), prompt, prompt, own, own, cache_seqlens=lengths)
        assert all(kernel.count > 1 for kernel in kernels.values())
        print(
            f"sm_{capability}:",
            ", ".join(f"{name} {x.count} times" for name, x in kernels.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
