"""Where Triton does not run, its kernels' modules are left out, and the log says once what runs instead."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import flash_attn
from flash_attn import _cross_entropy, _decode

USERS = {
    "_cross_entropy_kernel": (_cross_entropy._module, "'s cross entropy runs in PyTorch"),
    "_decode_kernel": (_decode.kernels, " decodes through the op"),
}


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("_cross_entropy_kernel", "triton"),
        ("_decode_kernel", "triton"),
        ("_decode_kernel", "triton.language.extra.cuda"),  # a release whose CUDA part lacks what it imports
    ],
)
def test_no_triton_is_said_once(
    module: str, missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels: Any
    kernels, otherwise = USERS[module]
    if missing != "triton":
        pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"flash_attn.{module}", raising=False)
    monkeypatch.delattr(flash_attn, module, raising=False)
    kernels.cache_clear()
    with caplog.at_level("WARNING", "flash_attn"):
        assert kernels() is None and kernels() is None
    kernels.cache_clear()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"flash_attn{otherwise}, because Triton does not run: ")
