"""What cannot be shared runs as in veRL, with its reason; settings without effect raise."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compare import LENS, run
from tensordict import TensorDict
from tiny import log_probs, make_batch, make_worker, model_path, nested, update
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry
from verl.workers.engine import utils as engine_utils
from verl.workers.engine.fsdp import transformer_impl

from flash_attn.integrations import verl as plugin


def test_the_tested_release_is_the_pinned_one():
    pins = Path(__file__).resolve().parents[2] / "requirements" / "verl-no-deps.txt"
    assert f"verl=={plugin.TESTED_VERSIONS[-1]}" in pins.read_text().splitlines()


def without_prompts(batch: TensorDict) -> None:
    del batch["prompts"]


def several_positions(batch: TensorDict) -> None:
    rows = [torch.stack([p] * 3) for p in batch["position_ids"].unbind()]
    batch["position_ids"] = torch.nested.nested_tensor_from_jagged(
        torch.cat(rows, 1), batch["input_ids"].offsets(), jagged_dim=2
    )


REASONS = {
    "distillation (distillation_use_topk)": lambda b: tu.assign_non_tensor(b, distillation_use_topk=True),
    "distillation (distillation_only)": lambda b: tu.assign_non_tensor(b, distillation_only=True),
    "replay of routed experts": lambda b: b.set("routed_experts", torch.zeros(16, 1)),
    "use_remove_padding=False": lambda b: tu.assign_non_tensor(b, use_remove_padding=False),
    "prompts is not a nested tensor of rows": without_prompts,
    "position ids of several dimensions (multimodal)": several_positions,
    "input_ids are not each row's prompt and response": lambda b: b.set(
        "responses", nested([torch.zeros(3, dtype=torch.int64)] * 16)
    ),
    "multimodal inputs": lambda b: tu.assign_non_tensor_stack(
        b, "multi_modal_inputs", [{"pixel_values": torch.zeros(1)}] * 16
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_is_named(reason):
    from flash_attn.integrations._verl_settings import refusal

    batch = make_batch(LENS)
    assert refusal(batch) is None
    REASONS[reason](batch)
    assert refusal(batch) == reason


def test_an_empty_prompt_is_named():
    from flash_attn.integrations._verl_settings import refusal

    batch = make_batch(LENS)
    rows = batch["input_ids"].unbind()
    batch["prompts"] = nested([row[:0] for row in rows])
    batch["responses"] = batch["input_ids"]
    assert refusal(batch) == "a row has an empty prompt"


def test_a_fallback_is_the_plain_engine_counted_and_logged_once(folder, caplog):
    """Rows without padding removed: veRL pads them; numbers, metrics and log say that nothing was shared."""
    batch = make_batch(LENS)
    tu.assign_non_tensor(batch, use_remove_padding=False)
    found = {}
    with caplog.at_level(logging.WARNING):
        for attention in ("sdpa", "dualkv"):
            worker = make_worker(model_path(folder), attention)
            log_probs(worker, make_batch(LENS, seed=1))  # a shared pass before leaves nothing behind
            old, _ = log_probs(worker, batch)
            batch["old_log_probs"] = batch["ref_log_prob"] = old
            found[attention] = old.values(), update(worker, batch)
    torch.testing.assert_close(found["sdpa"][0], found["dualkv"][0], rtol=1e-5, atol=1e-5)
    plain, shared = found["sdpa"][1], found["dualkv"][1]
    assert shared["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert shared["shared_prompt/fallbacks"] == [1.0, 1.0]
    assert shared["shared_prompt/packed_tokens"] == shared["shared_prompt/replicated_tokens"]
    assert worker.engine.sharing.fallbacks == {"use_remove_padding=False": 3}
    text = "veRL's own engine runs without shared prompts: use_remove_padding=False"
    assert caplog.text.count(text) == 1


def test_rotary_frequencies_that_rows_would_choose_otherwise_fall_back(folder):
    """LongRoPE, rows on both sides of the switch in one micro-batch: right, unshared."""
    options = {"kind": "longrope", "num_steps": 1}
    short = run("dualkv", folder, lens=([(9, [3, 4, 2, 5])] * 2,), **options)
    assert not short.sharing.fallbacks
    both = run("dualkv", folder, lens=([(20, [3, 14, 2, 5])] * 2,), **options)
    assert sum(both.sharing.fallbacks.values()) == 3
    assert all("changes its frequencies beyond 26 tokens" in reason for reason in both.sharing.fallbacks)


def test_another_attention_with_the_plugin_named_is_refused(folder):
    with pytest.raises(ValueError, match=r"must come with .*attn_implementation=dualkv, got 'sdpa'"):
        make_worker(model_path(folder), model={"override_config": {"attn_implementation": "sdpa"}})


def test_padded_rows_are_refused(folder):
    with pytest.raises(ValueError, match="use_remove_padding must be True for shared prompts, got False"):
        make_worker(model_path(folder), model={"use_remove_padding": False})


def test_models_that_packs_are_wrong_for_are_refused(folder):
    with pytest.raises(NotImplementedError, match=r"this model cannot share prompts: .*'linear_attention'"):
        make_worker(model_path(folder, "qwen3_next"))


def test_checkpoints_do_not_name_the_attention(folder, tmp_path):
    """They load where "dualkv" is unknown."""
    worker = make_worker(model_path(folder))
    log_probs(worker, make_batch(LENS))
    assert worker.engine.module.config._attn_implementation == "dualkv"
    worker.engine.module.config.save_pretrained(tmp_path)
    assert "dualkv" not in (tmp_path / "config.json").read_text()


def test_an_engine_of_another_model_in_the_process_is_left_alone(folder):
    """A model without the plug-in's settings runs in the plug-in's engine as in veRL's."""
    from flash_attn.integrations._verl_settings import wants_sharing

    worker = make_worker(model_path(folder), "sdpa")
    assert wants_sharing(worker.model_config, worker.engine_config) is False


