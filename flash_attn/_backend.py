"""Which implementation runs: the CUDA library ("cuda-sm90a", "cuda-sm80"), "composed" or "cpu". Nothing is
loaded on import.

    FLASH_ATTN_BACKEND=cuda|composed   forces one on GPU tensors ("cuda": or raises, saying why not)
    FLASH_ATTN_FORCE_ARCH=80|90        runs the sm_80 kernels on Hopper, or insists on the sm_90a ones
    FLASH_ATTN_LIBRARY=FILE            loads this library instead of the installed one
    FLASH_ATTN_DECODE=op               decodes through the op, without the Triton kernels (_decode.py)
CPU tensors always run on the CPU implementation.
"""

from __future__ import annotations

import functools
import glob
import logging
import os

import torch

logger = logging.getLogger("flash_attn")

_CHOICES = ("", "cuda", "composed")
# Looked at in every call: os.environ raises and catches an exception for a variable that is not set, 0.7 us.
_variables = getattr(os.environb, "_data", os.environb)


def _variable(name: bytes) -> str:
    """An environment variable as it is now, "" where it is not set."""
    return _variables.get(name, b"").decode()


@functools.lru_cache(maxsize=1)
def _load_library() -> str | None:
    """Load the compiled library once. None when it is there, else the reason why not."""
    folder = os.path.dirname(os.path.abspath(__file__))
    paths = sorted(glob.glob(os.path.join(folder, "_C*.so")) + glob.glob(os.path.join(folder, "lib*.so")))
    if os.environ.get("FLASH_ATTN_LIBRARY"):  # a developer's own build of some kernels
        paths = [os.environ["FLASH_ATTN_LIBRARY"]]
    if not paths:
        return f"the compiled library is not built (no _C*.so in {folder})"
    try:
        for path in paths:
            torch.ops.load_library(path)
    except OSError as error:
        return f"the compiled library does not load: {error}"
    missing = [name for name in ("plan", "fwd", "bwd") if not hasattr(torch.ops.flash_attn_cuda, name)]
    if missing:
        return f"{paths} do not define torch.ops.flash_attn_cuda.{{{','.join(missing)}}}"
    return None


def _built() -> str:
    """The kernels of the loaded library, like "sm90: bf16 64 128; sm80: bf16 64 128"."""
    return torch.ops.flash_attn_cuda.built()


def _library_arch(device_index: int) -> tuple[str | None, str | None]:
    """("sm90a" or "sm80", None), or (None, why the library does not run on this GPU)."""
    reason = _load_library()
    if reason is not None:
        return None, reason
    major, minor = torch.cuda.get_device_capability(device_index)
    if major < 8:
        return None, f"GPUs before sm_80 are not supported, got sm_{major}{minor}"
    forced = os.environ.get("FLASH_ATTN_FORCE_ARCH", "")
    if forced not in ("", "80", "90"):
        raise ValueError(f"FLASH_ATTN_FORCE_ARCH must be 80 or 90, got {forced!r}")
    built = _built()
    if major == 9 and forced != "80" and ("sm90" in built or forced == "90"):
        return "sm90a", None
    if "sm80" in built:
        return "sm80", None
    return None, f"the compiled library has no kernels for sm_{major}{minor} (built: {built})"


def why_unavailable() -> str | None:
    """Why the compiled GPU library cannot run here, or None when it can. Loads the library on first use."""
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    return _library_arch(torch.cuda.current_device())[1]


def is_available() -> bool:
    """True when the compiled GPU library runs on the current device. CPU and composed backends need no
    library."""
    return why_unavailable() is None


def backend(
    device: torch.device | str | None = None,
    *,
    head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """The implementation that runs for tensors on `device` (default: the current GPU where there is one, else
    the CPU).

    "cuda-sm90a" | "cuda-sm80" (the compiled library), "composed" (torch's own FlashAttention-2, merged by
    LSE) or "cpu". With `head_dim` (and `dtype`): what runs for tensors of it, since on Hopper a head dim
    whose sm_90a kernels were not built runs the sm_80 ones. Raises ValueError for an unknown
    FLASH_ATTN_BACKEND, RuntimeError without a CUDA device or when it forces "cuda" and the library does not
    run, NotImplementedError for a head dim or dtype that the library has no kernel for.
    """
    if device is None:
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(device)
    choice = _variable(b"FLASH_ATTN_BACKEND")
    if choice not in _CHOICES:
        raise ValueError(f"FLASH_ATTN_BACKEND must be 'cuda' or 'composed', got {choice!r}")
    kind = device.type
    if kind == "cpu":
        return kind
    if kind != "cuda":
        raise NotImplementedError(f"flash_attn runs on CPU and CUDA devices, got {kind}")
    if device.index is None and not torch.cuda.is_available():  # tensors' devices have an index
        raise RuntimeError(f"no CUDA device is there: {why_unavailable()}")
    index = torch.cuda.current_device() if device.index is None else device.index
    force_arch = _variable(b"FLASH_ATTN_FORCE_ARCH")
    chosen = _gpu_backend(index, choice, force_arch)
    if head_dim is None or chosen == "composed":
        return chosen
    return _kernels_backend(index, chosen, force_arch, head_dim, dtype)


def stream_of(device: torch.device) -> int:
    """The address of torch's current stream on a tensor's GPU, without torch.cuda's objects around it; 0 on
    the CPU."""
    return 0 if device.index is None else torch._C._cuda_getCurrentRawStream(device.index)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured there."""
    return device.index is not None and torch.cuda.is_current_stream_capturing()


@functools.cache
def _gpu_backend(device_index: int, choice: str, force_arch: str) -> str:
    """Decided (and logged) once per device and setting, so that a call costs one look-up. `force_arch` is
    there to be a key: the library reads the variable itself."""
    if choice == "composed":
        chosen, reason = "composed", "FLASH_ATTN_BACKEND=composed"
    else:
        arch, why = _library_arch(device_index)
        if arch is None and choice == "cuda":
            raise RuntimeError(f"FLASH_ATTN_BACKEND=cuda, but {why}")
        chosen, reason = (f"cuda-{arch}", "compiled library") if arch else ("composed", str(why))
    logger.info("flash_attn backend on cuda:%d is %s (%s)", device_index, chosen, reason)
    return chosen


@functools.cache
def _kernels_backend(
    device_index: int, chosen: str, force_arch: str, head_dim: int, dtype: torch.dtype
) -> str:
    """Whose kernels run for a head dim and dtype where the library runs; logged where they are others."""
    missing = torch.ops.flash_attn_cuda.unsupported(device_index, head_dim, dtype)
    if missing:
        raise NotImplementedError(missing)
    kernels = chosen if chosen == "cuda-sm80" or _has_kernels("sm90", head_dim, dtype) else "cuda-sm80"
    if kernels != chosen:
        logger.info("flash_attn: head dim %d in %s runs on %s, not %s", head_dim, dtype, kernels, chosen)
    return kernels


def _has_kernels(arch: str, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the library holds kernels of `arch` for this dtype and a head dim of at least `head_dim`."""
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype)
    for section in _built().split("; "):
        section_arch, _, kinds = section.partition(": ")
        for kind, *head_dims in map(str.split, kinds.split(", ")):
            if section_arch == arch and kind == name and any(int(d) >= head_dim for d in head_dims):
                return True
    return False
