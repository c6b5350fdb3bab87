"""What GPUs of tests/gpu/test_gpu_sharded.py and test_gpu_spread.py run: bf16, by the rule of numerics.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from numerics import violation
from torch import Tensor

from flash_attn import flash_attn_shared_prompt_func, reference
from flash_attn.shared_prompt import SharedPromptLayout, pack, ulysses

LENGTHS = ([700, 129, 33], [[300, 0, 65], [64, 1], [257]])
HEADS = [(8, 4), (8, 1), (16, 2)]
NAMES = ("out", "dq", "dk", "dv")
WAYS = [("ulysses", 1), ("ulysses", 2), ("context", 1)]
OPTIONS: list[dict[str, Any]] = [{}, {"window_size": (100, 0), "softcap": 20.0}, {"deterministic": True}]


def problem(
    boundary: str, heads: tuple[int, int], head_dim: int, device: str, **options: Any
) -> tuple[SharedPromptLayout, list[Tensor], list[list[Tensor]]]:
    """The layout, q, k, v and dout in bf16, and out, dq, dk, dv of the rule's two sides: low, then exact."""
    layout = SharedPromptLayout.from_lengths(*LENGTHS, device=device, boundary=boundary)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    counts = (heads[0], heads[1], heads[1], heads[0])
    whole = [
        torch.randn(layout.total, n, head_dim, generator=generator).bfloat16().to(device) for n in counts
    ]
    results = []
    for low, inputs in ((True, whole), (False, [x.double() for x in whole])):
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        out = reference.attention(*leaves, segments=layout.segments_host, causal=True, low=low, **options)[0]
        results.append([out.detach(), *torch.autograd.grad(out, leaves, inputs[3].to(out.dtype))])
    return layout, whole, results


def attention(
    group: dist.ProcessGroup,
    boundary: str,
    heads: tuple[int, int],
    way: tuple[str, int],
    options: dict[str, Any],
    head_dim: int = 128,
    device: str = "cuda",
) -> list[str]:
    """What breaks the rule on this rank's rows: out, dq, dk, dv."""
    plain = {name: value for name, value in options.items() if name != "deterministic"}
    layout, whole, results = problem(boundary, heads, head_dim, device, **plain)
    sharded = ulysses.shard_layout(layout, group, *way)  # type: ignore[arg-type]
    own = [ulysses.local_rows(x, sharded) for x in whole]
    leaves = [x.requires_grad_() for x in own[:3]]
    out = flash_attn_shared_prompt_func(*leaves, sharded, **options)
    found = [out.detach(), *torch.autograd.grad(out, leaves, own[3])]
    problems = []
    for name, x, low_x, ref in zip(NAMES, found, *results, strict=True):
        n = sharded.num_own_rows
        if x[n:].any():
            problems.append(f"{name}: padding is not zero")
        expected, yardstick = (ulysses.local_rows(t, sharded)[:n] for t in (ref, low_x))
        broken = violation(x[:n], yardstick, expected, torch.bfloat16, float(ref.abs().max()))
        problems += [f"{name}: {broken}"] if broken else []
    return problems


def model(group: dist.ProcessGroup, boundary: str, method: str, device: str = "cuda") -> tuple[float, float]:
    """A small bf16 Llama on one GPU and spread: largest differences of log-probs and, relative, gradients."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from flash_attn.integrations.transformers import log_probs_of_batch, register

    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    llama = AutoModelForCausalLM.from_config(config, attn_implementation="dualkv").to(device, torch.bfloat16)
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    llama.train()
    generator = torch.Generator().manual_seed(1)
    prompts, responses = [], []
    for prompt_len, lens in zip(*LENGTHS, strict=True):
        prompt = torch.randint(3, 512, (prompt_len,), generator=generator).tolist()
        for n in lens:
            prompts.append(prompt)
            responses.append(torch.randint(3, 512, (n,), generator=generator).tolist())
    packed = pack(prompts, responses, boundary=boundary, device=device)  # type: ignore[arg-type]
    batch = ulysses.shard(packed, group, method=method)  # type: ignore[arg-type]
    weights = torch.randn(packed.labels.numel(), generator=generator).to(device)
    results = []
    for where in (packed, batch):
        found = log_probs_of_batch(llama, where)
        (weights * found.log_probs).sum().backward()
        grads = [p.grad.float() for p in llama.parameters()]
        if where is batch:
            for grad in grads:
                dist.all_reduce(grad, group=group)
        results.append((found.log_probs.detach(), grads))
        llama.zero_grad(set_to_none=True)
    (values, grads), (values_sp, grads_sp) = results
    relative = torch.stack([(a - b).norm() / a.norm() for a, b in zip(grads, grads_sp, strict=True)])
    return float((values - values_sp).abs().max()), float(relative.max())


def context_parts(
    num_ranks: int, boundary: str, heads: tuple[int, int], head_dim: int = 128, device: str = "cuda"
) -> list[str]:
    """What breaks the rule when the ranks' queries, over the keys brought to them, run one rank after the
    other here: out and dq of all ranks together, dk and dv summed over them in fp32."""
    from flash_attn import _calls
    from flash_attn.shared_prompt._context_keys import _walk
    from flash_attn.shared_prompt._partition import balanced, rows_of

    layout, whole, results = problem(boundary, heads, head_dim, device)
    found = [torch.zeros_like(x, dtype=torch.float32) for x in (whole[3], *whole[:3])]
    for parts in balanced(layout, num_ranks):
        table, keys, _ = _walk(layout, parts)
        rows, keys = rows_of(parts, layout).to(device), keys.to(device)
        segments = torch.tensor(table, dtype=torch.int32).reshape(-1, 6)
        q, k, v = (x[i].requires_grad_() for x, i in zip(whole, (rows, keys, keys), strict=False))
        out, _ = _calls.attention(
            q, k, v, None, None, segments.to(device), segments, [], len(rows), len(keys), None, True,
            (-1, -1), 0.0, None, False,
        )  # fmt: skip
        grads = torch.autograd.grad(out, (q, k, v), whole[3][rows])
        for total, index, x in zip(found, (rows, rows, keys, keys), (out.detach(), *grads), strict=True):
            total.index_add_(0, index, x.float())
    problems = []
    for name, x, low_x, ref in zip(NAMES, found, *results, strict=True):
        broken = violation(x.bfloat16(), low_x, ref, torch.bfloat16, float(ref.abs().max()))
        problems += [f"{name}: {broken}"] if broken else []
    return problems
