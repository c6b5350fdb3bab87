"""OpenRLHF's real Actor with shared prompts against its own forward: values, gradients, losses, refusals."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from openrlhf.models import Actor, PolicyLoss
from transformers_models import model_of

from flash_attn.integrations import _openrlhf_actor

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7], [5, 6, 7, 8, 9, 10, 11]]
RESPONSES = [[20, 21, 22], [23], [24, 25, 26, 27], [28, 29], [30, 31, 32]]
ROWS = [(0, 0), (1, 1), (0, 2), (1, 3), (2, 4)]  # prompt and response; the third prompt equals the first


def batch() -> dict[str, torch.Tensor]:
    """Rows as OpenRLHF's experiences have them: right-padded, action_mask one shorter than the rows."""
    rows = [PROMPTS[p] + RESPONSES[r] for p, r in ROWS]
    length = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), length, dtype=torch.int64), torch.zeros(len(rows), length)
    action = torch.zeros(len(rows), length)
    for row, (tokens, (p, _)) in enumerate(zip(rows, ROWS, strict=True)):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
        action[row, len(PROMPTS[p]) : len(tokens)] = 1
    action[2, len(PROMPTS[0]) + 1] = 0  # a token of a tool: attended, not trained on
    return dict(sequences=ids, attention_mask=mask.long(), action_mask=action[:, 1:].long())


def actor_of(kind: str, packing: bool, temperature: float = 0.8, **changes: Any) -> Any:
    actor = Actor(model_of(kind, "sdpa", **changes).train(), temperature=temperature)
    actor.model.config.use_cache = False  # as Actor sets it for models that it loads
    actor.packing_samples = packing
    return actor


def both(kind: str, run: Any, packing: bool = True, **changes: Any) -> tuple[Any, Any, Any]:
    """run(actor, forward) of the parent and with shared prompts, and the sharing actor."""
    parent, shared = (actor_of(kind, packing, **changes) for _ in range(2))
    original = inspect.unwrap(Actor.forward)
    expected = run(parent, lambda *args, **kwargs: original(parent, *args, **kwargs))
    found = run(shared, shared)
    return expected, found, shared


def close(x: Any, y: Any) -> None:
    torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_log_probs_entropy_and_gradients(kind: str, packing: bool) -> None:
    inputs = batch()
    in_loss = inputs["action_mask"].bool()

    def run(actor: Any, forward: Any) -> Any:
        log_probs, output = forward(**inputs, return_output=True, return_entropy=True)
        entropy = output.entropy[:, -in_loss.shape[1] :][in_loss]
        weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
        grads = torch.autograd.grad(
            (log_probs * weights).sum() + 0.3 * entropy.sum(), list(actor.model.parameters())
        )
        return log_probs.detach(), entropy.detach(), grads

    expected, found, actor = both(kind, run, packing)
    close(found, expected)
    assert (found[0] == 0).eq(~in_loss).all()
    counts = actor.sharing
    assert not counts.fallbacks
    assert counts.num_replicated_tokens == int(inputs["attention_mask"].sum())
    # 6 prompt tokens and 2, then each response with the last prompt token before it
    assert counts.num_packed_tokens == 6 + 2 + sum(1 + len(RESPONSES[r]) for _, r in ROWS)


def test_rollout_log_probs_without_gradient() -> None:
    inputs = batch()

    def run(actor: Any, forward: Any) -> Any:
        actor.eval()
        with torch.no_grad():
            return forward(inputs["sequences"], inputs["action_mask"], inputs["attention_mask"])

    expected, found, _ = both("qwen3", run)
    close(found, expected)


def test_policy_loss_and_its_gradients() -> None:
    inputs = batch()
    loss_of = PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.28)
    old = -torch.rand(inputs["action_mask"].shape) * 4
    advantages = torch.randn(inputs["action_mask"].shape, generator=torch.Generator().manual_seed(0))

    def run(actor: Any, forward: Any) -> Any:
        log_probs, _ = forward(**inputs, return_output=True)
        loss = loss_of(log_probs, old, advantages, action_mask=inputs["action_mask"])[0]
        return loss.detach(), torch.autograd.grad(loss, list(actor.model.parameters()))

    expected, found, _ = both("qwen3", run)
    close(found, expected)


