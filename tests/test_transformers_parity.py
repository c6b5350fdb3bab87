"""Real architectures: a pack gives the log-probs and every parameter gradient of one-row-at-a-time runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers_models import (
    BASE,
    MODELS,
    config_of,
    exact_double,
    gradients,
    model_of,
    packed_batch,
    packed_log_probs,
    relative_errors,
    row_log_probs,
    rows_of_batch,
)

from flash_attn.integrations import transformers as dualkv
from flash_attn.shared_prompt import unpack, unpack_responses

Result = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def _registered() -> None:
    dualkv.register()


def _result(model: Any, log_probs: list[torch.Tensor]) -> Result:
    return [x.detach().double() for x in log_probs], gradients(model, log_probs)


@functools.cache
def _row_results(kind: str) -> tuple[Result, Result]:
    """One row at a time, eager: in fp64 throughout, and in fp32."""
    model = model_of(kind)
    low = _result(model, row_log_probs(model))
    with exact_double():
        model = model.double()
        return _result(model, row_log_probs(model)), low


def _largest(x: list[torch.Tensor], ref: list[torch.Tensor]) -> float:
    return float(torch.cat([(a - b).abs() for a, b in zip(x, ref, strict=True)]).max())  # NaN stays


@pytest.mark.parametrize("boundary", ["fork", "shared"])
@pytest.mark.parametrize("kind", MODELS)
def test_pack_equals_rows_in_fp64(kind: str, boundary: str) -> None:
    model = model_of(kind, "dualkv").double()
    with exact_double():
        log_probs, grads = _result(model, packed_log_probs(model, packed_batch(boundary)))
    (ref_log_probs, ref_grads), _ = _row_results(kind)
    assert [x.shape for x in log_probs] == [x.shape for x in ref_log_probs]
    assert _largest(log_probs, ref_log_probs) < 1e-9
    errors = relative_errors(grads, ref_grads)
    assert max(errors.values()) < 1e-9, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("kind", MODELS)
def test_pack_is_as_exact_as_rows_in_fp32(kind: str) -> None:
    model = model_of(kind, "dualkv")
    log_probs, grads = _result(model, packed_log_probs(model, packed_batch()))
    (ref_log_probs, ref_grads), (low_log_probs, low_grads) = _row_results(kind)
    assert _largest(log_probs, ref_log_probs) <= max(2 * _largest(low_log_probs, ref_log_probs), 1e-6)
    # Averaged over parameters: the largest of two dozen rounding errors is chance (Gemma-4 is
    # ill-conditioned).
    error, low_error = (sum(relative_errors(g, ref_grads).values()) for g in (grads, low_grads))
    assert error <= max(2 * low_error, 1e-5 * len(ref_grads))


@pytest.mark.parametrize("boundary", ["fork", "shared"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi3", "cohere", "granite"])
def test_log_probs_of_batch_uses_the_models_head(kind: str, boundary: str) -> None:
    """Untied, tied with softcap, biased (set below), scaled (cohere), divided (granite) heads; temperature,
    entropy."""
    changes = (
        {"logit_scale": 0.25} if kind == "cohere" else {"logits_scaling": 3.0} if kind == "granite" else {}
    )
    model = model_of(kind, "dualkv", **changes).double()
    if kind == "phi3":
        model.lm_head.bias = torch.nn.Parameter(torch.randn(model.config.vocab_size, dtype=torch.float64))
    packed = packed_batch(boundary)
    found = dualkv.log_probs_of_batch(model, packed, temperature=0.7)
    logits = dualkv.packed_forward(model, packed).logits[0, packed.pred_index] / 0.7
    expected = logits.log_softmax(-1)
    entropy = -(expected.exp() * expected).sum(-1)
    torch.testing.assert_close(found.log_probs, expected.gather(1, packed.labels[:, None])[:, 0])
    torch.testing.assert_close(found.entropy, entropy)
    assert found.aux_loss is None
    ours, theirs = (
        gradients(model, [x])
        for x in (found.log_probs + 0.1 * found.entropy, _at_labels(expected, packed, entropy))
    )
    assert max(relative_errors(ours, theirs).values()) < 1e-6


@pytest.mark.parametrize("how", ["autocast", "bf16 model", "static capacities"])
def test_log_probs_of_batch_in_low_precision_and_static_shapes(how: str) -> None:
    model = model_of("gemma2", "dualkv")
    exact = torch.cat(row_log_probs(model_of("gemma2")))
    capacities = {"max_segments": 20, "max_total": 90} if how == "static capacities" else {}
    packed = packed_batch(**capacities)
    if how == "bf16 model":
        model = model.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        found = dualkv.log_probs_of_batch(model, packed)
    assert found.log_probs.dtype == torch.float32
    log_probs = torch.cat(list(unpack_responses(found.log_probs, packed)))
    assert (log_probs - exact).norm() <= (1e-5 if capacities else 0.05) * exact.norm()


def _at_labels(expected: torch.Tensor, packed: Any, entropy: torch.Tensor) -> torch.Tensor:
    return expected.gather(1, packed.labels[:, None])[:, 0] + 0.1 * entropy


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_auxiliary_loss_is_that_of_the_replicated_batch(kind: str) -> None:
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "mixtral" else {}
    model = model_of(kind, output_router_logits=True, **changes).double()
    # Rows of one length: transformers' own batch then has no padding, which it would route too.
    rows = tuple((p, (r * 6)[:6]) for p, r in rows_of_batch() if len(p) == 9 and r)
    ids = torch.tensor([p + r for p, r in rows])
    expected = model(input_ids=ids, use_cache=False).aux_loss
    expected_grads = _gate_gradients(model, expected)
    model.set_attn_implementation("dualkv")
    packed = packed_batch(rows=rows)
    found = dualkv.log_probs_of_batch(model, packed).aux_loss
    grads = _gate_gradients(model, found)
    unweighted = model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        use_cache=False,
        dualkv_layout=packed.layout,
        dualkv_aux_weighted=True,
    ).aux_loss
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    static = packed_batch(rows=rows, max_segments=20, max_total=100)  # rows behind the batch count 0 times
    torch.testing.assert_close(dualkv.log_probs_of_batch(model, static).aux_loss, expected, rtol=1e-6, atol=0)
    assert abs(float((unweighted - expected).detach())) > 1e-4  # the test sees the weights
    assert max(relative_errors(grads, expected_grads).values()) < 1e-5


def _gate_gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    ("kind", "use_reentrant"),
    [
        ("qwen3", False),
        ("qwen3", True),
        ("gemma3_text", False),
        ("gemma3_text", True),
        ("gemma4_text", False),
    ],
)
def test_gradient_checkpointing_changes_no_bit(kind: str, use_reentrant: bool) -> None:
    model = model_of(kind, "dualkv").train()
    packed = packed_batch()
    plain = gradients(model, packed_log_probs(model, packed))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with _count_calls() as calls:
        log_probs = packed_log_probs(model, packed)
        in_forward = calls[0]
        recomputed = gradients(model, log_probs)
    assert calls[0] == 2 * in_forward  # each layer ran again in backward
    assert all(torch.equal(recomputed[name], plain[name]) for name in plain)


@contextlib.contextmanager
def _count_calls() -> Iterator[list[int]]:
    from flash_attn.integrations import _transformers_attention as attention

    calls, original = [0], attention.flash_attn_shared_prompt_func

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    attention.flash_attn_shared_prompt_func = counted
    try:
        yield calls
    finally:
        attention.flash_attn_shared_prompt_func = original


def test_lora_model_gets_the_gradients_of_rows() -> None:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8, lora_dropout=0.0)
    model = peft.get_peft_model(model_of("qwen3", "dualkv"), config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.train()
    with exact_double():
        grads = gradients(model, packed_log_probs(model, packed_batch()))
        model.base_model.model.set_attn_implementation("eager")
        expected = gradients(model, row_log_probs(model))
    assert expected and all("lora_" in name for name in expected)
    assert max(relative_errors(grads, expected).values()) < 1e-9


def _vision(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {**sizes, "image_size": 8, "patch_size": 4, **changes}


@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3", "llava"])
def test_text_packs_of_multimodal_models(kind: str) -> None:
    """Three-dimensional rotary positions, image masks and other wrappers around a text model; no images."""
    import transformers

    text = {k: v for k, v in BASE.items() if k != "initializer_range"}
    if kind == "qwen2_vl":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        vision = {
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
        }
        config = transformers.Qwen2VLConfig(
            text_config={**text, "rope_parameters": rope}, vision_config=vision
        )
    elif kind == "gemma3":
        text.update(MODELS["gemma3_text"])
        config = transformers.Gemma3Config(text_config=text, vision_config=_vision(), mm_tokens_per_image=4)
    else:
        config = transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**text),
            vision_config=transformers.CLIPVisionConfig(**_vision(projection_dim=16)),
        )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    expected = row_log_probs(model)
    model.set_attn_implementation("dualkv")
    for x, y in zip(packed_log_probs(model, packed_batch()), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_value_heads_of_critics() -> None:
    from transformers import AutoModelForTokenClassification

    packed = packed_batch()
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(
        config_of("qwen2", num_labels=1), attn_implementation="dualkv"
    ).eval()
    values = unpack(dualkv.packed_forward(model, packed).logits[0, :, 0], packed)
    model.set_attn_implementation("eager")
    for (prompt, response), found in zip(rows_of_batch(), values, strict=True):
        expected = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, :, 0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
