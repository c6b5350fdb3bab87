"""What cannot be shared runs as in the parent, with one warning that names the reason; bad input fails
clearly."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from compare import assert_same_logs, assert_shared, run
from tiny import arguments, even_words, make, model_path, prompts, train
from trl import GRPOConfig, GRPOTrainer
from two_processes import parameter_error

from flash_attn.integrations._trl_models import check_fused_forward
from flash_attn.integrations.trl import (
    SharedPromptGRPOTrainer,
    SharedPromptMixin,
    SharedPromptSettings,
    SharedPromptWarning,
)
from flash_attn.shared_prompt import cost_model
from flash_attn.shared_prompt.cost_model import CostModel, GroupLens

EXPENSIVE = CostModel(1.0, 0.0, 0.0, 0.0, call_shared=1e9)


def tiny_trainer(folder, kind="qwen3", cls=SharedPromptGRPOTrainer, **options):
    changes = options.pop("changes", {})
    return make(cls, arguments(folder / "out", GRPOConfig, **changes), model_path(folder, kind), **options)


def rows(num_rows: int = 4, prompt_len: int = 10, response_len: int = 5):
    ids = torch.randint(
        3, 60, (num_rows, prompt_len + response_len), generator=torch.Generator().manual_seed(0)
    )
    ids[:, :prompt_len] = ids[0, :prompt_len]
    return ids, torch.ones_like(ids)


def both_ways(trainer, ids, mask, response_len=5, **options):
    """The override's log-probs and entropies, and the parent's on the same model."""
    arguments = (trainer.model, ids, mask, response_len)
    ours = trainer._get_per_token_logps_and_entropies(*arguments, compute_entropy=True, **options)
    parents = GRPOTrainer._get_per_token_logps_and_entropies(
        trainer, *arguments, compute_entropy=True, **options
    )
    return ours, parents


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("qwen3_next", "layer type 'linear_attention' is not supported"), ("dropout", "attention_dropout=0.1")],
)
def test_a_refused_model_trains_as_with_the_parent(kind, reason, folder):
    changes = {"max_steps": 2, "kind": kind, "disable_dropout": False}
    torch.manual_seed(0)
    _, parent_logs, parent_weights = run("parent", "grpo", folder, **changes)
    with pytest.warns(
        SharedPromptWarning, match="SharedPromptGRPOTrainer runs without shared prompts"
    ) as caught:
        trainer, logs, weights = run("shared", "grpo", folder, **changes)
    ours = [w for w in caught if w.category is SharedPromptWarning]
    assert len(ours) == 1 and reason in str(ours[0].message)
    assert trainer.sharing.num_shared_passes == 0
    assert trainer.sharing.num_fallbacks == 2 * 2 + 2  # policy and reference passes
    assert all(entry["shared_prompt/fallbacks"] == 1 for entry in logs)
    assert_same_logs(parent_logs, logs, 0.0)
    assert parameter_error(parent_weights, weights) == 0


@pytest.mark.parametrize(
    ("options", "extra", "reason"),
    [
        (
            {},
            {"token_type_ids": torch.zeros(4, 15, dtype=torch.int64)},
            r"multimodal inputs \(token_type_ids\)",
        ),
        ({"shared_prompt": SharedPromptSettings(cost_model=EXPENSIVE)}, {}, "sharing does not pay"),
    ],
)
def test_a_pass_that_is_not_shared_names_its_reason(options, extra, reason, folder):
    trainer = tiny_trainer(folder, **options)
    ids, mask = rows()
    if extra:  # the parent passes it on to the tiny model, whose attention says that it does not know it
        unknown = pytest.raises(NotImplementedError, match="does not know the argument 'token_type_ids'")
        with pytest.warns(SharedPromptWarning, match=reason), unknown:
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 5, **extra)
        assert trainer.sharing.num_fallbacks == 1
        return
    with pytest.warns(SharedPromptWarning, match=reason):
        ours, parents = both_ways(trainer, ids, mask)
    assert torch.equal(ours[0], parents[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", SharedPromptWarning)  # the second time only counts
        both_ways(trainer, ids, mask)
    assert trainer.sharing.num_fallbacks == 2


def test_rows_without_a_common_prompt_and_empty_prompts_fall_back(folder):
    trainer = tiny_trainer(folder)
    ids, mask = rows()
    ids[:, 0] = torch.arange(4) + 5
    with pytest.warns(
        SharedPromptWarning, match="no prompt occurs twice in this batch .*multiple of num_generations"
    ):
        ours, parents = both_ways(trainer, ids, mask)
    assert torch.equal(ours[0], parents[0])
    ids, mask = rows()
    mask[1, :10] = 0
    with pytest.warns(SharedPromptWarning, match="a row has an empty prompt"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 5)


def test_prompt_learning_paged_generation_and_compilation_are_refused(folder):
    from peft import PromptTuningConfig

    from flash_attn.integrations._trl_models import refusal

    trainer = tiny_trainer(
        folder, peft_config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    assert "PromptTuningConfig adds virtual tokens" in str(refusal(trainer.model))
    with pytest.warns(
        SharedPromptWarning, match="PromptTuningConfig adds virtual tokens in front of each row"
    ):
        trainer._get_per_token_logps_and_entropies(trainer.model, *rows(), 5)
    for name, reason in (
        ("use_transformers_continuous_batching", "paged attention of its own"),
        ("torch_compile", "every pack would be compiled anew"),
    ):
        trainer = tiny_trainer(folder, changes={name: True})
        with pytest.warns(SharedPromptWarning, match=reason):
            trainer._get_per_token_logps_and_entropies(trainer.model, *rows(), 5)


class RenamedTrainer:
    """As TRL's, had a later version renamed the method or its arguments."""

    def __init__(self, **options):
        raise AssertionError("must be refused before")

    def _get_per_token_logps(self, model, input_ids, attention_mask, logits_to_keep):
        return None


