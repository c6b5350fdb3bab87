"""The driver: veRL's real PPOTrainer deals whole groups to ranks, and stops where no worker shares."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from flash_attn.integrations._verl_trainer import Row, deal, install, packed_cost, partition, rows_of
from flash_attn.integrations.verl import activate

SETTINGS = {
    "external_lib": "flash_attn.integrations.verl",
    "override_config": {"attn_implementation": "dualkv"},
}


def make_rows(sizes: list[int], seed: int = 0, shuffle: bool = False) -> list[Row]:
    """Groups of these numbers of rows, of random lengths."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rows = [
        Row(f"g{g}", prompt, number(1, 500))
        for g, size in enumerate(sizes)
        for prompt in [number(10, 3000)]
        for _ in range(size)
    ]
    return [rows[i] for i in torch.randperm(len(rows), generator=generator)] if shuffle else rows


def parts_of_groups(rows: list[Row], bins: list[list[int]]) -> dict[str, int]:
    """In how many bins each group lies."""
    return {g: sum(any(rows[i].group == g for i in own) for own in bins) for g in {r.group for r in rows}}


@pytest.mark.parametrize("sizes", [[4] * 8, [8, 4, 4, 8, 4, 4], [6] * 8, [32], [7, 1, 3, 21], [1] * 32])
@pytest.mark.parametrize("num_bins", [1, 2, 4, 8])
def test_deal_keeps_every_row_once_in_bins_of_equal_length(sizes, num_bins):
    rows = make_rows(sizes, shuffle=True)
    rows = rows[: len(rows) // num_bins * num_bins]
    bins = deal(rows, range(len(rows)), num_bins)
    assert sorted(i for own in bins for i in own) == list(range(len(rows)))
    assert {len(own) for own in bins} == {len(rows) // num_bins}
    # At most one group is taken apart per border between bins.
    assert sum(n - 1 for n in parts_of_groups(rows, bins).values()) <= num_bins - 1
    for own in bins:  # rows of a group side by side
        order = [rows[i].group for i in own]
        assert len(set(order)) == 1 + sum(a != b for a, b in itertools.pairwise(order))


def test_deal_balances_the_cost_of_packs():
    rows = make_rows([8] * 64)
    bins = deal(rows, range(len(rows)), 8)
    assert set(parts_of_groups(rows, bins).values()) == {1}

    def cost(own: list[int]) -> float:
        groups: dict[str, list[Row]] = {}
        for i in own:
            groups.setdefault(rows[i].group, []).append(rows[i])
        return sum(map(packed_cost, groups.values()))

    costs = [cost(own) for own in bins]
    assert max(costs) <= 1.1 * sum(costs) / 8
    in_order = [cost(list(range(i, i + 64))) for i in range(0, 512, 64)]
    assert max(costs) < max(in_order)  # the test would not see whether anything is balanced otherwise


def test_cost_counts_the_prompt_once():
    one = packed_cost([Row("g", 1000, 50)])
    four = packed_cost([Row("g", 1000, 50)] * 4)
    assert four < 1.5 * one
    later_turn = Row("g", 1100, 50)  # has a prompt of its own
    assert packed_cost([Row("g", 1000, 50), later_turn]) > 1.9 * one


def test_mini_batches_keep_their_groups_and_their_order():
    rows = make_rows([4] * 16, shuffle=True)
    ranks = partition(rows, num_ranks=2, mini_batch_size=16)
    order = list(dict.fromkeys(row.group for row in rows))
    for m in range(4):
        groups = {rows[i].group for own in ranks for i in own[8 * m : 8 * m + 8]}
        assert groups == set(order[4 * m : 4 * m + 4])
    assert partition(rows, num_ranks=2, mini_batch_size=48) == deal_all(rows, 2)  # no mini-batches fit: one


def deal_all(rows: list[Row], num_ranks: int) -> list[list[int]]:
    order = list(dict.fromkeys(row.group for row in rows))
    return deal(rows, [i for g in order for i, row in enumerate(rows) if row.group == g], num_ranks)


def trainer(num_ranks: int = 2, model: Any = SETTINGS, **actor: Any) -> PPOTrainer:
    """veRL's trainer with what `_balance_batch` reads; building a whole one takes a cluster."""
    activate()
    one = object.__new__(PPOTrainerSync)
    settings = {"strategy": "fsdp2", "ppo_mini_batch_size": 4, "shuffle": False, **actor}
    reference = {"actor": settings, "model": model, "rollout": {"n": 4}}
    one.config = OmegaConf.create({"actor_rollout_ref": reference, "trainer": {"critic_warmup": 0}})
    one.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(num_ranks))})
    one.tokenizer = SimpleNamespace(eos_token_id=1)
    one.use_critic, one.global_steps = False, 1
    return one


