"""The corner set for compute-sanitizer: every kernel once on ragged, empty, strided and wrong input.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/gpu/memcheck.py 90 80

Without torch's caching every tensor is an allocation of its own, so that one element too far is found.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tests"),
    str(ROOT / "tests" / "gpu"),
    str(ROOT / "csrc" / "flash_attn"),
]

import torch  # noqa: E402
from gpu_cases import attend_segments, shared_case, varlen_case  # noqa: E402
from kernels import HEAD_DIMS  # noqa: E402
from numerics import Case  # noqa: E402

from flash_attn import flash_attn_varlen_func  # noqa: E402


def step(case: Case, deterministic: bool, context_rows: int | None = None) -> None:
    leaves = {n: x.detach().requires_grad_() for n, x in case.tensors.items()}
    out, lse = attend_segments(case, deterministic, context_rows)(**leaves)
    grads = torch.autograd.grad([out, lse], list(leaves.values()), [case.dout, case.dlse])
    for x in (out, *grads):
        assert not torch.isnan(x).any()


def corners(head_dim: int) -> None:
    options = dict(head_dim=head_dim)
    for deterministic in (False, True):
        for p, r in ((1, 1), (15, 129), (65, 7), (129, 63), (257, 64)):
            step(shared_case([p], [[r, 0, r // 2]], pad=p % 3, **options), deterministic)
        step(shared_case([100, 3], [[40, 70], [1] * 9], window_size=(50, 0), **options), deterministic, 1)
        step(shared_case([70], [[30]], head_dim=head_dim - 24, softcap=9.0), deterministic)
        step(varlen_case([3, 0, 90], [77, 5, 20], 130, causal=False, **options), deterministic)
    x = torch.randn(200, 2, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cu = torch.tensor([0, 150, 5000], device="cuda", dtype=torch.int32)
    flash_attn_varlen_func(x, x, x, cu, cu, 200, 200, causal=True).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description="The corner set for compute-sanitizer.")
    parser.add_argument("paths", nargs="*", type=int, default=[90, 80], help="code paths")
    parser.add_argument("--head-dims", default="64,128,256,512", help="those with kernels are run")
    args = parser.parse_args()
    for path in args.paths:
        os.environ["FLASH_ATTN_FORCE_ARCH"] = str(path)
        for head_dim in map(int, args.head_dims.split(",")):
            if head_dim in HEAD_DIMS[path]:
                corners(head_dim)
                print(f"path {path}, head dim {head_dim}: done", flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
