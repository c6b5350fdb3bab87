"""Ways to compute shared-prompt attention: ours, and what torch and, where installed, others offer.

A provider takes a `Problem` and returns forward() -> out and backward() -> (dq, dk, dv) or None, both packed
like the problem: [prompt, response 1, ..., response N] for each group. "replicated": each response has its
copy of the prompt. "two-call": prompt causal + responses on the prompt + responses on themselves, merged by
log-sum-exp, gradients summed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from cases import Case
from providers_fa3 import FA3_PROVIDERS
from providers_fa3 import is_installed as fa3_is_installed
from providers_fa4 import FA4_PROVIDERS
from providers_fa4 import find_site as find_fa4
from providers_gather import GATHER_PROVIDERS, fa2_varlen
from providers_varlen import _compiled_merge, replicated, two_call
from torch import Tensor

Forward = Callable[[], Tensor]
Backward = Callable[[], tuple[Tensor, Tensor, Tensor]]
Pair = tuple[Forward, Backward | None]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MAX_REPLICATED = 1_200_000  # rows of the replicated ways; above, a call takes minutes
aten = torch.ops.aten


class Problem:
    """Random inputs of a case."""

    def __init__(self, case: Case, seed: int = 0, device: str = "cuda") -> None:
        self.case = case
        generator = torch.Generator(device).manual_seed(seed)

        def make(heads: int) -> Tensor:
            shape = (case.total, heads, case.head_dim)
            return torch.randn(shape, device=device, dtype=DTYPES[case.dtype], generator=generator)

        self.q, self.dout = make(case.num_heads), make(case.num_heads)
        self.k, self.v = make(case.num_heads_k), make(case.num_heads_k)
        self.scale = case.head_dim**-0.5

    def group(self) -> tuple[int, list[int]]:
        """Lengths of the prompt and of the responses."""
        if self.case.num_groups != 1:
            raise NotImplementedError("this provider is written for one group")
        if self.case.window_left >= 0:
            raise NotImplementedError("this provider is written for attention without a window")
        return self.case.prompt_len, self.case.response_lens

    def one_group(self) -> tuple[int, int, int]:
        """N, P, R."""
        if self.case.ragged:
            raise NotImplementedError("this provider is written for responses of one length")
        return len(self.group()[1]), self.case.prompt_len, self.case.response_len

    def replicate(self, x: Tensor) -> Tensor:
        """(N, P + R, heads, d)"""
        n, p, r = self.one_group()
        if n * (p + r) > MAX_REPLICATED:
            raise NotImplementedError(f"{n * (p + r)} replicated rows: not timed")
        prompt = x[:p].unsqueeze(0).expand(n, -1, -1, -1)
        return torch.cat([prompt, x[p:].unflatten(0, (n, r))], 1)

    def fold(self, x: Tensor) -> Tensor:
        """Gradient of `replicate`: (N, P + R, heads, d) to packed, prompt rows summed over the copies."""
        n, p, r = self.one_group()
        return torch.cat([x[:, :p].sum(0), x[:, p:].reshape(n * r, *x.shape[2:])])

    def unreplicate(self, x: Tensor) -> Tensor:
        """Packed rows of a replicated output."""
        n, p, r = self.one_group()
        return torch.cat([x[0, :p], x[:, p:].reshape(n * r, *x.shape[2:])])


def _ours(problem: Problem, force_arch: str, deterministic: bool) -> Pair:
    from flash_attn import _backend
    from flash_attn._ops import plan_tables
    from flash_attn.shared_prompt import SharedPromptLayout

    reason = _backend._load_library()
    if reason:
        raise NotImplementedError(reason)
    case = problem.case
    ops = torch.ops.flash_attn_cuda
    layout = SharedPromptLayout.from_lengths(
        [case.prompt_len] * case.num_groups,
        [case.response_lens] * case.num_groups,
        "cuda",
        "shared",
    )

    def with_arch(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:  # read at every call by the library
            os.environ["FLASH_ATTN_FORCE_ARCH"] = force_arch
            return call()

        return run

    def make_plan() -> list[Tensor]:
        context_rows = case.prompt_len * case.num_groups
        total, heads_k, dim = case.total, case.num_heads_k, case.head_dim
        return plan_tables(
            layout.segments, total, total, None, context_rows, num_heads_k=heads_k, head_dim=dim,
            dtype=problem.q.dtype, causal=True, window_size=(case.window_left, -1),
        )  # fmt: skip

    plan = with_arch(make_plan)()
    q, k, v = problem.q, problem.k, problem.v
    batch = (layout.segments, plan, problem.scale, 0.0)
    forward = with_arch(lambda: ops.fwd(q, k, v, None, None, *batch)[0])
    os.environ["FLASH_ATTN_FORCE_ARCH"] = force_arch
    out, lse = ops.fwd(q, k, v, None, None, *batch)
    backward = with_arch(
        lambda: ops.bwd(problem.dout, None, q, k, v, None, None, out, lse, *batch, deterministic)[:3]
    )
    forward.plan = with_arch(make_plan)  # type: ignore[attr-defined]
    return forward, backward  # type: ignore[return-value]


def ours_sm90a(problem: Problem) -> Pair:
    if torch.cuda.get_device_capability() != (9, 0):
        raise NotImplementedError("sm_90a kernels need compute capability 9.0")
    return _ours(problem, "90", False)


def ours_sm80(problem: Problem) -> Pair:
    return _ours(problem, "80", False)


def ours_deterministic(problem: Problem) -> Pair:
    """The default code path of this GPU, deterministic=True."""
    return _ours(problem, "", True)


def ours_replicated(problem: Problem) -> Pair:
    """The default code path on N whole sequences: what sharing is compared with on equal kernels."""
    from flash_attn._calls import dense_segments
    from flash_attn._ops import plan_tables

    n, p, r = problem.one_group()
    q, k, v, dout = (
        problem.replicate(x).flatten(0, 1) for x in (problem.q, problem.k, problem.v, problem.dout)
    )
    os.environ["FLASH_ATTN_FORCE_ARCH"] = ""
    segments, total = dense_segments(n, p + r, p + r, q.device), q.shape[0]
    sizes = dict(num_heads_k=k.shape[1], head_dim=q.shape[2], dtype=q.dtype)
    plan = plan_tables(segments, total, total, None, 0, causal=True, window_size=(-1, -1), **sizes)
    batch = (segments, plan, problem.scale, 0.0)
    ops = torch.ops.flash_attn_cuda
    out, lse = ops.fwd(q, k, v, None, None, *batch)

    def forward() -> Tensor:
        return ops.fwd(q, k, v, None, None, *batch)[0]

    def backward() -> tuple[Tensor, ...]:
        return ops.bwd(dout, None, q, k, v, None, None, out, lse, *batch, False)[:3]

    return forward, backward  # type: ignore[return-value]


def fa2_replicated(problem: Problem) -> Pair:
    """What trainers do: torch's FlashAttention-2 over whole sequences."""
    return replicated(problem, *fa2_varlen(problem.scale))