class OtherArgumentsTrainer(RenamedTrainer):
    def _get_per_token_logps_and_entropies(self, model, batch):
        return None


class PassingOnTrainer(RenamedTrainer):
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class CountingTrainer(GRPOTrainer):
    """A user's trainer: passes on whatever arguments there are."""

    num_calls = 0

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.num_calls += 1
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class NamingTrainer(CountingTrainer):
    """Names what TRL passes by position."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, **kwargs
        )


@pytest.mark.parametrize("parent", [CountingTrainer, NamingTrainer])
def test_a_users_trainer_that_passes_arguments_on_is_shared(parent, folder):
    """Its method runs where a batch is not shared, and the results are TRL's."""
    cls = type("Mine", (SharedPromptMixin, parent), {})
    trainer = tiny_trainer(folder, cls=cls)
    ours, _ = both_ways(trainer, *rows())
    assert trainer.num_calls == 0 and trainer.sharing.num_shared_passes == 1
    trainer = tiny_trainer(folder, cls=cls, shared_prompt=SharedPromptSettings(cost_model=EXPENSIVE))
    with pytest.warns(SharedPromptWarning, match="sharing does not pay"):
        fallback, parents = both_ways(trainer, *rows())
    assert trainer.num_calls == 1 and trainer.sharing.num_shared_passes == 0
    for a, b, c in zip(ours[:2], fallback[:2], parents[:2], strict=True):
        assert torch.equal(b, c)
        torch.testing.assert_close(a, c, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("parent", "found"),
    [
        (RenamedTrainer, "has no _get_per_token_logps_and_entropies"),
        (PassingOnTrainer, "has no _get_per_token_logps_and_entropies"),
        (OtherArgumentsTrainer, r"has _get_per_token_logps_and_entropies\(self, model, batch\)"),
    ],
)
def test_a_trl_that_computes_log_probs_otherwise_is_refused(parent, found):
    trainer = type("Shared", (SharedPromptMixin, parent), {})
    with pytest.raises(RuntimeError, match=rf"Shared needs a trainer like that of trl 1.16.*{found}"):
        trainer()


