"""What would give wrong numbers is refused by name: models before any forward, arguments at the call."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers_models import config_of, gradients, model_of, packed_batch, packed_log_probs, row_log_probs

from flash_attn.integrations import transformers as dualkv
from flash_attn.integrations._transformers_attention import dualkv_attention
from flash_attn.integrations._transformers_masks import dualkv_mask
from flash_attn.shared_prompt import SharedPromptLayout, pack


@pytest.fixture(autouse=True)
def _registered() -> None:
    dualkv.register()


# Models: (kind, changes, reason). Older releases have no layer_types for some, whose modules then tell, and
# attention of their own, outside the interface, for others.
OWN_ATTENTION = "2 layers, but 0 modules that use the attention interface"
LINEAR = r"layer type '(linear_attention|mamba)' is not|mix outside attention|mixes rows|no attention heads"
MAMBA2 = {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1}
LLAMA4 = {"num_local_experts": 2, "layer_types": ["chunked_attention", "full_attention"]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_next", {"num_hidden_layers": 4}, "layer type 'linear_attention' is not supported"),
    ("qwen3_5_text", {"num_hidden_layers": 4}, "layer type 'linear_attention' is not supported"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layer type 'conv' is not supported"),
    ("mamba2", MAMBA2, LINEAR),
    ("mamba", {}, LINEAR),
    ("falcon_h1", {}, "layer type 'hybrid' is not supported|mix outside attention|mixes rows"),
    ("llama4_text", LLAMA4, "layer type 'chunked_attention' is not supported"),
    ("rwkv", {"attention_hidden_size": 32}, LINEAR),
    ("bloom", {"n_head": 4, "n_layer": 2}, OWN_ATTENTION),
    ("stablelm", {}, "StableLmDecoderLayer does not pass keyword arguments on to self_attn"),
    ("nemotron", {}, f"NemotronDecoderLayer does not pass keyword arguments on to self_attn|{OWN_ATTENTION}"),
    ("phimoe", {"sliding_window": 6}, "PhimoeAttention has a sliding window but does not tell attention"),
    ("moshi", {}, rf"MoshiAttention has a sliding window but does not tell|on to layers\[\]|{OWN_ATTENTION}"),
    ("bert", {}, "only causal attention"),
    ("t5", {}, "encoder-decoder models are not supported"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), REFUSED, ids=[r[0] for r in REFUSED])
def test_models_are_refused_before_any_forward(kind: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        dualkv.require_supported(config_of(kind, **changes), training=False)


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2", "mamba2", "llama4_text"])
def test_packed_forward_refuses_models_without_running_them(kind: str) -> None:
    changes = next(c for k, c, _ in REFUSED if k == kind)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config_of(kind, **changes))
    ran = []
    model.register_forward_pre_hook(lambda *args: ran.append(args))
    with pytest.raises(NotImplementedError, match=r"is not supported|mixes rows|mix outside"):
        dualkv.packed_forward(model, packed_batch())
    assert not ran


def test_supported_models_pass_as_config_and_as_wrapped_models() -> None:
    for kind in ("llama", "gemma4_text", "gpt2", "deepseek_v3"):
        dualkv.require_supported(config_of(kind))
    model = model_of("llama")
    dualkv.require_supported(model.train())
    dualkv.require_supported(model.model)


def test_tested_versions_hold_the_oldest_that_pip_takes_and_the_pinned_one() -> None:
    root = Path(__file__).resolve().parents[1]
    oldest = re.search(
        r'^transformers = \["transformers>=([\d.]+)"\]', (root / "pyproject.toml").read_text(), re.M
    )
    pinned = re.search(r"^transformers==([\d.]+)$", (root / "requirements" / "pins.txt").read_text(), re.M)
    assert oldest and pinned
    assert (dualkv.TESTED_VERSIONS[0], dualkv.TESTED_VERSIONS[-1]) == (oldest[1], pinned[1])


def test_unknown_layer_types_and_other_objects_are_refused() -> None:
    config = config_of("qwen3")
    config.layer_types = ["full_attention", "holographic_attention"]
    with pytest.raises(NotImplementedError, match="layer type 'holographic_attention' is not supported"):
        dualkv.require_supported(config)
    with pytest.raises(TypeError, match="must be a transformers model or config, got Linear"):
        dualkv.require_supported(torch.nn.Linear(2, 2))
    config = config_of("qwen3")
    config.is_causal = False
    with pytest.raises(NotImplementedError, match="only causal attention"):
        dualkv.require_supported(config)


def test_attention_dropout_is_refused_in_training_only() -> None:
    config = config_of("llama", attention_dropout=0.1)
    with pytest.raises(NotImplementedError, match=r"attention_dropout=0\.1"):
        dualkv.require_supported(config)
    dualkv.require_supported(config, training=False)
    model = model_of("llama", "dualkv", attention_dropout=0.1)
    packed_log_probs(model, packed_batch())
    with pytest.raises(NotImplementedError, match="attention dropout is not supported"):
        packed_log_probs(model.train(), packed_batch())
    with pytest.raises(NotImplementedError, match=r"attention dropout is not supported, got dropout=0\.1"):
        model(input_ids=torch.tensor([[3, 4, 5]]))


def test_reentrant_checkpointing_with_shared_keys_is_refused() -> None:
    model = model_of("gemma4_text", "dualkv").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(NotImplementedError, match="reentrant gradient checkpointing loses gradients"):
        packed_log_probs(model, packed_batch())


# Rotary embeddings that look at the longest position (16 tokens is the switch)
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, "factor": 4.0,
        "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "lengths", "accepted"),
    [
        (LONG, ((9, 4), (9, 7)), True),  # all short
        (LONG, ((9, 8), (9, 12)), True),  # all long
        (LONG, ((9, 4), (9, 12)), False),
        (DYNAMIC, ((9, 4), (9, 7)), True),
        (DYNAMIC, ((9, 8), (9, 12)), False),
    ],
)
def test_length_dependent_rope_per_pack(
    rope: dict[str, Any], lengths: tuple[tuple[int, int], ...], accepted: bool
) -> None:
    limit = 16 if rope is DYNAMIC else 64
    model = model_of("llama", "dualkv", rope_parameters=dict(rope), max_position_embeddings=limit)
    rows = tuple((list(range(3, 3 + p)), list(range(20, 20 + r))) for p, r in lengths)
    if not accepted:
        with pytest.raises(
            NotImplementedError, match=f"rope_type '{rope['rope_type']}' changes its frequencies"
        ):
            packed_log_probs(model, packed_batch(rows=rows))
        packed = packed_batch(rows=rows)
        with pytest.raises(NotImplementedError, match="changes its frequencies beyond 16 tokens"):
            model(input_ids=packed.input_ids, position_ids=packed.position_ids, dualkv_layout=packed.layout)
        return
    found = packed_log_probs(model, packed_batch(rows=rows))
    model.set_attn_implementation("eager")
    for x, y in zip(found, row_log_probs(model, rows), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_a_layout_that_takes_over_other_lengths_is_checked_again() -> None:
    model = model_of("llama", "dualkv", rope_parameters=dict(LONG), max_position_embeddings=64)

    def batch(*response_lens: int) -> Any:
        rows = tuple((list(range(3, 12)), list(range(20, 20 + r))) for r in response_lens)
        return packed_batch(rows=rows, max_segments=4, max_total=40)

    packed = batch(4, 7)
    inputs = {"input_ids": packed.input_ids, "position_ids": packed.position_ids}
    model(**inputs, dualkv_layout=packed.layout)
    packed.layout.copy_(batch(4, 12).layout)
    with pytest.raises(NotImplementedError, match="changes its frequencies beyond 16 tokens"):
        model(**inputs, dualkv_layout=packed.layout)


@pytest.mark.parametrize("rope_type", ["llama3", "yarn", "linear"])
def test_static_rope_scaling_equals_rows(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    if rope_type == "llama3":
        rope.update(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
    if rope_type == "yarn":
        rope.update(original_max_position_embeddings=64)
    model = model_of("llama", "dualkv", rope_parameters=rope)
    found = packed_log_probs(model, packed_batch())
    model.set_attn_implementation("eager")
    for x, y in zip(found, row_log_probs(model), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


# Arguments of the attention function
def _module(**config: Any) -> Any:
    module = torch.nn.Module()
    module.config, module.is_causal, module.layer_idx = SimpleNamespace(**config), True, 0
    return module


def _call(
    module: Any = None, mask: Any = None, q_len: int = 6, k_len: int = 6, rows: int = 1, **kwargs: Any
) -> Any:
    q, k, v = torch.randn(rows, 4, q_len, 8), torch.randn(rows, 2, k_len, 8), torch.randn(rows, 2, k_len, 8)
    return dualkv_attention(module or _module(), q, k, v, mask, **kwargs)


LAYOUT = SharedPromptLayout.from_lengths([3], [[1, 1]])  # 2 + 2 + 2 rows


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dropout": 0.1}, "attention dropout is not supported, got dropout=0.1"),
        ({"output_attentions": True}, "output_attentions is not supported"),
        ({"head_mask": torch.ones(4)}, "head_mask is not supported: head masks"),
        ({"layer_head_mask": torch.ones(4)}, "layer_head_mask is not supported: head masks"),
        (
            {"position_bias": torch.ones(1, 4, 6, 6)},
            "position_bias is not supported: additive position biases",
        ),
        ({"alibi": torch.ones(4)}, "alibi is not supported: additive position biases"),
        ({"cache": object()}, "cache is not supported: paged caches"),
        ({"block_table": torch.zeros(1, 1)}, "block_table is not supported: paged caches"),
        ({"encoder_hidden_states": torch.ones(1)}, "encoder_hidden_states is not supported: cross attention"),
        ({"indices": torch.ones(1)}, "indices is not supported: sparse attention"),
        ({"block_indices": torch.ones(1)}, "block_indices is not supported: sparse attention"),
        ({"temperature_per_head": 2.0}, "does not know the argument 'temperature_per_head'"),
        ({"mask": torch.zeros(1, 1, 6, 6)}, r"2-D padding masks, got attention_mask Tensor \[1, 1, 6, 6\]"),
        ({"mask": object()}, "2-D padding masks, got attention_mask object"),
        ({"module": _module(is_encoder_decoder=True)}, "encoder-decoder models are not supported"),
        ({"module": _module(output_attentions=True)}, "output_attentions is not supported"),
        ({"is_causal": False, "q_len": 3}, "cross attention is not supported: 3 queries, 6 keys"),
        ({"is_causal": False, "sliding_window": 3}, "sliding windows of modules that are not causal"),
        ({"module": _module(sliding_window=3)}, "has a sliding window but does not tell attention its size"),
        ({"module": _module(layer_types=["sliding_attention"])}, "does not tell attention its size"),
        ({"mask": torch.tensor([[1, 0, 1, 1, 1, 1]]), "sliding_window": 3}, "attention_mask with holes"),
        ({"dualkv_layout": LAYOUT, "is_causal": False}, "a shared-prompt pack needs causal attention"),
        ({"dualkv_layout": LAYOUT, "mask": torch.ones(1, 6)}, "takes no attention_mask other than ones"),
        ({"dualkv_layout": LAYOUT, "mask": object()}, "takes no attention_mask other than ones"),
        ({"dualkv_layout": LAYOUT, "output_router_logits": True}, "auxiliary loss of a shared-prompt pack"),
        (
            {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "k_len": 8},
            "packed sequences .* need all queries",
        ),
    ],
)
def test_unsupported_arguments_are_refused_by_name(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        _call(**kwargs)


CU = torch.tensor([0, 2, 6], dtype=torch.int32)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"sliding_window": 0}, ValueError, "sliding_window must be at least 1"),
        ({"mask": torch.ones(1, 5)}, ValueError, r"attention_mask must be \(1, 6 to 6 keys\), got \[1, 5\]"),
        ({"mask": torch.ones(2, 6)}, ValueError, r"attention_mask must be \(1, 6 to 6 keys\)"),
        ({"mask": torch.ones(1, 6), "cu_seq_lens_q": CU}, ValueError, "without a padding mask, got both"),
        ({"cu_seq_lens_q": CU}, ValueError, "cu_seq_lens_q and cu_seq_lens_k must be given together"),
        (
            {"position_ids": torch.tensor([[0, 1, 2, 1, 2, 3]])},
            ValueError,
            "must be passed with dualkv_layout=",
        ),
        ({"dualkv_layout": LAYOUT, "k_len": 8}, ValueError, "one row without cached keys"),
        ({"dualkv_layout": LAYOUT, "rows": 2}, ValueError, "one row without cached keys"),
        ({"dualkv_layout": LAYOUT, "cu_seq_lens_q": CU}, ValueError, "must come without cu_seq_lens_q"),
        (
            {"dualkv_layout": LAYOUT, "q_len": 7, "k_len": 7},
            ValueError,
            "must describe the pack's 7 tokens, got a layout of 6 rows",
        ),
        (
            {"dualkv_layout": LAYOUT, "q_len": 5, "k_len": 5},
            ValueError,
            "must describe the pack's 5 tokens, got a layout of 6 rows",
        ),
        ({"dualkv_layout": (3, 1, 1)}, TypeError, "must be a SharedPromptLayout, got tuple"),
    ],
)
def test_wrong_arguments(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _call(**kwargs)


def test_arguments_that_change_nothing_are_accepted() -> None:
    torch.manual_seed(1)
    plain, _ = _call()
    torch.manual_seed(1)
    other, probabilities = _call(
        use_cache=True, output_attentions=False, head_mask=None, position_bias=None, softcap=None,
        num_items_in_batch=torch.tensor(3), output_router_logits=False, sliding_window=None,
    )  # fmt: skip
    assert torch.equal(plain, other) and probabilities is None


# Masks
def _blocks(*args: Any) -> Any:
    return True


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.chunked_causal_mask_function(4, torch.zeros(1)),
        lambda m: m.or_masks(m.causal_mask_function, m.blockwise_overlay(torch.zeros(1, 6))),
        lambda m: m.and_masks(m.causal_mask_function, _blocks),
        lambda m: m.and_masks(m.causal_mask_function, SimpleNamespace().__init__),
    ],
    ids=["chunked", "blockwise", "own", "method"],
)
def test_mask_patterns_that_tables_cannot_express_are_refused(make: Callable[[Any], Any]) -> None:
    from transformers import masking_utils

    with pytest.raises(NotImplementedError, match="cannot express the mask pattern"):
        dualkv_mask(1, 6, 6, mask_function=make(masking_utils))


def test_router_logits_need_the_weighted_loss() -> None:
    model, packed = model_of("qwen3_moe", "dualkv"), packed_batch()
    kwargs = {"position_ids": packed.position_ids, "use_cache": False, "dualkv_layout": packed.layout}
    with pytest.raises(NotImplementedError, match="the auxiliary loss of a shared-prompt pack would count"):
        model(input_ids=packed.input_ids, output_router_logits=True, **kwargs)
    with pytest.raises(ValueError, match="attention_mask must not be given"):
        dualkv.packed_forward(model, packed, attention_mask=torch.ones_like(packed.input_ids))


def test_labels_that_the_model_would_shift_across_segments_are_refused() -> None:
    model, packed = model_of("llama", "dualkv"), packed_batch()
    with pytest.raises(ValueError, match=r"labels must come with shift_labels=packed\.shift_labels"):
        dualkv.packed_forward(model, packed, labels=packed.input_ids)
    labels = packed.shift_labels
    outputs = dualkv.packed_forward(model, packed, labels=labels, shift_labels=labels)
    wanted = torch.nn.functional.cross_entropy(outputs.logits[0].float(), labels[0])
    torch.testing.assert_close(outputs.loss, wanted)


def test_log_probs_of_batch_refuses_heads_it_does_not_know() -> None:
    model, packed = model_of("llama", "dualkv"), packed_batch()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(NotImplementedError, match=r"must be a plain torch.nn.Linear, got Sequential"):
        dualkv.log_probs_of_batch(model, packed)
    model = model_of("llama", "dualkv")
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.01)
    with pytest.raises(NotImplementedError, match="does more than a linear layer"):
        dualkv.log_probs_of_batch(model, packed)
    assert not gradients(model_of("llama"), [torch.zeros(1, requires_grad=True)])


def test_packs_that_are_none_or_empty_and_arguments_of_ones_own_are_refused_by_name() -> None:
    model, packed = model_of("llama", "dualkv"), packed_batch()
    for call in (dualkv.packed_forward, dualkv.log_probs_of_batch):
        with pytest.raises(TypeError, match=r"packed must be a PackedBatch .*, got dict"):
            call(model, {})
        with pytest.raises(ValueError, match=r"packed must have at least one token, got input_ids \[1, 0\]"):
            call(model, pack([], []))
    with pytest.raises(ValueError, match=r"logits_to_keep must not be given: log_probs_of_batch .*, got 3"):
        dualkv.log_probs_of_batch(model, packed, logits_to_keep=3)