def fa2_two_call(problem: Problem) -> Pair:
    return two_call(problem, *fa2_varlen(problem.scale))


def _cudnn_forward(q, k, v, causal, scale):  # type: ignore[no-untyped-def]
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)


def _cudnn_backward(dout, q, k, v, out, lse, saved, causal, scale):  # type: ignore[no-untyped-def]
    cum_q, cum_k, max_q, max_k, seed, offset = saved[2:8]
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal, scale=scale
    )


def cudnn_replicated(problem: Problem) -> Pair:
    n, p, _ = problem.one_group()
    q, k, v, dout = (
        problem.replicate(x).transpose(1, 2) for x in (problem.q, problem.k, problem.v, problem.dout)
    )
    if n > 1:
        dout[1:, :, :p] = 0
    saved = _cudnn_forward(q, k, v, True, problem.scale)

    def forward() -> Tensor:
        return _cudnn_forward(q, k, v, True, problem.scale)[0]

    def backward() -> tuple[Tensor, ...]:
        return _cudnn_backward(dout, q, k, v, saved[0], saved[1], saved, True, problem.scale)

    forward.packed = lambda out: problem.unreplicate(out.transpose(1, 2))  # type: ignore[attr-defined]
    backward.packed = lambda g: [problem.fold(x.transpose(1, 2)) for x in g]  # type: ignore[attr-defined]
    return forward, backward  # type: ignore[return-value]


