"""The one tolerance rule of all numerical tests.

    max|x - ref| <= 2 max|low - ref| + one rounding of max|ref|      and      ||x - ref|| <= 1.5 ||low - ref||

`ref` is computed in fp64 from the same inputs, `low` is `reference.attention(..., low=True)`: scores, softmax
and lse in fp32, with inputs, P, dS and outputs rounded to the input dtype. Both bounds hold for out, lse and
each gradient. Made precise where numbers are few: 8 fp32 roundings of the problem's largest value are noise
everywhere (a row with one key has dq = 0, exactly in no arithmetic); the norm counts from 4096 elements on;
the factors are 4 for fp32 results (fp32 inputs, and every lse), where x and low differ by the order of
summation alone; tensors of less than 64 elements (dsinks), which low hits by luck, have 8. fp64: 1e-11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_attn import _calls, reference

MIN_ELEMENTS, MIN_NORM_ELEMENTS = 64, 4096


def violation(x: Tensor, low: Tensor, ref: Tensor, dtype: torch.dtype, magnitude: float = 0.0) -> str | None:
    """What breaks the rule, or None. `dtype`: the one whose rounding counts; `magnitude`: the problem's
    largest value."""
    if x.shape != ref.shape:
        return f"shape {list(x.shape)} instead of {list(ref.shape)}"
    x, low, ref = x.detach().double(), low.detach().double(), ref.detach().double()
    infinite = torch.isinf(ref)
    if not torch.equal(torch.isinf(x), infinite) or not torch.equal(x[infinite], ref[infinite]):
        return "infinities at other places than the reference's"
    if torch.isnan(x).any():
        return f"{int(torch.isnan(x).sum())} NaN of {x.numel()}"
    x, low, ref = x[~infinite], low[~infinite], ref[~infinite]
    if ref.numel() == 0:
        return None
    rounding = torch.finfo(dtype).eps / 2
    noise = 8 * torch.finfo(torch.float32).eps / 2 * max(magnitude, float(ref.abs().max()))
    factor, factor_norm, floor = 2.0, 1.5, rounding * float(ref.abs().max()) + noise
    if dtype == torch.float32 or ref.numel() < MIN_ELEMENTS:
        factor, factor_norm = 4.0 if dtype == torch.float32 else 8.0, 4.0
    largest, allowed = float((x - ref).abs().max()), factor * float((low - ref).abs().max()) + floor
    if largest > allowed:
        return f"max error {largest:.3e} > {allowed:.3e} = {factor} * max error of low + {floor:.3e}"
    norm, norm_low = float((x - ref).norm()), float((low - ref).norm())
    if ref.numel() >= MIN_NORM_ELEMENTS and norm > factor_norm * norm_low + noise:
        return f"error norm {norm:.3e} > {factor_norm} * that of low {norm_low:.3e}"
    return None


def assert_close(
    name: str, x: Tensor, low: Tensor, ref: Tensor, dtype: torch.dtype | None = None, magnitude: float = 0.0
) -> None:
    """The rule above, with the tensor's name in the message."""
    problem = violation(x, low, ref, x.dtype if dtype is None else dtype, magnitude)
    assert problem is None, f"{name}: {problem}"


@dataclass
class Case:
    """One attention problem over segments: sizes, options and seeded inputs."""

    segments: Sequence[Sequence[int]]
    total_q: int
    total_k: int
    total_context: int | None = None
    num_heads: int = 4
    num_heads_k: int = 2
    head_dim: int = 16
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    sinks: bool = False
    with_dlse: bool = False
    scale_q: float = 1.0
    seed: int = 0
    tensors: dict[str, Tensor] = field(init=False, repr=False, default_factory=dict)
    # The reference's keyword arguments "bias" and "weights".
    terms: dict[str, Tensor] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.device, self.dtype)

        self.tensors["q"] = make(self.total_q, self.num_heads, self.head_dim) * self.scale_q
        self.tensors["k"] = make(self.total_k, self.num_heads_k, self.head_dim)
        self.tensors["v"] = make(self.total_k, self.num_heads_k, head_dim_v)
        if self.total_context is not None:
            self.tensors["k_context"] = make(self.total_context, self.num_heads_k, self.head_dim)
            self.tensors["v_context"] = make(self.total_context, self.num_heads_k, head_dim_v)
        if self.sinks:
            self.tensors["sinks"] = torch.randn(self.num_heads, generator=generator).to(self.device)
        self.dout = make(self.total_q, self.num_heads, head_dim_v)
        self.dlse = torch.randn(self.num_heads, self.total_q, generator=generator).to(self.device)
        self.table = torch.tensor([list(row) for row in self.segments], dtype=torch.int32).reshape(-1, 6)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "window_size": self.window_size,
            "softcap": self.softcap,
            **self.terms,
        }


def run(case: Case, attend: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """out, lse and every gradient of `attend(**tensors)` with inputs cast to `dtype`."""
    inputs = {
        name: x.detach().to(x.dtype if name == "sinks" and dtype != torch.float64 else dtype).requires_grad_()
        for name, x in case.tensors.items()
    }
    out, lse = attend(**inputs)
    results = {"out": out.detach(), "lse": lse.detach()}
    outputs, grads = [out], [case.dout.to(out.dtype)]
    if case.with_dlse:
        outputs.append(lse)
        grads.append(case.dlse.to(lse.dtype).masked_fill(torch.isinf(lse), 0.0))
    for name, grad in zip(inputs, torch.autograd.grad(outputs, list(inputs.values()), grads), strict=True):
        results["d" + name] = grad
    return results


def op(
    case: Case,
    *,
    segments_host: Tensor | None = None,
    plan: Callable[[Tensor, Tensor, Tensor | None], list[Tensor]] | None = None,
    deterministic: bool = False,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The op on the case's segments, as `check` wants it. `plan(q, k, k_context)`: the kernels' tables, by
    default those that the op builds."""
    table = case.table.to(case.tensors["q"].device)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_context: Tensor | None = None,
        v_context: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return _calls.attention(
            q, k, v, k_context, v_context, table, segments_host, plan(q, k, k_context) if plan else [],
            max(case.total_q, 1), max(case.total_k, 1), case.softmax_scale, case.causal, case.window_size,
            case.softcap, sinks, deterministic,
        )  # fmt: skip

    return attend


def check(case: Case, attend: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """`attend(q=, k=, v=[, k_context=, v_context=, sinks=]) -> out, lse (H, total_q)` obeys the rule on this
    case."""
    results = run(case, attend, case.dtype)
    assert results["out"].dtype == case.dtype

    def referee(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        return reference.attention(**tensors, segments=case.table, **case.options)

    def low(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        return reference.attention(**tensors, segments=case.table, **case.options, low=True)

    ref = run(case, referee, torch.float64)
    if case.dtype == torch.float64:  # the rule's yardstick is fp32; fp64 is exact up to its own rounding
        for name, x in results.items():
            torch.testing.assert_close(
                x, ref[name], rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n} of {case}: {m}"
            )
        return
    yardstick = run(case, low, case.dtype)
    magnitude = max(
        (float(x[x.isfinite()].abs().max()) for x in ref.values() if x.isfinite().any()), default=0.0
    )
    for name, x in results.items():
        dtype = torch.float32 if name == "lse" else case.dtype
        assert_close(f"{name} of {case}", x, yardstick[name], ref[name], dtype, magnitude)
