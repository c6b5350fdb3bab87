"""A layout reaches every layer or the forward fails: receipts, injected and wrapped attention,
registration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers_models import model_of, packed_batch, packed_log_probs, row_log_probs

from flash_attn.integrations import transformers as dualkv


@pytest.fixture(autouse=True)
def _registered() -> None:
    dualkv.register()


def _logits(model: Any, packed: Any, **kwargs: Any) -> torch.Tensor:
    positions = {"input_ids": packed.input_ids, "position_ids": packed.position_ids, "use_cache": False}
    return model(**positions, **kwargs).logits


def _assert_equal_rows(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


# Receipts


def test_receipt_names_the_layer_that_did_not_get_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    model, packed = model_of("llama", "dualkv"), packed_batch()
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def without_layout(*args: Any, dualkv_layout: Any, position_ids: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", without_layout)
    with pytest.raises(RuntimeError, match=r"1 of 2 attention layers .* Missing: layers\.1\.self_attn\."):
        packed_log_probs(model, packed)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_receipt_refuses_other_attention(attention: str) -> None:
    model = model_of("llama", attention)
    with pytest.raises(RuntimeError, match=r"0 of 2 attention layers .* layers\.0\.self_attn"):
        dualkv.packed_forward(model, packed_batch())


def test_unregistered_attention_fails() -> None:
    model, packed = model_of("llama", "dualkv"), packed_batch()
    dualkv.unregister()
    with pytest.raises(KeyError, match="dualkv"):
        dualkv.packed_forward(model, packed)


def test_receipt_counts_layers_that_share_keys() -> None:
    model, packed = model_of("gemma4_text", "dualkv"), packed_batch()
    with dualkv.receipt(model, packed.layout) as receipt:
        _logits(model, packed, dualkv_layout=packed.layout)
    assert receipt.seen == receipt.expected == [f"layers.{i}.self_attn" for i in range(4)]
    assert receipt.unshared == []


def test_receipt_refuses_another_layout_and_keeps_the_bodys_exception() -> None:
    model, packed = model_of("llama", "dualkv"), packed_batch()
    other = packed_batch()
    with pytest.raises(RuntimeError, match="0 of 2 attention layers"):
        with dualkv.receipt(model, other.layout):
            _logits(model, packed, dualkv_layout=packed.layout)
    with pytest.raises(ZeroDivisionError):
        with dualkv.receipt(model, packed.layout):
            raise ZeroDivisionError
    packed_log_probs(model, packed)  # nothing is left behind


def test_a_lost_layout_is_noticed_without_a_receipt() -> None:
    model, packed = model_of("llama", "dualkv"), packed_batch()
    with pytest.raises(ValueError, match="A shared-prompt pack must be passed with dualkv_layout="):
        _logits(model, packed)


# Wrappers


@pytest.fixture
def _one_process(tmp_path: Path) -> Any:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "fsdp2 bf16"])
@pytest.mark.usefixtures("_one_process")
def test_data_parallel_wrappers_pass_the_layout_whole(wrapper: str) -> None:
    """With checkpointing. Mixed precision must leave positions alone: bf16 has no odd numbers above 256."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rows = ((list(range(3, 60)) * 5, [9, 8, 7]), (list(range(3, 60)) * 5, [5, 5, 6, 8]))
    packed = packed_batch(rows=rows)
    dtype, tolerance = (torch.bfloat16, 0.1) if "bf16" in wrapper else (torch.float32, 1e-5)
    plain = model_of("qwen3", "dualkv", max_position_embeddings=512).train()
    expected = dualkv.packed_forward(plain, packed).logits
    expected.square().mean().backward()
    model = model_of("qwen3", "dualkv", max_position_embeddings=512).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if wrapper == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer.self_attn, mesh=mesh, mp_policy=policy)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        with pytest.raises(NotImplementedError, match="the LM head is sharded"):
            dualkv.log_probs_of_batch(model, packed)
    logits = dualkv.packed_forward(model, packed).logits
    logits.float().square().mean().backward()
    assert logits.dtype == dtype and (logits - expected).norm() <= tolerance * expected.norm()
    smallest = 1e-2 * max(p.grad.norm() for p in plain.parameters())
    for x, y in zip(model.parameters(), plain.parameters(), strict=True):
        grad = x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
        assert (grad - y.grad).norm() <= tolerance * max(y.grad.norm(), smallest)


