"""Forward and backward of one shared prompt again and again: every output must be bitwise the first one's,
except dq, which is summed in an order that varies. A process of its own, because kernels that wait for
each other for ever are ended only with their process (test_gpu_standstill.py says what for):

    python tests/gpu/repeat_steps.py --head-dim 256 --prompt 16384 --responses 16 --window 1023
"""

from __future__ import annotations

import argparse

import torch

import flash_attn
from flash_attn.shared_prompt import SharedPromptLayout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default in {"head-dim": 256, "prompt": 16384, "responses": 16, "response": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--window", type=int, default=-1, help="window_left")
    parser.add_argument("--forwards", type=int, default=100)
    parser.add_argument("--backwards", type=int, default=10)
    parser.add_argument("--heads", type=int, default=16, help="query heads, two a key head")
    parser.add_argument("--device", default="cuda", help="cpu: debug this file")
    args = parser.parse_args()

    layout = SharedPromptLayout.from_lengths(
        prompt_lens=[args.prompt],
        response_lens=[[args.response] * args.responses],
        device=args.device,
        boundary="shared",
    )
    heads = (args.heads, args.heads // 2, args.heads // 2, args.heads)
    *leaves, dout = (
        torch.randn(layout.total, h, args.head_dim, device=args.device, dtype=torch.bfloat16) for h in heads
    )

    def forward() -> torch.Tensor:
        window = (args.window, 0 if args.window >= 0 else -1)
        return flash_attn.flash_attn_shared_prompt_func(*leaves, layout, window_size=window)

    first = forward()
    differ = torch.zeros((), device=args.device, dtype=torch.int64)
    for _ in range(args.forwards):
        differ += (forward() != first).sum()
    print("different outputs:", int(differ), flush=True)  # waits for all of them

    leaves = [x.requires_grad_() for x in leaves]
    out = forward()
    first_dq, *first_grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    spread = torch.zeros((), device=args.device)
    for _ in range(args.backwards):
        dq, *grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        differ += sum((x != y).sum() for x, y in zip(grads, first_grads, strict=True))
        spread = torch.maximum(spread, (dq - first_dq).norm() / first_dq.norm())
    print(f"different dk, dv: {int(differ)}, most of dq: {float(spread):.1e}", flush=True)
    assert int(differ) == 0
    assert float(spread) < 4e-3  # a step of bf16 and no more


if __name__ == "__main__":
    main()