def meta(rows: list[Row]) -> KVBatchMeta:
    sessions: dict[str, int] = {}
    keys = []
    for row in rows:
        sessions[row.group] = sessions.get(row.group, -1) + 1
        keys.append(f"id_of_{row.group}_{sessions[row.group]}_0")
    tags = [
        {"prompt_len": r.prompt_len, "response_len": r.response_len, "seq_len": r.prompt_len + r.response_len}
        for r in rows
    ]
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train")


def test_balance_batch_puts_whole_groups_on_ranks():
    rows = make_rows([4] * 8, shuffle=True)
    batch, metrics = meta(rows), {}
    before = dict(zip(batch.keys, batch.tags, strict=True))
    done = trainer()._balance_batch(batch, metrics=metrics)
    assert sorted(done.keys) == sorted(before) and dict(zip(done.keys, done.tags, strict=True)) == before
    found = rows_of(done)
    assert set(parts_of_groups(found, [list(range(16)), list(range(16, 32))]).values()) == {1}
    # Mini-batches take the prompts in the order of the data, each rank its half of them.
    first = {row.group for row in found[:8] + found[16:24]}
    assert first == {f"id_of_{group}" for group in list(dict.fromkeys(row.group for row in rows))[:4]}
    tokens = [sum(sum(row[1:]) for row in found[i : i + 16]) for i in (0, 16)]
    assert metrics["global_seqlen/balanced_max"] == max(tokens)


def test_balance_batch_without_the_plugin_is_verls():
    rows = make_rows([4] * 8, shuffle=True)
    done = trainer(model={})._balance_batch(meta(rows), metrics={})
    plain = PPOTrainer._balance_batch.__wrapped__(trainer(model={}), meta(rows), {})
    assert done.keys == plain.keys
    assert set(parts_of_groups(rows_of(done), [list(range(16)), list(range(16, 32))]).values()) != {1}


def test_installing_twice_wraps_once():
    activate()
    once = PPOTrainer._balance_batch
    install(PPOTrainer)
    assert PPOTrainer._balance_batch is once


def test_a_trainer_that_another_decorator_wraps_is_taken_over():
    class Other:
        @functools.wraps(PPOTrainer._balance_batch.__wrapped__)
        def _balance_batch(self, *args, **kwargs): ...

        def _update_actor(self, *args, **kwargs): ...

    before = Other._balance_batch
    install(Other)
    once = Other._balance_batch
    assert once is not before
    install(Other)
    assert Other._balance_batch is once


@pytest.mark.parametrize(
    ("model", "actor", "match"),
    [
        ({**SETTINGS, "override_config": {}}, {}, r"must come with .*attn_implementation=dualkv, got None"),
        (SETTINGS, {"strategy": "megatron"}, "must be fsdp or fsdp2 for shared prompts, got 'megatron'"),
    ],
)
def test_settings_without_effect_stop_the_driver_before_training(model, actor, match):
    with pytest.raises(ValueError, match=match):
        trainer(model=model, **actor)._balance_batch(meta(make_rows([4] * 8)), metrics={})


def test_shuffle_is_warned_about(caplog):
    trainer(shuffle=True)._balance_batch(meta(make_rows([4] * 8)), metrics={})
    assert "actor.shuffle=True takes the rows of a prompt apart" in caplog.text


def test_keys_of_another_form_are_refused():
    with pytest.raises(ValueError, match="keys must be uid_session_index, got 'abc'"):
        rows_of(KVBatchMeta(keys=["abc"], tags=[{"prompt_len": 1, "response_len": 1}]))


def test_bins_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="members must divide into 3 bins, got 4"):
        deal(make_rows([4]), range(4), 3)


class Workers(SimpleNamespace):
    """Returns the metrics that real workers returned."""

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        return {"metrics": dict(self.metrics)}


@pytest.mark.parametrize("attention", ["dualkv", "sdpa"])
def test_workers_that_do_not_share_stop_the_driver(attention, folder):
    from tiny import log_probs, make_batch, make_worker, model_path, update

    worker = make_worker(model_path(folder), attention)
    batch = make_batch([(9, [3, 4, 2, 5])])
    batch["old_log_probs"] = batch["ref_log_prob"] = log_probs(worker, batch)[0]
    metrics = update(worker, batch, num_mini_batches=1)
    options = {"calculate_entropy": False, "entropy_coeff": 0.0, "ppo_epochs": 1, "data_loader_seed": 0}
    one = trainer(**options)
    one.config.actor_rollout_ref.rollout.temperature = 1.0
    one.actor_rollout_wg = Workers(metrics=metrics, _dispatch_info={"actor": [0]})
    reported: dict[str, Any] = {}
    if attention == "dualkv":
        one._update_actor(meta(make_rows([4])), reported)
        assert reported["actor/shared_prompt/packed_tokens"] == 8 + 14 + 4
        assert reported["actor/shared_prompt/replicated_tokens"] == 36 + 14
        assert reported["actor/shared_prompt/fallbacks"] == 0
    else:
        with pytest.raises(RuntimeError, match="the workers' engines are not its own: their metrics lack"):
            one._update_actor(meta(make_rows([4])), reported)
