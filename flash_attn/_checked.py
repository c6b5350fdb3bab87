"""The checks of a call's tensors and options, once for all calls of a kind.

What they found out is remembered by all that they look at: a model's calls are of a few kinds, and the checks
take as long as a short kernel. Called by _calls.py and flash_attn_interface.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_attn import _eager, checks


def kernel_head_dim(head_dim: int) -> int:
    """The head dim that the GPU's kernels see: the next multiple of 8."""
    return (head_dim + 7) // 8 * 8


def op_head_dims(q: Tensor, v: Tensor) -> tuple[int, int]:
    """Head dims of q and k, and of v, as the op takes them: the GPU's kernels want one for all."""
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    return (kernel_head_dim(head_dim),) * 2 if q.device.type == "cuda" else (head_dim, head_dim_v)


def scale_of(softmax_scale: float | None, q: Tensor) -> float:
    """`softmax_scale`, checked; by default q's head_dim**-0.5."""
    if softmax_scale is None:
        return q.shape[-1] ** -0.5
    return checks.softmax_scale(softmax_scale, q.device.type, q.dtype)


class Call:
    """What holds for all calls of a kind.

    `options`: softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic, as the op
    takes them. `head_dim`, `head_dim_v`: the op's, of q and k, and of v; `padded` where these are not the
    tensors'. `direct`: whether nobody watches or rewrites operators (`_eager.is_direct`).
    """

    __slots__ = ("direct", "head_dim", "head_dim_v", "options", "padded")

    def __init__(
        self, direct: bool, q: Tensor, v: Tensor, softmax_scale: float | None, causal: bool,
        window_size: tuple[int, int], softcap: float, deterministic: bool,
    ) -> None:  # fmt: skip
        self.direct = direct
        self.options: tuple[Any, ...] = (
            scale_of(softmax_scale, q), checks.flag("causal", causal), int(window_size[0]),
            int(window_size[1]), float(softcap), checks.flag("deterministic", deterministic),
        )  # fmt: skip
        self.head_dim, self.head_dim_v = op_head_dims(q, v)
        self.padded = self.head_dim != q.shape[-1] or self.head_dim_v != v.shape[-1]


_known: dict[tuple[Any, ...], Call] = {}
_MAX_KNOWN = 1024  # lengths of packed batches differ from call to call
_NUMBERS = frozenset((bool, int, float, type(None)))  # equal ones of one type mean the same


def checked(
    q: Tensor, k: Tensor, v: Tensor, num_dims: int, dropout_p: float, softmax_scale: float | None,
    causal: bool, window_size: tuple[int, int], softcap: float, deterministic: bool,
) -> Call:  # fmt: skip
    """Checks q, k, v of `num_dims` dimensions, and the options."""
    direct = q is not None and k is not None and v is not None and _eager.is_direct(q, k, v)
    kind: tuple[Any, ...] | None = None
    if direct and type(window_size) is tuple:
        numbers = (dropout_p, softmax_scale, causal, softcap, deterministic, *window_size)
        kind = (
            num_dims, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            numbers, (*map(type, numbers),),
        )  # fmt: skip
        try:
            known = _known.get(kind)
        except TypeError:  # an option without a hash is no plain number
            known = kind = None
        if known is not None:
            return known
    checks.qkv(q, k, v, num_dims)
    checks.options(dropout_p, softcap, window_size, q.dtype)
    call = Call(direct, q, v, softmax_scale, causal, window_size, softcap, deterministic)
    if kind is not None and _NUMBERS.issuperset(kind[-1]):
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[kind] = call
    return call
