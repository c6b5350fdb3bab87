"""What ranks of tests/test_ulysses.py run: the same pack whole and spread over the group, compared."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import torch
import torch.distributed as dist

from flash_attn import flash_attn_shared_prompt_func
from flash_attn.shared_prompt import SharedPromptLayout, pack, ulysses
from flash_attn.shared_prompt import log_probs as whole_log_probs

# name -> prompt_lens, response_lens
LENGTHS: dict[str, tuple[list[int], list[list[int]]]] = {
    "odd total, empty responses, uneven groups": ([7, 3, 1], [[5, 0, 2], [1], [4, 0]]),
    "fewer rows than ranks": ([1], [[1]]),
    "long prompt": ([41], [[3, 1, 2]]),
    "long responses": ([2, 5], [[17, 9], [23]]),
    "no response tokens": ([9], [[0, 0]]),
}


def each(group: dist.ProcessGroup, function: Any, cases: list[tuple[Any, ...]]) -> list[Any]:
    """What the function returns for each case."""
    return [function(group, *case) for case in cases]


def sharded_attention(
    group: dist.ProcessGroup,
    lengths: str,
    boundary: str,
    heads: tuple[int, int, int, int],
    method: str,
    num_chunks: int,
    options: dict[str, Any],
) -> dict[str, float]:
    """Largest differences of out, lse and every gradient from one process; fp64."""
    num_heads, num_heads_k, head_dim, head_dim_v = heads
    layout = SharedPromptLayout.from_lengths(*LENGTHS[lengths], boundary=boundary)
    sharded = ulysses.shard_layout(layout, group, method, num_chunks)
    shapes = {
        "q": (layout.total, num_heads, head_dim),
        "k": (layout.total, num_heads_k, head_dim),
        "v": (layout.total, num_heads_k, head_dim_v),
        "dout": (layout.total, num_heads, head_dim_v),
        "dlse": (layout.total, num_heads),
    }
    x = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    sinks = torch.randn(num_heads, dtype=torch.float64) if options.get("sinks") else None
    options = {name: value for name, value in options.items() if name != "sinks"}
    with_lse = options.get("return_softmax_lse", False)

    def attend(inputs: list[torch.Tensor], where: SharedPromptLayout, grads: list[torch.Tensor]) -> list[Any]:
        leaves = [t.clone().requires_grad_() for t in (*inputs, *(() if sinks is None else (sinks,)))]
        found = flash_attn_shared_prompt_func(
            *leaves[:3], where, sinks=leaves[3] if sinks is not None else None, **options
        )
        results = list(found) if with_lse else [found]
        gradients = torch.autograd.grad(results, leaves, grads[: len(results)])
        return [*(r.detach() for r in results), *gradients]

    qkv = [x[name] for name in ("q", "k", "v")]
    whole = attend(qkv, layout, [x["dout"], x["dlse"].t()])
    mine = [ulysses.local_rows(t, sharded) for t in (*qkv, x["dout"], x["dlse"])]
    junk = torch.full_like(mine[0], 1e3) * sharded.is_padding[:, None, None]  # padding may hold anything
    mine[0] = mine[0] + junk
    here = attend(mine[:3], sharded, [mine[3], mine[4].t()])
    names = ["out"] + ["lse"] * with_lse + ["dq", "dk", "dv"] + ["dsinks"] * (sinks is not None)
    errors = {}
    for name, expected, found in zip(names, whole, here, strict=True):
        if name == "dsinks":
            dist.all_reduce(found, group=group)
        elif name == "lse":
            expected = ulysses.local_rows(expected.t(), sharded)[: sharded.num_own_rows]
            found = found.t()
            assert bool((found[sharded.num_own_rows :] == -torch.inf).all()), "lse of padding"
            found = found[: sharded.num_own_rows]
        else:
            assert not found[sharded.num_own_rows :].any(), f"{name} of padding is not zero"
            expected = ulysses.local_rows(expected, sharded)
        errors[name] = float((found - expected).abs().max()) if found.numel() else 0.0
    return errors


def random_batch(lengths: str, boundary: str, vocab_size: int, loss_mask: bool = False) -> Any:
    """A pack of random ids with these lengths, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    prompts, responses, masks = [], [], []
    for prompt_len, lens in zip(*LENGTHS[lengths], strict=True):
        prompt = torch.randint(3, vocab_size, (prompt_len,), generator=generator).tolist()
        for n in lens:
            prompts.append(prompt)
            responses.append(torch.randint(3, vocab_size, (n,), generator=generator).tolist())
            masks.append([int(i % 3 != 1) for i in range(n)])
    options = {"loss_mask": masks} if loss_mask else {}
    return pack(prompts, responses, boundary=boundary, **options)