@pytest.mark.parametrize(
    ("engine", "match"),
    [
        ({"infer_micro_batch_size_per_gpu": 5}, r"micro_batch_size_per_gpu must divide the 16 rows .* got 5"),
        (
            {"use_dynamic_bsz": True, "infer_max_token_len_per_gpu": 30},
            "must hold every row, got 30 for a row of 46 tokens",
        ),
    ],
)
def test_micro_batches_that_cannot_be_are_refused(engine, match, folder):
    with pytest.raises(ValueError, match=match):
        log_probs(make_worker(model_path(folder), engine=engine), make_batch(LENS))


def test_fewer_rows_than_micro_batches_are_refused():
    from flash_attn.integrations._verl_plan import agree

    with pytest.raises(ValueError, match="ranks must have at least 3 rows each for 3 micro-batches, got 2"):
        agree(None, None, 3, 2, None)


def test_a_layer_that_ignores_the_layout_is_seen(folder):
    """Attention switched behind the engine's back raises; it would train on wrong numbers."""
    worker = make_worker(model_path(folder))
    worker.engine.module.config._attn_implementation = "sdpa"
    with pytest.raises(RuntimeError, match="0 of 2 attention layers used the shared-prompt layout"):
        log_probs(worker, make_batch(LENS))


def test_a_release_that_splits_batches_elsewhere_is_seen(folder, monkeypatch):
    """veRL's loop no longer asks our function: not a silent unshared run."""
    worker = make_worker(model_path(folder))
    ours = transformer_impl.prepare_micro_batches
    monkeypatch.setattr(transformer_impl, "prepare_micro_batches", ours.__wrapped__)
    batch = make_batch(LENS)
    tu.assign_non_tensor(batch, max_token_len_per_gpu=1000)
    with pytest.raises(RuntimeError, match="did not run the shared-prompt plan of 4 micro-batches"):
        log_probs(worker, batch)


def test_a_release_that_leaves_micro_batches_out_is_seen(folder, monkeypatch):
    worker = make_worker(model_path(folder))
    ours = transformer_impl.prepare_micro_batches

    def some(data, **options):
        batches, rows = ours(data, **options)
        return batches[:-1], rows[:-1]

    monkeypatch.setattr(transformer_impl, "prepare_micro_batches", some)
    with pytest.raises(RuntimeError, match=r"did not run the shared-prompt plan .*\(1 are left\)"):
        log_probs(worker, make_batch(LENS))


def test_padding_that_the_layout_does_not_hold_is_seen(folder, monkeypatch):
    worker = make_worker(model_path(folder), engine={"pad_to_length": True, "pad_to_length_bucket": 16})
    sizes = iter([3, 5])
    monkeypatch.setattr(worker.engine, "_get_packed_pad_size", lambda length: next(sizes))
    with pytest.raises(RuntimeError, match="veRL padded the pack by 5 rows, the layout holds 3"):
        log_probs(worker, make_batch(LENS))


def test_sequence_parallel_rows_with_padding_are_refused(monkeypatch):
    from flash_attn.integrations import _verl_attention

    monkeypatch.setattr(_verl_attention, "get_ulysses_sequence_parallel_world_size", lambda: 2)
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=r"takes rows without padding .* got attention_mask torch"):
        _verl_attention.ulysses_attention(None, q, q, q, torch.ones(1, 1, 1, 1, 4, dtype=torch.bool))


def test_sequence_parallel_layers_without_positions_are_refused(monkeypatch):
    from flash_attn.integrations import _verl_attention

    monkeypatch.setattr(_verl_attention, "get_ulysses_sequence_parallel_world_size", lambda: 2)
    q = torch.randn(1, 2, 4, 8)
    module = torch.nn.Identity()
    with pytest.raises(NotImplementedError, match="needs position_ids in attention, Identity passes none"):
        _verl_attention.ulysses_attention(module, q, q, q, None)
    # A vision tower is not spread: no exchange, no positions.
    found, _ = _verl_attention.ulysses_attention(module, q, q, q, None, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@functools.wraps(engine_utils.prepare_micro_batches)
def decorated(*args, **kwargs): ...


@pytest.mark.parametrize("other", [lambda data: None, decorated])
def test_another_splitter_of_mini_batches_is_refused(other, monkeypatch):
    monkeypatch.setattr(transformer_impl, "prepare_micro_batches", other)
    with pytest.raises(RuntimeError, match="must split mini-batches by prepare_micro_batches, got <function"):
        plugin.activate()


def test_activating_twice_splits_mini_batches_once():
    plugin.activate()
    once = transformer_impl.prepare_micro_batches
    assert once.__wrapped__ is engine_utils.prepare_micro_batches
    plugin.activate()
    assert transformer_impl.prepare_micro_batches is once


def test_an_engine_that_stands_in_the_way_is_refused(monkeypatch):
    """Another plug-in owns the key that veRL looks up first: an error at import, no silent other engine."""
    taken = {**EngineRegistry._engines["language_model"]["fsdp"], ("cpu", "cpu"): object}
    monkeypatch.setitem(EngineRegistry._engines["language_model"], "fsdp", taken)
    with pytest.raises(AssertionError, match="already"):
        plugin.activate()


def test_the_package_itself_does_not_import_verl():
    code = "import sys, flash_attn, flash_attn.integrations.transformers; print('verl' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
