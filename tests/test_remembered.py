"""What calls leave behind for later ones (docs/code.md, "What is remembered between calls"): told apart by
all it depends on, and nothing that a CUDA graph has only captured is taken for done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_transformers_passing import _KeepsArguments

from flash_attn import _backend as backends
from flash_attn import _composed_calls as calls
from flash_attn import _kvcache_op, _ops, flash_attn_with_kvcache
from flash_attn.integrations._transformers_passing import lost_argument
from flash_attn.integrations._transformers_sequences import cached, sequence_bounds, unpad_rows
from flash_attn.shared_prompt import SharedPromptLayout, _context_keys, group_by_prompt, pack
from flash_attn.shared_prompt._exchange import RowExchange


def test_decoding_through_the_op_tells_backends_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLASH_ATTN_BACKEND and FLASH_ATTN_FORCE_ARCH may change between calls: a plan is one backend's."""
    kinds: list[Any] = []

    def remembered(seqlens: Any, others: Any, numbers: tuple[Any, ...], make: Any) -> Any:
        kinds.append(numbers)
        return make()

    monkeypatch.setattr(_kvcache_op, "_remembered", remembered)
    q, cache, lengths = torch.randn(2, 1, 2, 8), torch.randn(2, 9, 2, 8), torch.tensor([3, 9])
    for name in ("cuda-sm90a", "cuda-sm90a", "cuda-sm80"):
        monkeypatch.setattr(_kvcache_op, "backend", lambda device, name=name: name)
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths)
    assert kinds[0] == kinds[1] != kinds[2]


def test_composed_tables_belong_to_a_stream_and_graphs_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_composed", {})
    monkeypatch.setattr(calls, "_in_graphs", {})
    stream, capturing = 1, False
    monkeypatch.setattr(calls, "stream_of", lambda device: stream)
    monkeypatch.setattr(calls, "is_capturing", lambda device: capturing)

    def parts(length: int) -> list[calls.Part]:
        table = (0, length, 0, 0, 0, length)
        return calls._composed_once(table, None, True, (-1, -1), torch.device("cpu"))

    first = parts(5)
    assert parts(5) is first and parts(6) is not first
    stream = 2  # where nothing was written yet
    second = parts(5)
    assert second is not first
    stream, capturing = 3, True
    assert parts(5) is second
    with pytest.raises(RuntimeError, match="run a batch once before a CUDA graph of it is captured"):
        parts(7)
    capturing = False
    for length in range(10, 10 + 2 * calls._MOST_COMPOSED):
        parts(length)
    assert len(calls._composed) <= calls._MOST_COMPOSED
    capturing = True
    assert parts(5) is second


@pytest.mark.parametrize("kind", ["layout", "context"])
def test_plans_built_in_a_capture_are_not_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tables that only the replay writes; and a later call may ask for gradients."""
    layout: Any = SharedPromptLayout.from_lengths([5], [[2, 3]])
    if kind == "context":
        exchange = RowExchange([torch.arange(layout.num_rows)], layout.num_rows, 0)
        layout = _context_keys.ContextKeys(layout.segments.tolist(), exchange, 4)
    built: list[torch.Tensor] = []
    capturing = True
    monkeypatch.setattr(_ops, "plan_tables", lambda *a, **k: built.append(torch.zeros(1)) or [built[-1]])
    monkeypatch.setattr(backends, "is_capturing", lambda device: capturing)

    def plan() -> torch.Tensor:
        rows = (layout.num_keys,) if kind == "context" else ()
        return layout.plan(*rows, head_dim=64, num_heads_k=1, dtype=torch.bfloat16)[0]

    assert plan() is not plan()
    capturing = False
    with torch.inference_mode():
        eager = plan()
    assert plan() is eager and not eager.is_inference() and len(built) == 3
    capturing = True
    assert plan() is eager


def test_composed_graphs_of_other_lengths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls are made of lengths on the host, so that a replay would not see those of `copy_`."""
    layouts = [SharedPromptLayout.from_lengths([5], [[2]], **size) for size in ({}, CAPACITIES)]
    arguments = dict(head_dim=64, num_heads_k=1, dtype=torch.bfloat16)
    monkeypatch.setattr(backends, "backend", lambda *a, **k: "composed")
    assert [layout.plan(**arguments) for layout in layouts] == [[], []]
    monkeypatch.setattr(backends, "is_capturing", lambda device: True)
    assert layouts[0].plan(**arguments) == []
    with pytest.raises(NotImplementedError, match="no CUDA graphs of layouts with capacities"):
        layouts[1].plan(**arguments)


CAPACITIES = dict(max_segments=3, max_total=20)


def test_layouts_are_built_on_the_cpu_whatever_the_default_device() -> None:
    torch.set_default_device("meta")
    try:
        layout = SharedPromptLayout.from_lengths([5], [[2, 3]])
    finally:
        torch.set_default_device(None)
    assert {getattr(layout, name).device.type for name in layout._tensor_names} == {"cpu"}


def test_packs_are_built_on_the_cpu_whatever_the_default_device() -> None:
    rows = [[1, 2], [1, 2]], [[3], [4, 5]]
    prompts, responses = torch.tensor(rows[0]), torch.tensor([[3, 0], [4, 5]])
    mask = torch.tensor([[1, 0], [1, 1]])
    expected = pack(*rows).input_ids
    torch.set_default_device("meta")
    try:
        packs = pack(*rows), pack(prompts, responses, response_mask=mask)
        assert len(group_by_prompt(prompts, prompt_lens=[2, 2]).rows) == 1
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(packed.input_ids, expected) for packed in packs)


def test_tables_of_a_mask_go_with_its_values_and_serve_training() -> None:
    mask = torch.zeros(3, device="meta")
    with torch.inference_mode():
        assert not cached(mask, torch.clone).is_inference()
    kept = [cached(mask.add_(1), torch.clone) for _ in range(3)]
    from flash_attn.integrations._transformers_sequences import _results

    version, found = _results.by_tensor[mask]
    assert version == mask._version and list(found.values()) == [kept[-1]]


def test_bounds_of_no_sequences() -> None:
    """Attention refuses them by name."""
    assert unpad_rows(torch.ones(0, 6), 6)[2] == 0
    lengths, q = torch.tensor([0]), torch.randn(1, 0, 2, 8)
    given = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    assert sequence_bounds(q, q, None, given)[2:] == (0, 0)


def test_a_forward_that_was_replaced_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _KeepsArguments()
    assert "does not pass keyword arguments on" in (lost_argument(model.layers[0], "attn") or "")

    def forward(self: Any, x: Any, attention_interface: Any = None, **kwargs: Any) -> Any:
        return attention_interface(self, x, x, x, None, scaling=1.0, **kwargs)

    monkeypatch.setattr(_KeepsArguments.LostAttention, "forward", forward)
    assert lost_argument(model.layers[0], "attn") is None
