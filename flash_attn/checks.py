"""Argument checks of the public functions, done once at the boundary. Form: "{name} must {rule}, got
{value}".

Shapes, dtypes and devices are always checked. Values of tensors are checked where reading them needs no
device sync (on the CPU), and on GPUs with FLASH_ATTN_CHECK=1. Nothing here runs on tensor values under
torch.compile (the ops check again).
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = {"cuda": 512}


def values_are_read(x: Tensor) -> bool:
    """True where the values of `x` may be looked at: never while tracing, on GPUs only with
    FLASH_ATTN_CHECK=1 (it waits for the GPU)."""
    if torch.compiler.is_compiling() or isinstance(x, torch._subclasses.FakeTensor):
        return False
    kind = x.device.type
    return kind == "cpu" or (kind == "cuda" and os.environ.get("FLASH_ATTN_CHECK", "0") == "1")


def dims(name: str, x: Any, num_dims: int, shape: str) -> None:
    """A tensor of `num_dims` dimensions, which `shape` names."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dim() != num_dims:
        raise ValueError(f"{name} must be {shape}, got {list(x.shape)}")


def qkv(
    q: Tensor, k: Tensor, v: Tensor, num_dims: int, names: tuple[str, str, str] = ("q", "k", "v")
) -> None:
    """q (..., H, D), k (..., Hk, D), v (..., Hk, Dv <= D) of one dtype and device; H a multiple of Hk."""
    rows = "batch, seqlen" if num_dims == 4 else "total"
    shapes = [f"({rows}_q, num_heads, head_dim)"] + [f"({rows}_k, num_heads_k, head_dim)"] * 2
    if num_dims == 4:
        shapes = [s.replace("batch_q", "batch").replace("batch_k", "batch") for s in shapes]
    for name, x, shape in zip(names, (q, k, v), shapes, strict=True):
        dims(name, x, num_dims, shape)
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on {names[0]}'s device {q.device}, got {x.device}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have {names[0]}'s dtype {q.dtype}, got {x.dtype}")
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(f"flash_attn runs on CPU and CUDA devices, got {q.device.type}")
    if q.device.type == "cuda" and q.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"{names[0]} must be float16 or bfloat16 on CUDA devices, got {q.dtype}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{names[2]} must have {names[1]}'s rows and heads {list(k.shape[:-1])}, got {list(v.shape)}"
        )
    if num_dims == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"{names[1]} must have {names[0]}'s batch size {q.shape[0]}, got {list(k.shape)}")
    num_heads, num_heads_k = q.shape[-2], k.shape[-2]
    if num_heads_k == 0 or num_heads % num_heads_k:
        raise ValueError(
            f"{names[0]} must have a multiple of {names[1]}'s {num_heads_k} heads, got {num_heads}"
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{names[1]} must have {names[0]}'s head_dim {q.shape[-1]}, got {k.shape[-1]}")
    if not 0 < v.shape[-1] <= q.shape[-1]:
        raise ValueError(
            f"{names[2]} must have a head_dim of 1 to {q.shape[-1]} (that of {names[0]}), got {v.shape[-1]}"
        )
    limit = MAX_HEAD_DIM.get(q.device.type)
    if limit is not None and q.shape[-1] > limit:
        raise NotImplementedError(f"head_dim must be at most {limit} on CUDA devices, got {q.shape[-1]}")


def options(
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Values of the options, for inputs of `dtype`."""
    dropout_p, softcap = _number("dropout_p", dropout_p), _number("softcap", softcap)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if not 0.0 <= softcap < float("inf"):
        raise ValueError(f"softcap must be >= 0 and finite (0: none), got {softcap}")
    if softcap > 0.0:
        normal("softcap", softcap, dtype)
    is_row = isinstance(window_size, Tensor) and window_size.dim() == 1
    if not (is_row or isinstance(window_size, Sequence)) or len(window_size) != 2:
        raise ValueError(f"window_size must be (left, right), got {window_size!r}")
    for index, side in enumerate(window_size):
        integer(f"window_size[{index}]", side)


# Name, cu_seqlens, rows they describe, name and value of max_seqlen.
_Lengths = tuple[str, Tensor, int, str, int]


def cu_seqlens_pair(queries: _Lengths, keys: _Lengths, device: torch.device) -> None:
    """Both cu_seqlens of a call: int32 (batch + 1,) on `device`; where values are read, they start at 0,
    never fall, end at or before the rows they describe, and no sequence is longer than its max_seqlen.
    """
    for name, x, *_ in (queries, keys):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {x.dtype}")
        if x.dim() != 1 or x.shape[0] < 2:
            raise ValueError(f"{name} must be (batch + 1,) with batch >= 1, got {list(x.shape)}")
        if x.device != device:
            raise ValueError(f"{name} must be on q's device {device}, got {x.device}")
    if queries[1].shape != keys[1].shape:
        length = queries[1].shape[0]
        raise ValueError(f"{keys[0]} must have {queries[0]}'s length {length}, got {keys[1].shape[0]}")
    if values_are_read(queries[1]):
        cu_seqlens_values(*queries)
        cu_seqlens_values(*keys)


def cu_seqlens_values(name: str, x: Tensor, total: int, max_name: str, max_seqlen: int) -> None:
    """x (batch + 1,) begins at 0, does not decrease and ends within `total` rows, and no sequence is longer
    than `max_seqlen`, which the caller knows as `max_name`. Reads the values."""
    values = x.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, got {_short(values)}")
    lengths = [b - a for a, b in itertools.pairwise(values)]
    if min(lengths) < 0:
        raise ValueError(f"{name} must not decrease, got {_short(values)}")
    if values[-1] > total:
        raise ValueError(f"{name} must end at or before the {total} rows it describes, got {_short(values)}")
    if max(lengths) > max_seqlen:
        raise ValueError(
            f"{max_name} must be at least the longest sequence ({max(lengths)}), got {max_seqlen}"
        )


def alibi_slopes(x: Tensor | None, q: Tensor, batch: int) -> Tensor | None:
    """ALiBi's slopes: float32 (num_heads,) or (batch, num_heads) on q's device, contiguous afterwards."""
    if x is None:
        return None
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"alibi_slopes must be a float32 tensor, got {kind}")
    num_heads = q.shape[-2]
    # Not by `in`, which Dynamo gets wrong for symbolic sizes.
    if x.shape != (num_heads,) and x.shape != (batch, num_heads):
        raise ValueError(
            f"alibi_slopes must be (num_heads,) or (batch, num_heads) = ({batch}, {num_heads}), "
            f"got {list(x.shape)}"
        )
    if x.device != q.device:
        raise ValueError(f"alibi_slopes must be on q's device {q.device}, got {x.device}")
    if x.requires_grad:
        raise NotImplementedError("gradients of alibi_slopes are not supported")
    return x.contiguous()


def rng_state(x: Tensor, q: Tensor) -> Tensor:
    """Dropout's seed and offset: int64 (2,) on q's device."""
    if not isinstance(x, Tensor) or x.dtype != torch.int64:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"rng_state must be an int64 tensor, got {kind}")
    if x.shape != (2,):
        raise ValueError(f"rng_state must be (2,), got {list(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"rng_state must be on q's device {q.device}, got {x.device}")
    return x


def sinks(x: Tensor | None, q: Tensor) -> None:
    """Sink logits: floating point (num_heads,) on q's device."""
    if x is None:
        return
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"sinks must be a floating point tensor, got {kind}")
    if x.shape != (q.shape[-2],):
        raise ValueError(f"sinks must be (num_heads,) = ({q.shape[-2]},), got {list(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"sinks must be on q's device {q.device}, got {x.device}")


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """What inputs of `dtype` are computed in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def normal(name: str, x: Any, dtype: torch.dtype) -> None:
    """A number > 0 that the arithmetic of inputs of `dtype` takes neither for infinite nor for (nearly) 0."""
    wide = arithmetic(dtype)
    limits = torch.finfo(wide)
    if not limits.tiny <= _number(name, x) <= limits.max:
        raise ValueError(f"{name} must be in [{limits.tiny:.3g}, {limits.max:.3g}] ({wide}), got {x}")


def softmax_scale(x: Any, device_type: str, dtype: torch.dtype) -> float:
    """A number that the arithmetic of inputs of `dtype` takes for finite; CUDA kernels take the maximum
    before they scale, so that theirs is positive.
    """
    scale, wide = _number("softmax_scale", x), arithmetic(dtype)
    largest = torch.finfo(wide).max
    if not -largest <= scale <= largest:  # may be symbolic: no math.isfinite
        raise ValueError(f"softmax_scale must be finite ({wide}), got {scale}")
    scale = float(scale)
    if scale <= 0.0 and device_type == "cuda":
        raise NotImplementedError(f"softmax_scale must be > 0 on CUDA devices, got {scale}")
    return scale


def no_forward_mode(*tensors: Tensor | None) -> None:
    """Refuses tangents, which the op would drop without a word."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("flash_attn: forward-mode derivatives (jvp) are not supported")


def no_double_backward(name: str) -> None:
    """In a backward made of plain steps: refuses create_graph, under which alone gradients are recorded there
    (a second derivative would lack what the steps leave out)."""
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{name}: double backward (a gradient of a gradient) is not supported")


def flag(name: str, x: Any) -> bool:
    """A bool: Python's, NumPy's, a symbolic one, 0 or 1, or a tensor of no dimensions."""
    if isinstance(x, bool | torch.SymBool):
        return x  # type: ignore[return-value]
    if (isinstance(x, int) and x in (0, 1)) or getattr(x, "ndim", None) == 0:
        return bool(x)
    raise TypeError(f"{name} must be a bool, got {x!r}")


def _number(name: str, x: Any) -> Any:
    """A real number: Python's, NumPy's, a symbolic one while tracing, or a one-element tensor."""
    if isinstance(x, int | float | torch.SymInt | torch.SymFloat):
        return x
    error: Exception | None = None
    if not isinstance(x, str | bytes):
        try:
            return float(x)
        except OverflowError as problem:  # a fraction, say
            raise ValueError(f"{name} must be finite, got {x}") from problem
        except (TypeError, ValueError, RuntimeError) as problem:
            error = problem
    raise TypeError(f"{name} must be a number, got {x!r}") from error


def integer(name: str, x: Any) -> int:
    """An integer of 64 bits: Python's, NumPy's, a symbolic one while tracing, or a one-element tensor."""
    if isinstance(x, torch.SymInt):
        return x  # type: ignore[return-value]
    if not isinstance(x, int):
        try:
            x = operator.index(x)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must be an int, got {type(x).__name__}") from error
    if not -(1 << 63) <= x < 1 << 63:
        raise ValueError(f"{name} must be an int of 64 bits, got {x}")
    return x


def length(name: str, x: Any) -> int:
    """A non-negative integer."""
    x = integer(name, x)
    if x < 0:
        raise ValueError(f"{name} must be >= 0, got {x}")
    return x


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 16 else f"[{', '.join(map(str, values[:8]))}, ..., {values[-1]}]"