def test_a_trl_whose_models_have_no_fused_head_is_refused():
    with pytest.raises(RuntimeError, match=r"an argument fused_lm_head; that of trl .* does not"):
        check_fused_forward(torch.nn.Linear(2, 2).forward, "SharedPromptDPOTrainer")
    # Wrapped as accelerate wraps forwards for mixed precision: what is inside counts.
    with pytest.raises(RuntimeError, match=r"an argument fused_lm_head; that of trl .* does not"):
        check_fused_forward(convert_outputs_to_fp32(torch.nn.Linear(2, 2).forward), "SharedPromptDPOTrainer")
    fused = convert_outputs_to_fp32(lambda input_ids, fused_lm_head=False: input_ids)
    check_fused_forward(fused, "SharedPromptDPOTrainer")


def test_vision_language_trainers_are_refused_before_their_models_are_looked_at():
    from flash_attn.integrations._trl_models import trainer_refusal

    trainer = SimpleNamespace(_is_vlm=True, args=SimpleNamespace())
    assert trainer_refusal(trainer, []) == "vision-language models take multimodal inputs"
    trainer._is_vlm = False
    assert trainer_refusal(trainer, []) is None


@pytest.mark.parametrize("empty", [[1], [0, 2], [0, 1, 2, 3]])
def test_empty_responses_give_zeros_and_gradients_of_zero(empty, folder):
    trainer = tiny_trainer(folder)
    ids, mask = rows()
    mask[empty, 10:] = 0
    ours, parents = both_ways(trainer, ids, mask)
    assert trainer.sharing.num_shared_passes == 1
    assert (ours[0][empty] == 0).all() and (ours[1][empty] == 0).all()
    torch.testing.assert_close(ours[0], parents[0], atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(ours[1], parents[1], atol=2e-6, rtol=2e-6)
    ours[0].sum().backward()
    if len(empty) == 4:
        assert all((p.grad == 0).all() for p in trainer.model.parameters())


def test_an_over_long_row_is_named_and_still_right(folder):
    trainer = tiny_trainer(folder, shared_prompt=SharedPromptSettings(max_packed_tokens=20))
    ids, mask = rows(prompt_len=30)
    with pytest.warns(
        SharedPromptWarning, match="a row of 35 tokens exceeds max_packed_tokens=20: it runs alone"
    ):
        ours = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 5)
    parents = GRPOTrainer._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, 5)
    torch.testing.assert_close(ours[0], parents[0], atol=2e-6, rtol=2e-6)
    with pytest.raises(ValueError, match="max_packed_tokens must be at least 1, got 0"):
        SharedPromptSettings(max_packed_tokens=0)
    with pytest.raises(TypeError, match=r"must be SharedPromptSettings\(...\) or None, got True"):
        tiny_trainer(folder, shared_prompt=True)


def test_several_reentrant_forwards_under_ddp_are_refused_at_once(folder):
    from flash_attn.integrations._trl_models import check_settings

    settings = SharedPromptSettings(max_packed_tokens=64)
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    args = arguments(folder / "out", GRPOConfig, **reentrant)
    with pytest.raises(ValueError, match="max_packed_tokens=64 with 2 processes must come with"):
        check_settings(settings, args, 2)
    check_settings(settings, args, 1)
    check_settings(settings, arguments(folder / "out", GRPOConfig), 2)
    check_settings(SharedPromptSettings(), args, 2)


