"""Three steps of two mini-batches by real workers: the plug-in's equal those of veRL's own engine."""

from __future__ import annotations

import pytest
import torch
from compare import LENS, OTHER, assert_same, assert_shared, run
from tiny import log_probs, make_batch, make_worker, model_path, update

SIX = [(20, [5, 9, 1, 7, 6, 2]), (13, [8, 3, 6, 12, 4, 4])]
DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 60, "infer_max_token_len_per_gpu": 70}
EIGHT = {"micro_batch_size_per_gpu": 8, "infer_micro_batch_size_per_gpu": 8}
ONE = {"micro_batch_size_per_gpu": 1, "infer_micro_batch_size_per_gpu": 1}
FUSED = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}

CASES = {
    "a group per micro-batch": {},
    "several groups per micro-batch": {"engine": EIGHT},
    "a group over micro-batches": {"lens": (SIX, SIX, SIX), "num_mini_batches": 1},
    "shuffled rows": {"batch": {"shuffle": True}, "engine": EIGHT},
    "dynamic batches": {"engine": DYNAMIC, "batch": {"shuffle": True}},
    "temperature": {"batch": {"temperature": 0.7}},
    "temperature per row": {"batch": {"temperature": torch.linspace(0.5, 1.5, 16)}, "engine": EIGHT},
    "gradient checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    "fused kernels": {"model": FUSED, "batch": {"temperature": 0.8}},
    "padding to a bucket": {"num_steps": 2, "engine": {"pad_to_length": True, "pad_to_length_bucket": 16}},
    "mixture of experts": {"kind": "qwen3_moe"},
    # transformers' eager attention of gpt_oss takes packed rows for one: row by row it is right.
    "sinks and windows": {"kind": "sinks", "num_steps": 2, "oracle": ("eager", ONE)},
    "LoRA": {"num_steps": 2, "model": {"lora_rank": 4, "lora_alpha": 8}},
    "loss per sequence": {
        "num_steps": 2, "actor": {"loss_agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.1},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_updates_equal_those_of_the_plain_engine(case, folder):
    options = dict(CASES[case])
    attention, engine = options.pop("oracle", ("sdpa", options.get("engine")))
    plain = run(attention, folder, **{**options, "engine": engine})
    shared = run("dualkv", folder, **options)
    assert_shared(shared)
    assert_same(plain, shared)


def test_dynamic_batches_count_packed_tokens(folder):
    """A budget of one group's packed tokens, which its replicated rows exceed: one forward a group."""
    lens = [(40, [5] * 4), (40, [5] * 4)]
    worker = make_worker(
        model_path(folder), engine={**DYNAMIC, "max_token_len_per_gpu": 63, "infer_max_token_len_per_gpu": 63}
    )
    batch = make_batch(lens)
    forwards = []
    worker.engine.module.register_forward_hook(lambda *_: forwards.append(1))
    log_probs(worker, batch)
    assert len(forwards) == 2  # 39 + 4 * 6 = 63 packed tokens each; 4 * 45 = 180 replicated
    assert worker.engine.sharing.num_packed_tokens == 126


def test_rows_alone_and_empty_prompts_of_one_token(folder):
    """Nothing to share: the packs are the rows, said once, and the numbers are still right."""
    lens = [(p, [r]) for p, r in ((20, 5), (1, 9), (13, 1), (7, 7))]
    options = {"lens": (lens,), "num_steps": 1, "num_mini_batches": 1}
    plain, shared = (run(attention, folder, **options) for attention in ("sdpa", "dualkv"))
    assert_same(plain, shared)
    assert shared.sharing.num_packed_tokens == shared.sharing.num_replicated_tokens


def test_outputs_of_prompts_are_those_of_the_plain_engine(folder):
    """veRL's log-probs cover prompts too; all but each row's last token mean something."""
    from verl.utils import tensordict_utils as tu

    batch = make_batch(LENS, shuffle=True)
    found = []
    for attention in ("sdpa", "dualkv"):
        data = batch.copy()
        tu.assign_non_tensor(data, calculate_entropy=True, calculate_sum_pi_squared=True, compute_loss=False)
        out = make_worker(model_path(folder), attention).infer_batch(data)
        found.append({name: [row[:-1] for row in out[name].unbind()] for name in ("log_probs", "entropy")})
        found[-1]["sum_pi_squared"] = list(out["sum_pi_squared"].unbind())
    for name, rows in found[0].items():
        for a, b in zip(rows, found[1][name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_bf16_is_as_near_to_fp32_as_the_plain_engine(folder):
    """veRL's default precision: weights gathered in bf16, autocast, gradients reduced in fp32."""
    precision = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    options = {"num_steps": 1, "num_mini_batches": 1, "engine": {**EIGHT, "mixed_precision": precision}}
    exact = run("sdpa", folder, num_steps=1, num_mini_batches=1, engine=EIGHT)
    plain, shared = (run(attention, folder, **options) for attention in ("sdpa", "dualkv"))
    for name in ("log_probs", "entropies"):
        low, ours, high = (getattr(r, name)[0].double() for r in (plain, shared, exact))
        assert (low - high).norm() > 1e-3 * high.norm()  # it did run in bf16
        assert (ours - high).norm() <= 1.5 * (low - high).norm()
    low, ours, high = (r.metrics[0]["grad_norm"][0] for r in (plain, shared, exact))
    assert abs(ours - high) <= 2 * abs(low - high) + 0.01 * high


def test_a_batch_may_be_used_again(folder):
    """The plan stays out of the caller's batch: static batches stay static."""
    from verl.utils import tensordict_utils as tu

    worker, batch = make_worker(model_path(folder)), make_batch(LENS)
    tu.assign_non_tensor(batch, calculate_entropy=False, compute_loss=False)
    first, second = (worker.infer_batch(batch)["log_probs"].values() for _ in range(2))
    assert torch.equal(first, second)
    assert tu.get(batch, "use_dynamic_bsz") is False and "shared_prompt_plan" not in batch.keys()  # noqa: SIM118


def test_two_epochs_over_shuffled_mini_batches(folder):
    settings = {"epochs": 2, "dataloader_kwargs": {"shuffle": True}}
    options = {"settings": settings, "num_steps": 1, "engine": EIGHT, "lens": (OTHER,)}
    plain, shared = (run(attention, folder, **options) for attention in ("sdpa", "dualkv"))
    assert len(shared.metrics[0]["loss"]) == 4
    assert_same(plain, shared)


def test_a_wrong_pack_is_seen_by_the_comparison(folder, monkeypatch):
    """The test of the tests: one row's prompt in the wrong group changes every number compared."""
    from flash_attn.integrations._verl_batch import HostRows

    honest = HostRows.pack

    def wrong(self, rows):
        packed = honest(self, rows)
        packed.input_ids[3] = (packed.input_ids[3] + 1) % 60
        return packed

    plain = run("sdpa", folder, num_steps=1)
    monkeypatch.setattr(HostRows, "pack", wrong)
    shared = run("dualkv", folder, num_steps=1)
    with pytest.raises(AssertionError):
        assert_same(plain, shared)


def test_the_worker_is_reusable_after_an_error(folder):
    """A micro-batch that fails leaves neither layout nor hook behind."""
    worker = make_worker(model_path(folder))
    batch = make_batch(LENS)
    good, _ = log_probs(worker, batch)
    batch["old_log_probs"] = batch["ref_log_prob"] = good
    loss_fn = worker.loss_fn
    worker.set_loss_fn(lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        update(worker, batch)
    worker.set_loss_fn(loss_fn)
    again, _ = log_probs(worker, batch)
    assert torch.equal(good.values(), again.values())