def sharded_log_probs(
    group: dist.ProcessGroup, lengths: str, boundary: str, method: str, loss_mask: bool, temperature: bool
) -> dict[str, float]:
    """LM head alone: values and gradients of hidden rows, weight and bias from one process; fp64."""
    packed = random_batch(lengths, boundary, 29, loss_mask)
    batch = ulysses.shard(packed, group, method=method)
    n = packed.labels.numel()
    hidden = torch.randn(packed.layout.total, 6, dtype=torch.float64)
    head = [torch.randn(29, 6, dtype=torch.float64), torch.randn(29, dtype=torch.float64)]
    scale = torch.rand(n, dtype=torch.float64) + 0.5 if temperature else 0.7
    grads = [torch.randn(n, dtype=torch.float64), torch.randn(n, dtype=torch.float64)]

    def run(function: Any, rows: torch.Tensor, where: Any) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (rows, *head)]
        found = function(leaves[0], where, *leaves[1:], temperature=scale, softcap=5.0)
        return [*(f.detach() for f in found), *torch.autograd.grad(list(found), leaves, grads)]

    whole = run(whole_log_probs, hidden, packed)
    here = run(ulysses.log_probs, ulysses.local_rows(hidden, batch.layout), batch)
    whole[2] = ulysses.local_rows(whole[2], batch.layout)
    for gradient in here[3:]:
        dist.all_reduce(gradient, group=group)
    names = ("log_probs", "entropy", "dhidden", "dweight", "dbias")
    return {
        name: float((a - b).abs().max()) if a.numel() else 0.0
        for name, a, b in zip(names, whole, here, strict=True)
    }


