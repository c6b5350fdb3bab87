"""What travels with a call reaches attention: keyword arguments through the layers, determinism to the op."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers_models import model_of

from flash_attn.integrations import _transformers_attention
from flash_attn.integrations._transformers_passing import lost_argument
from flash_attn.shared_prompt import SharedPromptLayout

LAYOUT = SharedPromptLayout.from_lengths([3], [[1, 1]])  # 2 + 2 + 2 rows
CU = torch.tensor([0, 2, 6], dtype=torch.int32)


class _KeepsArguments(torch.nn.Module):
    """Its attention is named as transformers names them, and asks the interface without `**kwargs`."""

    class LostAttention(torch.nn.Module):
        def forward(self, x: Any, attention_interface: Any = None, **kwargs: Any) -> Any:
            return attention_interface(self, x, x, x, None, scaling=1.0)

    class Layer(torch.nn.Module):
        def __init__(self, attention: torch.nn.Module) -> None:
            super().__init__()
            self.attn = attention

        def forward(self, x: Any, **kwargs: Any) -> Any:
            return self.attn(x, **kwargs)

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([self.Layer(self.LostAttention())])

    def forward(self, x: Any, **kwargs: Any) -> Any:
        for _, layer in enumerate(self.layers):
            x = layer(x)
        return x


def test_every_call_on_the_way_to_attention_must_pass_arguments_on() -> None:
    model = _KeepsArguments()
    assert lost_argument(model.layers[0], "attn") == (
        "attention of LostAttention does not pass keyword arguments on"
    )
    assert lost_argument(model, "layers.0.attn") == (
        "_KeepsArguments does not pass keyword arguments on to layers[]"
    )
    backbone = model_of("phimoe").model
    assert lost_argument(backbone, "layers.0.self_attn") is None  # it has no window to hide


def _attend(**kwargs: Any) -> Any:
    module: Any = torch.nn.Module()
    module.config = None
    q, k, v = (torch.randn(1, heads, 6, 8) for heads in (4, 2, 2))
    return _transformers_attention.dualkv_attention(module, q, k, v, None, **kwargs)


@pytest.mark.parametrize("how", ["argument", "global"])
@pytest.mark.parametrize(
    "path", ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_shared_prompt_func"]
)
def test_deterministic_reaches_the_op(path: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model's argument or torch.use_deterministic_algorithms, and not without them."""
    function, seen = getattr(_transformers_attention, path), []

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["deterministic"])
        return function(*args, **kwargs)

    monkeypatch.setattr(_transformers_attention, path, spy)
    kwargs: dict[str, Any] = {
        "flash_attn_func": {},
        "flash_attn_varlen_func": {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU},
        "flash_attn_shared_prompt_func": {"dualkv_layout": LAYOUT},
    }[path]
    call = functools.partial(_attend, **kwargs)
    call()
    if how == "argument":
        call(deterministic=True)
    else:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            call()
        finally:
            torch.use_deterministic_algorithms(before)
    assert seen == [False, True]