def test_compiled_layers_take_changing_layouts_without_recompiling() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model, plain = (model_of("qwen3", "dualkv", num_hidden_layers=1) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    model.model.layers[0].compile(backend=counter, fullgraph=True, dynamic=True)
    for size in range(5):
        prompt = torch.randint(3, 67, (4 + size,)).tolist()
        rows = tuple((prompt[: 4 + size - i % 2], [5] * (2 + i + size)) for i in range(3 + size % 2))
        packed = packed_batch(rows=rows)
        found, expected = (_logits(m, packed, dualkv_layout=packed.layout) for m in (model, plain))
        torch.testing.assert_close(found, expected)
        found.square().mean().backward()
        expected.square().mean().backward()
    assert counter.frame_count <= 2
    for x, y in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad)
    with pytest.raises(RuntimeError, match=r"Layers inside a graph of torch\.compile cannot be counted"):
        dualkv.packed_forward(model, packed)


# inject


class _DropsKwargs(torch.nn.Module):
    """What verl's fused heads do: unknown kwargs do not reach the backbone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)[0]
        return self.model.lm_head(hidden)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_inject_reaches_the_layers_and_is_gone_afterwards(use_reentrant: bool | None) -> None:
    model, packed = model_of("qwen3", "dualkv"), packed_batch()
    expected = _logits(model, packed, dualkv_layout=packed.layout)
    expected.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    framework = _DropsKwargs(model).train()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with dualkv.inject(model, packed.layout), dualkv.receipt(model, packed.layout):
        logits = framework(packed.input_ids, packed.position_ids, dualkv_layout=packed.layout)
    logits.square().sum().backward()  # recomputes after the hook is gone
    assert torch.equal(logits, expected)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    with pytest.raises(ValueError, match="dualkv_layout="):
        framework(packed.input_ids, packed.position_ids)


def test_inject_can_change_its_layout_and_is_removed_on_errors() -> None:
    model, first, second = model_of("llama", "dualkv"), packed_batch(), packed_batch("shared")
    injection = dualkv.inject(model)
    for packed in (first, second):
        injection.layout = packed.layout
        expected = _logits(model_of("llama", "dualkv"), packed, dualkv_layout=packed.layout)
        assert torch.equal(_logits(model, packed), expected)
    with pytest.raises(ValueError, match="with another layout"):
        _logits(model, first, dualkv_layout=first.layout)
    injection.layout = None
    ids = first.input_ids[:, :4]
    assert model(input_ids=ids).logits.shape == (1, 4, 67)
    injection.remove()
    injection.remove()
    with pytest.raises(ZeroDivisionError), dualkv.inject(model, first.layout):
        raise ZeroDivisionError
    assert not model.model._forward_pre_hooks


def test_inject_needs_a_backbone_that_passes_kwargs() -> None:
    with pytest.raises(TypeError, match=r"backbone must pass \*\*kwargs on to its layers, Linear"):
        dualkv.inject(torch.nn.Linear(2, 2))


def test_inject_refuses_other_layouts_at_once() -> None:
    model, other = model_of("llama", "dualkv"), 5
    with pytest.raises(TypeError, match="layout must be a SharedPromptLayout or None, got int"):
        dualkv.inject(model, other)  # type: ignore[arg-type]
    assert not model.model._forward_pre_hooks
    injection = dualkv.inject(model)
    with pytest.raises(TypeError, match="layout must be a SharedPromptLayout or None, got int"):
        injection.layout = other
    assert injection.layout is None


# wrap


def _registered_functions() -> dict[str, Any]:
    return {name: AttentionInterface._global_mapping[name] for name in ("sdpa", "flash_attention_2")}


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2"])
def test_wrapped_names_take_layouts(name: str) -> None:
    model, expected = model_of("mistral", "eager"), row_log_probs(model_of("mistral"))
    model.config._attn_implementation_internal = name  # FlashAttention-2 itself would want a GPU here
    before = _registered_functions()
    with dualkv.wrap((name,)):
        _assert_equal_rows(packed_log_probs(model, packed_batch()), expected)
    assert _registered_functions() == before


def test_wrapped_sdpa_leaves_other_calls_alone() -> None:
    packed, plain, shared = packed_batch(), model_of("qwen3", "sdpa"), model_of("qwen3", "sdpa", seed=1)
    ids = torch.randint(3, 67, (2, 7))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    expected = plain(input_ids=ids, attention_mask=mask).logits
    rows = row_log_probs(shared)
    with dualkv.wrap():  # two models in one process, one with layouts
        _assert_equal_rows(packed_log_probs(shared, packed), rows)
        assert torch.equal(plain(input_ids=ids, attention_mask=mask).logits, expected)
    assert torch.equal(plain(input_ids=ids, attention_mask=mask).logits, expected)
    # Positions alone make transformers build a T x T mask for sdpa, which a pack refuses.
    with dualkv.wrap(), pytest.raises(NotImplementedError, match="takes no attention_mask other than ones"):
        _logits(shared, packed, dualkv_layout=packed.layout)


def test_wrap_restores_after_errors_nesting_and_new_registrations() -> None:
    before = _registered_functions()
    with pytest.raises(ZeroDivisionError), dualkv.wrap():
        raise ZeroDivisionError
    assert _registered_functions() == before
    outer, inner = dualkv.wrap(("sdpa",)), dualkv.wrap(("sdpa", "flash_attention_2"))
    assert _registered_functions()["sdpa"].original is before["sdpa"]  # one dispatcher, however often wrapped
    outer.restore()
    outer.restore()
    assert _registered_functions()["sdpa"] is not before["sdpa"]  # the inner one still needs it
    inner.restore()
    assert _registered_functions() == before
    wrapping = dualkv.wrap(("sdpa",))
    AttentionInterface.register("sdpa", len)
    try:
        wrapping.restore()
        assert _registered_functions()["sdpa"] is len  # somebody else's registration stays
    finally:
        AttentionInterface.register("sdpa", before["sdpa"])


@pytest.mark.parametrize("names", [(), ("eager",), ("sdpa", "no_such"), "sdpa"])
def test_wrap_refuses_names_that_are_not_registered(names: Any) -> None:
    before = _registered_functions()
    with pytest.raises(ValueError, match="names must be registered attention implementations"):
        dualkv.wrap(names)
    assert _registered_functions() == before


# Registration and checkpoints


def test_register_twice_and_under_another_name() -> None:
    assert dualkv.register() == dualkv.register() == "dualkv"
    name = dualkv.register("shared_prompts")
    try:
        model = model_of("llama", name)
        _assert_equal_rows(packed_log_probs(model, packed_batch()), row_log_probs(model_of("llama")))
    finally:
        dualkv.unregister(name)
    assert name not in AttentionInterface._global_mapping


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dualkv_flash", 'without "flash"'),
        ("paged|dualkv", 'without "flash" and "|"'),
        ("eager", "new name"),
        ("sdpa", "'sdpa' is already registered"),
    ],
)
def test_register_refuses_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        dualkv.register(name)


def test_saved_models_do_not_name_the_attention(tmp_path: Path) -> None:
    model = model_of("llama", "dualkv")
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "dualkv" not in text and "attn_implementation" not in json.loads(text)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="dualkv")
    assert loaded.config._attn_implementation == "dualkv"
    _assert_equal_rows(packed_log_probs(loaded.eval(), packed_batch()), row_log_probs(model_of("llama")))
    dualkv.unregister()
    elsewhere = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert elsewhere.config._attn_implementation == "sdpa"
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(elsewhere(input_ids=ids).logits, model_of("llama")(input_ids=ids).logits)


def test_importing_the_package_imports_no_framework() -> None:
    code = "import sys, flash_attn.integrations; print('transformers' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