def test_a_reward_function_that_raises_loses_no_step(folder):
    """Its error comes out as it is; training goes on from there and equals a run without the accident."""
    calls = []

    def fails_once(completions, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("the verifier is down")
        return even_words(completions)

    trainer = tiny_trainer(folder, reward=fails_once, changes={"max_steps": 2})
    with pytest.raises(RuntimeError, match="the verifier is down"):
        trainer.train()
    assert trainer.state.global_step == 0
    trainer.train()
    assert trainer.state.global_step == 2
    assert_shared(trainer, [])


def test_tool_output_inside_a_response_is_attended_and_not_trained_on(folder):
    """Tokens of the environment (mask 0) between tokens of the model; rows of other lengths."""

    def rollout(texts, trainer):
        generator = torch.Generator().manual_seed(trainer.state.global_step)
        ids = [trainer.processing_class(text)["input_ids"] for text in texts]
        lens = [3 + i % 5 for i in range(len(texts))]
        completions = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in lens]
        masks = [[1, *[0] * (n - 2), 1] for n in lens]
        return {
            "prompt_ids": ids, "completion_ids": completions, "env_mask": masks,
            "logprobs": [[-1.0] * n for n in lens],
        }  # fmt: skip

    changes = {"max_steps": 3, "options": {"rollout_func": rollout}}
    _, parent_logs, parent_weights = run("parent", "grpo", folder, **changes)
    trainer, logs, weights = run("shared", "grpo", folder, **changes)
    assert_shared(trainer, logs)
    assert_same_logs(parent_logs, logs)
    assert parameter_error(parent_weights, weights) <= 1e-4


def test_calibration_decides_from_measured_times(folder, monkeypatch):
    trainer = tiny_trainer(folder)
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    before = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SharedPromptWarning)  # a busy machine does not fit well
        found = trainer.calibrate(max_tokens=256, max_seconds=1.0)
    assert found.unit == "seconds" and trainer._cost_model == found
    assert all(found.cost([GroupLens(40, (9,) * 4)], shared=shared) > 0 for shared in (True, False))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(
        p.grad is None and torch.equal(p, w) for p, w in zip(trainer.model.parameters(), weights, strict=True)
    )
    assert found.fit_error is not None
    noise = random.Random(0)
    monkeypatch.setattr(cost_model, "_timed", lambda *_: 10 ** noise.uniform(-3, 1))
    with pytest.warns(SharedPromptWarning, match="the measured times do not fit a cost model"):
        tiny_trainer(folder).calibrate(max_tokens=256, max_seconds=0.1)
    refused = tiny_trainer(folder, "qwen3_next")
    with pytest.raises(NotImplementedError, match="calibrate needs a model that can share prompts"):
        refused.calibrate()


def test_rows_of_images_are_not_regrouped():
    from flash_attn.integrations._trl_shuffle import regroup

    batches = [{"prompt_ids": torch.zeros(2, 3), "pixel_values": torch.zeros(5, 4)}]
    assert regroup(batches) is batches


def test_regrouping_keeps_every_value_with_its_row():
    from flash_attn.integrations._trl_shuffle import regroup

    prompts_of = [0, 1, 0, 2, 1, 0]
    ids = torch.tensor([[5, p] for p in prompts_of])
    batches = [
        {
            "prompt_ids": ids[b], "prompt_mask": torch.ones_like(ids[b]), "row": torch.arange(6)[b],
            "name": [str(i) for i in range(6)][b], "count": torch.tensor(4), "nothing": None,
        }
        for b in (slice(0, 4), slice(4, 6))
    ]  # fmt: skip
    new = regroup(batches)
    assert [len(b["prompt_ids"]) for b in new] == [4, 2]
    order = torch.cat([b["row"] for b in new]).tolist()
    assert order == [0, 2, 5, 1, 4, 3]
    assert torch.cat([b["prompt_ids"] for b in new]).tolist() == ids[order].tolist()
    assert [name for b in new for name in b["name"]] == [str(i) for i in order]
    assert all(b["count"] == 4 and b["nothing"] is None for b in new)


def test_prompts_of_the_test_data_differ():
    assert len(set(prompts()["prompt"])) == 8
    assert callable(train)