def _gradients(model: Any, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """Of every parameter, summed over the group; the model's own are cleared."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if group is not None:
            dist.all_reduce(grad, group=group)
        found[name] = grad
    model.zero_grad(set_to_none=True)
    return found


def sharded_model(
    group: dist.ProcessGroup,
    kind: str,
    lengths: str,
    boundary: str,
    method: str,
    checkpointing: bool | None = None,
    changes: dict[str, Any] | None = None,
) -> tuple[float, float]:
    """A tiny model, spread and whole: largest difference of a log-prob, and relative one of a gradient."""
    from transformers_models import exact_double, model_of

    from flash_attn.integrations.transformers import log_probs_of_batch, register

    register()
    packed = random_batch(lengths, boundary, 67, loss_mask=True)
    batch = ulysses.shard(packed, group, method=method)
    model = model_of(kind, "dualkv", **(changes or {})).double()
    weights = torch.randn(packed.labels.numel(), dtype=torch.float64)
    results = []
    for where, over in ((packed, None), (batch, group)):
        model.train(over is not None and checkpointing is not None)
        if over is not None and checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            if checkpointing:
                model.enable_input_require_grads()
        with exact_double():
            found = log_probs_of_batch(model, where, temperature=0.8)
            loss = (weights * found.log_probs + 0.1 * found.entropy).sum()
            loss.backward()
        results.append((found.log_probs.detach(), _gradients(model, over)))
    (values, grads), (values_sp, grads_sp) = results
    largest = max(float(g.norm()) for g in grads.values())
    relative = [
        float((grads_sp[name] - g).norm()) / max(float(g.norm()), 1e-3 * largest) for name, g in grads.items()
    ]
    return float((values - values_sp).abs().max()), float(torch.tensor(relative).max())  # NaN stays


def fsdp_model(group: dist.ProcessGroup, method: str) -> tuple[float, float]:
    """FSDP2 with checkpointing against one process: differences of log-probs and, relative, of gradients."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from transformers_models import exact_double, model_of

    from flash_attn.integrations.transformers import log_probs_of_batch, register

    class Policy(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Any) -> torch.Tensor:
            return log_probs_of_batch(self.model, batch).log_probs

    register()
    packed = random_batch("odd total, empty responses, uneven groups", "fork", 67)
    batch = ulysses.shard(packed, group, method=method)
    weights = torch.randn(packed.labels.numel(), dtype=torch.float64)
    whole, spread = (Policy(model_of("qwen3", "dualkv").double()) for _ in range(2))
    spread.train()
    spread.model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in spread.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(spread, mesh=mesh)
    with exact_double():
        values = whole(packed)
        (weights * values).sum().backward()
        values_sp = spread(batch)
        ((weights * values_sp).sum() * group.size()).backward()  # FSDP averages over its ranks
    pairs = zip(whole.parameters(), spread.parameters(), strict=True)
    relative = torch.stack([(a.grad - b.grad.full_tensor()).norm() / a.grad.norm() for a, b in pairs])
    return float((values - values_sp).detach().abs().max()), float(relative.max())


def gathered_values(group: dist.ProcessGroup, method: str) -> tuple[bool, bool]:
    """`gather_rows` undoes `local_rows`, and its gradient is `local_rows` of the gradient."""
    layout = SharedPromptLayout.from_lengths(*LENGTHS["odd total, empty responses, uneven groups"])
    sharded = ulysses.shard_layout(layout, group, method)
    whole = torch.randn(layout.total, 3)
    own = ulysses.local_rows(whole, sharded).requires_grad_()
    gathered = ulysses.gather_rows(own, sharded)
    (gathered * whole).sum().backward()
    return torch.equal(gathered, whole), torch.equal(own.grad, ulysses.local_rows(whole, sharded))


def unpacked_parts(group: dist.ProcessGroup, boundary: str) -> tuple[list[int], list[int]]:
    """Labels that each row predicts, as one process and as this rank have them (boundary "fork")."""
    packed = random_batch("odd total, empty responses, uneven groups", boundary, 67, loss_mask=True)
    batch = ulysses.shard(packed, group)
    expected = ulysses.local_rows(packed.shift_labels[0], batch.layout)
    expected = expected.masked_fill(batch.layout.is_padding, -100)
    return expected.tolist(), batch.shift_labels[0].tolist()


def chosen_method(group: dist.ProcessGroup) -> tuple[Any, ...]:
    """What `choose_method` says, twice, and `shard(method="auto")` does."""
    packed = random_batch("long responses", "fork", 67)
    shape = ulysses.AttentionShape(8, 4, 8, torch.float32)
    choice = ulysses.choose_method(packed.layout, group, shape, repeats=1)
    again = ulysses.choose_method(packed.layout, group, shape, repeats=1)
    layout = ulysses.shard(packed, group, method="auto", shape=shape).layout
    three = ulysses.AttentionShape(7, 7, 8, torch.float32)
    only = ulysses.choose_method(packed.layout, group, three, repeats=1)
    same = again is choice and (layout.method, layout.num_chunks) == choice[:2]
    return choice.method, choice.num_chunks, dict(choice.seconds), same, only.method


def failing_rank(group: dist.ProcessGroup, failing: int) -> str:
    """One rank raises instead of calling attention, the others wait for it."""
    layout = SharedPromptLayout.from_lengths([5], [[3, 2]])
    sharded = ulysses.shard_layout(layout, group)
    q = torch.randn(sharded.num_rows, 6, 8)
    with ulysses.fail_together(group):
        for step in range(3):
            if step == 1 and group.rank() == failing:
                raise ValueError("the disk of this rank is full")
            flash_attn_shared_prompt_func(q, q, q, sharded)
    return "finished"


def rejected(group: dist.ProcessGroup) -> dict[str, str]:
    """Texts of what wrong arguments raise; no rank waits for another."""
    layout = SharedPromptLayout.from_lengths([5], [[3, 2]])
    packed = random_batch("long prompt", "fork", 67)
    sharded, batch = ulysses.shard_layout(layout, group), ulysses.shard(packed, group)
    capacities = SharedPromptLayout.from_lengths([5], [[3, 2]], max_segments=4, max_total=16)
    q3, short = torch.randn(sharded.num_rows, 3, 8), torch.randn(1, 4, 8)
    ok = torch.randn(sharded.num_rows, 4, 8)
    leaf = ok.clone().requires_grad_()
    shape = ulysses.AttentionShape(3, 3, 8, torch.float32)
    calls: dict[str, Any] = {
        "layout": lambda: ulysses.shard_layout(packed, group),  # type: ignore[arg-type]
        "group": lambda: ulysses.shard_layout(layout, 2),  # type: ignore[arg-type]
        "method": lambda: ulysses.shard_layout(layout, group, "ring"),  # type: ignore[arg-type]
        "num_chunks": lambda: ulysses.shard_layout(layout, group, "ulysses", 0),
        "kind of num_chunks": lambda: ulysses.shard_layout(layout, group, "ulysses", 1.5),  # type: ignore[arg-type]
        "twice": lambda: ulysses.shard_layout(sharded, group),
        "empty": lambda: ulysses.shard_layout(SharedPromptLayout.from_lengths([], []), group),
        "capacities": lambda: ulysses.shard_layout(capacities, group, "context"),
        "packed": lambda: ulysses.shard(layout, group),  # type: ignore[arg-type]
        "shape": lambda: ulysses.shard(packed, group, method="auto"),
        "kind of shape": lambda: ulysses.shard(packed, group, method="auto", shape=3),  # type: ignore[arg-type]
        "group of fail_together": lambda: ulysses.fail_together(None).__enter__(),  # type: ignore[arg-type]
        "heads": lambda: flash_attn_shared_prompt_func(q3, q3, q3, sharded),
        "auto heads": lambda: ulysses.choose_method(capacities, group, shape),
        "few rows": lambda: flash_attn_shared_prompt_func(short, short, short, sharded),
        "many rows": lambda: flash_attn_shared_prompt_func(*[torch.cat([ok, ok])] * 3, sharded),
        "second derivative": lambda: torch.autograd.grad(
            flash_attn_shared_prompt_func(leaf, leaf, leaf, sharded).sum(), leaf, create_graph=True
        ),
        "plain layout": lambda: ulysses.attention(ok, ok, ok, layout),
        "local_rows": lambda: ulysses.local_rows(torch.zeros(3), sharded),
        "gather_rows": lambda: ulysses.gather_rows(torch.zeros(1), sharded),
        "hidden": lambda: ulysses.log_probs(torch.zeros(3, 4), batch, torch.zeros(67, 4)),
        "segments": lambda: sharded.segments,
        "other attribute": lambda: sharded.nothing,
        "copy_": lambda: sharded.copy_(layout),
        "pickle": lambda: pickle.dumps(sharded),
    }
    hidden, n = torch.zeros(batch.layout.num_rows, 4), packed.labels.numel()
    half = torch.ones(n // 2)  # enough for the first rank's share
    last = torch.ones(n).index_fill(0, torch.tensor([n - 1]), 0.0)
    vocab = int(packed.labels.max())  # one too small
    for name, size, temperature in (("few temperatures", 67, half), ("one temperature", 67, last),
                                    ("no dimensions", 67, last[0]), ("vocabulary", vocab, 1.0)):  # fmt: skip
        calls[name] = functools.partial(
            ulysses.log_probs, hidden, batch, torch.zeros(size, 4), temperature=temperature
        )
    from transformers_models import model_of

    from flash_attn.integrations.transformers import packed_forward, register

    register()
    moe, llama = model_of("qwen3_moe", "dualkv"), model_of("llama", "dualkv")
    calls["router"] = lambda: packed_forward(moe, batch, output_router_logits=True)
    calls["labels"] = lambda: packed_forward(llama, batch, labels=batch.input_ids)
    texts = {}
    for name, call in calls.items():
        texts[name] = "nothing was raised"
        try:
            call()
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
    return texts


def replicated_baseline(group: dist.ProcessGroup) -> dict[str, float]:
    """The benchmark's replicated FlashAttention-2 against one process of this package: out, dq, dk, dv."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
    from sharded_fa2 import fa2_attention

    layout = SharedPromptLayout.from_lengths([7, 7, 7], [[4], [4], [4]], boundary="shared")
    sharded = ulysses.shard_layout(layout, group)
    whole = [torch.randn(layout.total, n, 8, dtype=torch.float64) for n in (4, 2, 2, 4)]

    def run(attend: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]

    expected = run(lambda q, k, v: flash_attn_shared_prompt_func(q, k, v, layout), whole)
    own = [ulysses.local_rows(x, sharded) for x in whole]
    found = run(lambda q, k, v: fa2_attention(q, k, v, sharded, 11), own)
    return {
        name: float((ulysses.local_rows(a, sharded) - b).abs().max())
        for name, a, b in zip(("out", "dq", "dk", "dv"), expected, found, strict=True)
    }


def summed_in_fp32(group: dist.ProcessGroup) -> list[float]:
    """Gradients 256, 1, 1 of three uses of one bf16 row on every rank, as its owner gets them."""
    from flash_attn.shared_prompt._exchange import RowExchange, take_rows

    needs = [torch.zeros(3, dtype=torch.int64)] * group.size()
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    y = take_rows(x, RowExchange(needs, 1, group.rank()), group, expand=True)
    y.backward(torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16))
    return x.grad.flatten().tolist()