def test_auxiliary_loss_of_experts() -> None:
    """Weighed by how often a token stands in the batch. Actor sets output_router_logits."""
    inputs = batch()

    def run(actor: Any, forward: Any) -> Any:
        log_probs, output = forward(**inputs, return_output=True)
        return log_probs.detach(), output.aux_loss.detach()

    expected, found, _ = both("qwen3_moe", run, output_router_logits=True)
    close(found, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    inputs = batch()

    def run(actor: Any, forward: Any) -> Any:
        actor.gradient_checkpointing_enable({"use_reentrant": reentrant})
        log_probs = forward(**inputs)
        log_probs.sum().backward()
        return log_probs.detach(), [p.grad for p in actor.model.parameters()]

    expected, found, _ = both("llama", run)
    close(found, expected)


def test_lora() -> None:
    from peft import LoraConfig, get_peft_model

    inputs = batch()

    def run(actor: Any, forward: Any) -> Any:
        actor.model.enable_input_require_grads()
        torch.manual_seed(0)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        actor.model = get_peft_model(actor.model, lora)
        log_probs = forward(**inputs)
        log_probs.sum().backward()
        return log_probs.detach(), [p.grad for p in actor.model.parameters() if p.requires_grad]

    expected, found, actor = both("qwen3", run)
    close(found, expected)
    assert not actor.sharing.fallbacks


def test_a_deepspeed_engine_is_seen_through() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from flash_attn.integrations._transformers_support import unwrap

    model = model_of("llama")
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    engine.module = model
    assert unwrap(engine) is model


def test_what_is_not_shared_runs_in_the_parents_forward(caplog: pytest.LogCaptureFixture) -> None:
    inputs = batch()

    def log_probs_of_all(actor: Any, forward: Any) -> Any:
        return forward(inputs["sequences"], None, inputs["attention_mask"], return_logprobs=True).detach()

    expected, found, actor = both("llama", log_probs_of_all)
    assert torch.equal(found, expected)
    assert list(actor.sharing.fallbacks) == ["log-probs of all tokens are asked for (no action_mask)"]
    assert caplog.text.count("without shared prompts: log-probs of all tokens") == 1
    assert actor.sharing.take() == dict(packed_tokens=0.0, replicated_tokens=0.0, fallbacks=1.0)
    assert actor.sharing.take()["fallbacks"] == 0.0

    first = inputs["action_mask"].clone()
    inputs["attention_mask"][0, :-4] = 0  # row 0: padding up to its first action
    first[0] = inputs["attention_mask"][0, 1:]

    def without_prompt(actor: Any, forward: Any) -> Any:
        return forward(inputs["sequences"], first, inputs["attention_mask"]).detach()

    expected, found, actor = both("llama", without_prompt)
    assert torch.equal(found, expected)
    assert list(actor.sharing.fallbacks) == ["a row has no token before its first action"]

    actor = actor_of("llama", packing=True, attention_dropout=0.5)
    actor(**batch())
    assert "dropout" in next(iter(actor.sharing.fallbacks))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(ring_attn_group=object()), "ring attention"),
        (dict(pixel_values=torch.zeros(1)), "a model with images"),
    ],
)
def test_reasons(change: dict[str, Any], reason: str) -> None:
    actor, inputs = actor_of("llama", packing=True), batch()
    images = {k: v for k, v in change.items() if k == "pixel_values"}
    tensors = [inputs[name] for name in ("sequences", "action_mask", "attention_mask")]
    found = _openrlhf_actor._pack(actor, *tensors, change.get("ring_attn_group"), images)
    assert found == (None, reason)


def test_a_row_without_actions() -> None:
    inputs = batch()
    inputs["action_mask"][1] = 0

    def run(actor: Any, forward: Any) -> Any:
        return forward(**inputs).detach()

    expected, found, _ = both("llama", run)
    close(found, expected)


def test_another_forward_is_refused() -> None:
    class Changed:
        def forward(self, sequences: Any, mask: Any) -> None: ...

    with pytest.raises(RuntimeError, match=r"must take \['sequences', .*got \['sequences', 'mask'\]"):
        _openrlhf_actor.install(Changed)


def test_a_forward_that_another_decorator_wraps_is_replaced_once() -> None:
    plain = inspect.unwrap(Actor.forward)

    class Other:
        @functools.wraps(plain)
        def forward(self, *args: Any, **kwargs: Any) -> None: ...

    before = Other.forward
    _openrlhf_actor.install(Other)
    once = Other.forward
    assert once is not before
    _openrlhf_actor.install(Other)
    assert Other.forward is once