def cudnn_two_call(problem: Problem) -> Pair:
    n, p, r = problem.one_group()
    heads, dim, scale = problem.case.num_heads, problem.case.head_dim, problem.scale

    def prompt(x: Tensor) -> Tensor:
        return x[:p].unsqueeze(0).transpose(1, 2)

    def flat(x: Tensor) -> Tensor:
        return x[p:].unsqueeze(0).transpose(1, 2)

    def each(x: Tensor) -> Tensor:
        return x[p:].unflatten(0, (n, r)).transpose(1, 2)

    def rows(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(n * r, *x.shape[1:2], dim)

    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout

    def run() -> tuple:
        a = _cudnn_forward(prompt(q), prompt(k), prompt(v), True, scale)
        x = _cudnn_forward(flat(q), prompt(k), prompt(v), False, scale)
        y = _cudnn_forward(each(q), each(k), each(v), True, scale)
        lse_x = x[1].reshape(heads, n * r).t().unsqueeze(-1)
        lse_y = y[1].reshape(n, heads, r).transpose(1, 2).reshape(n * r, heads, 1)
        return a, x, y, *_compiled_merge(rows(x[0]), lse_x, rows(y[0]), lse_y)

    a, x, y, out, lse = run()
    out_flat, lse_flat = (
        out.unsqueeze(0).transpose(1, 2),
        lse.squeeze(-1).t().contiguous().view(1, heads, n * r, 1),
    )
    out_each = out.view(n, r, heads, dim).transpose(1, 2)
    lse_each = lse.view(n, r, heads).transpose(1, 2).contiguous().unsqueeze(-1)

    def forward() -> tuple[Tensor, Tensor]:
        first, _, _, second, _ = run()
        return first[0], second

    def backward() -> tuple[tuple[Tensor, Tensor], ...]:
        g = _cudnn_backward(prompt(dout), prompt(q), prompt(k), prompt(v), a[0], a[1], a, True, scale)
        g1 = _cudnn_backward(flat(dout), flat(q), prompt(k), prompt(v), out_flat, lse_flat, x, False, scale)
        g2 = _cudnn_backward(each(dout), each(q), each(k), each(v), out_each, lse_each, y, True, scale)
        return (g[0], rows(g1[0]) + rows(g2[0])), (g[1] + g1[1], g2[1]), (g[2] + g1[2], g2[2])

    def prompt_rows(x: Tensor) -> Tensor:
        return x[0].transpose(0, 1)

    forward.packed = lambda o: torch.cat([prompt_rows(o[0]), o[1]])  # type: ignore[attr-defined]
    backward.packed = (
        lambda g: [  # type: ignore[attr-defined]
            torch.cat([prompt_rows(g[0][0]), g[0][1]]),
            *(torch.cat([prompt_rows(c), d.transpose(1, 2).flatten(0, 1)]) for c, d in g[1:]),
        ]
    )
    return forward, backward  # type: ignore[return-value]


def flex(problem: Problem) -> Pair:
    """FlexAttention with the shared-prompt mask; its block mask is built outside the timing."""
    import torch._functorch.config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    functorch_config.donated_buffer = False  # the backward is timed more than once
    n, p, r = problem.one_group()
    total = problem.case.total
    owner = torch.cat(
        [torch.zeros(p, dtype=torch.int32), torch.arange(1, n + 1, dtype=torch.int32).repeat_interleave(r)]
    ).cuda()

    def mask(b, h, q_index, k_index):  # type: ignore[no-untyped-def]
        return (q_index >= k_index) & ((owner[k_index] == 0) | (owner[k_index] == owner[q_index]))

    block_mask = torch.compile(create_block_mask)(mask, None, None, total, total, device="cuda")
    attend = torch.compile(flex_attention, dynamic=False)
    leaves = [
        x.unsqueeze(0).transpose(1, 2).detach().requires_grad_() for x in (problem.q, problem.k, problem.v)
    ]
    dout = problem.dout.unsqueeze(0).transpose(1, 2)

    def forward() -> Tensor:
        return attend(*leaves, block_mask=block_mask, enable_gqa=True, scale=problem.scale)

    out = forward()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    forward.packed = lambda x: x[0].transpose(0, 1)  # type: ignore[attr-defined]
    backward.packed = lambda g: [x[0].transpose(0, 1) for x in g]  # type: ignore[attr-defined]
    return forward, backward  # type: ignore[return-value]


PROVIDERS: dict[str, Callable[[Problem], Pair]] = {
    "ours-sm90a": ours_sm90a,
    "ours-sm80": ours_sm80,
    "ours-deterministic": ours_deterministic,
    "fa2-replicated": fa2_replicated,
    "fa2-two-call": fa2_two_call,
    "cudnn-replicated": cudnn_replicated,
    "cudnn-two-call": cudnn_two_call,
    "flex": flex,
    **GATHER_PROVIDERS,
}
if fa3_is_installed():
    PROVIDERS |= FA3_PROVIDERS
if find_fa4() is not None:
    PROVIDERS |= FA4_PROVIDERS
