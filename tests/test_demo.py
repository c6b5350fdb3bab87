"""examples/policy_update.py on a tiny random model: every part, and that a wrong update makes it fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import policy_update  # noqa: E402
from grpo import compare, sampling, tasks, update  # noqa: E402
from grpo.measure import Phases, busy  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model with a byte tokenizer, saved as `--model` wants it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<end>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(alphabet) + 1, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, eos_token_id=len(alphabet), bos_token_id=None,
        )
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(path)
    model.save_pretrained(path)
    return path


@pytest.fixture
def model(folder) -> LlamaForCausalLM:
    return sampling.load_policy(str(folder), torch.float32, torch.device("cpu"))[0]


GROUPS = [
    update.Group(tuple(range(3, 40)), [[1, 2, 3], [4], [5, 6, 7, 8]], [0.0, 1.0, 0.5]),
    update.Group(tuple(range(50, 61)), [[9, 9], [1]], [1.0, 0.0]),
]


def both(model, groups=GROUPS):
    return [update.run_update(name, model, groups, 0.7, quiet=True) for name in update.VARIANTS]


def test_both_updates_are_equal_and_leave_the_model_as_it_was(model):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    replicated, shared = both(model)
    differences = compare.compare(replicated, shared)
    assert differences.log_prob < 1e-5 and differences.gradient < 1e-4
    assert differences.gradient_norm > 0 and differences.num_parameters == len(list(model.parameters()))
    assert compare.problems(GROUPS, differences, compare.TOLERANCES[torch.float32]) == []
    assert replicated.num_tokens == 3 * 37 + 8 + 2 * 11 + 3
    # + 2, + 1: the last prompt token once more per further response.
    assert shared.num_tokens == 37 + 8 + 2 + 11 + 3 + 1
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert list(shared.phases.seconds) == ["old log-probs", "forward + backward", "optimizer step"]
    assert model.config._attn_implementation == "sdpa"


def test_log_probs_and_loss_are_those_of_the_definition(model):
    replicated = both(model)[0]
    group, old = GROUPS[0], torch.cat(replicated.old_log_probs)
    row = torch.tensor([[*group.prompt, *group.responses[0]]])
    logits = model(row).logits[0, len(group.prompt) - 1 : -1] / 0.7
    expected = logits.log_softmax(-1)[torch.arange(3), torch.tensor(group.responses[0])]
    torch.testing.assert_close(old[:3], expected, atol=1e-5, rtol=1e-5)
    advantages = torch.cat([g.advantages() for g in GROUPS])
    lengths = torch.tensor([len(r) for g in GROUPS for r in g.responses])
    assert replicated.loss == pytest.approx(float(-(advantages * lengths).sum() / lengths.sum()), abs=1e-6)


@pytest.mark.parametrize("fault", ["positions", "labels", "gradient"])
def test_a_wrong_shared_update_is_noticed(model, monkeypatch, fault):
    replicated, shared = both(model)
    if fault == "gradient":
        shared.gradients["model.layers.0.self_attn.k_proj.weight"].mul_(1.01)
    else:
        real = update.pack

        def wrong(*arguments, **options):
            packed = real(*arguments, **options)
            (packed.position_ids if fault == "positions" else packed.labels)[..., -2:] += 1
            return packed

        monkeypatch.setattr(update, "pack", wrong)
        shared = update.run_update("shared", model, GROUPS, 0.7, quiet=True)
    found = compare.problems(GROUPS, compare.compare(replicated, shared), compare.TOLERANCES[torch.float32])
    assert any("of shared and replicated differ by" in problem for problem in found)


def test_rewards_that_teach_nothing_are_noticed(model):
    groups = [update.Group(g.prompt, g.responses, [0.5] * len(g.responses)) for g in GROUPS]
    found = compare.problems(groups, compare.compare(*both(model, groups)), compare.TOLERANCES[torch.float32])
    assert "only 0 of 2 groups have unequal rewards" in found[0]
    assert "gradient norm must be above 0, got 0.0" in found[1]


def test_samples_come_from_the_policy_and_end_at_the_end_token(model):
    stop = {256}
    torch.manual_seed(0)
    rows = sampling.sample(model, tuple(range(30)), 64, max_new_tokens=6, temperature=1.0, stop_ids=stop)
    assert len(rows) == 64 and all(1 <= len(row) <= 6 for row in rows)
    assert all(256 not in row[:-1] for row in rows)
    sharp = sampling.sample(model, tuple(range(30)), 2, max_new_tokens=6, temperature=1e-4, stop_ids=stop)
    greedy = torch.tensor([list(range(30))])
    for _ in sharp[0]:
        greedy = torch.cat([greedy, model(greedy).logits[:, -1:].argmax(-1)], 1)
    assert sharp[0] == sharp[1] == greedy[0, 30:].tolist()
    assert sampling.cut([1, 2, 256, 4], stop) == [1, 2, 256]


def test_prompts_and_rewards(folder):
    pytest.importorskip("tabulate", reason="reasoning-gym's dependencies are not installed")
    pytest.importorskip("zss", reason="reasoning-gym's dependencies are not installed")
    tokenizer = sampling.load_policy(str(folder), torch.float32, torch.device("cpu"))[1]
    source = tasks.TaskSource("word_sorting", tokenizer, 2500, 3, seed=1)
    found = source.tasks()
    assert len({task.prompt for task in found}) == 3 and source.num_examples >= 2
    assert all(1500 < len(task.prompt) <= 2500 for task in found)
    answers = [tokenizer.encode(f" {task.entry['answer']}\nmore", add_special_tokens=False) for task in found]
    assert [source.reward(task, answer) for task, answer in zip(found, answers, strict=True)] == [1.0] * 3
    assert source.reward(found[0], tokenizer.encode("nothing of the kind", add_special_tokens=False)) < 0.5
    assert source.reward(found[0], []) < 0.5
    with pytest.raises(ValueError, match=r"task must be one of word_sorting, .*, got 'chess'"):
        tasks.TaskSource("chess", tokenizer, 100, 1, 0)


def run(folder, monkeypatch, tmp_path, *more: str) -> int:
    """The whole program, with a verifier that is easier to please."""
    monkeypatch.setattr(tasks.TaskSource, "reward", lambda self, task, response: float(sum(response) % 3))
    return policy_update.main(
        ["--model", str(folder), "--prompt-length", "900", "--num-responses", "4", "--max-new-tokens", "5",
         "--json", str(tmp_path / "a" / "out.json"), "--plot", str(tmp_path / "b" / "out.png"), *more]
    )  # fmt: skip


def test_the_program_writes_its_figures_and_succeeds(folder, monkeypatch, tmp_path, capsys):
    pytest.importorskip("tabulate", reason="reasoning-gym's dependencies are not installed")
    assert run(folder, monkeypatch, tmp_path) == 0
    output = capsys.readouterr().out
    record = json.loads((tmp_path / "a" / "out.json").read_text())
    shared, replicated = record["variants"]["shared"], record["variants"]["replicated"]
    assert f"{shared['tokens']:,}" in output and shared["tokens"] < replicated["tokens"] / 2
    assert record["case"]["num_responses"] == 4 and len(record["groups"]) == record["case"]["num_groups"]
    assert record["machine"]["cpu"] and record["differences"]["gradient"] < 1e-3
    assert (tmp_path / "b" / "out.png").read_bytes()[:4] == b"\x89PNG"
    assert f"the shared update was {record['speedup']:.1f} times as fast\n" in output


@pytest.mark.parametrize("load", [63.5, 0.0])
def test_a_busy_machine_is_told_before_the_work(folder, monkeypatch, capsys, load):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(policy_update, "load_policy", lambda *_: sys.exit("loads"))
    with pytest.raises(SystemExit, match="loads"):
        policy_update.main(["--model", str(folder)])
    warning = "warning: load average 63.5 for 2 threads: other work distorts the times\n" if load else ""
    assert capsys.readouterr().out == f"{warning}loading the model\n"
    assert busy({"load_average": 2.0, "num_threads": 2}) is None


def test_the_program_fails_where_the_updates_differ(folder, monkeypatch, tmp_path, capsys):
    pytest.importorskip("tabulate", reason="reasoning-gym's dependencies are not installed")
    monkeypatch.setitem(compare.TOLERANCES, torch.float32, compare.Tolerance(0.0, 0.0, 0.0, 0.0))
    assert run(folder, monkeypatch, tmp_path, "--num-groups", "1") == 1
    assert "FAILED: gradient of shared and replicated differ by" in capsys.readouterr().err


def test_the_program_stops_before_the_updates_where_rewards_teach_nothing(
    folder, monkeypatch, tmp_path, capsys
):
    pytest.importorskip("tabulate", reason="reasoning-gym's dependencies are not installed")
    monkeypatch.setattr(policy_update, "run_update", lambda *_: pytest.fail("an update ran"))
    monkeypatch.setattr(policy_update, "reward_problems", lambda groups: ["rewards are equal"])
    assert run(folder, monkeypatch, tmp_path, "--num-groups", "1") == 1
    assert "FAILED: rewards are equal" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-responses", "1"], "--num-responses must be at least 2"),
        (["--num-groups", "0"], "--num-groups must be at least 1, got 0"),
        (["--temperature", "0"], "--temperature must be above 0, got 0.0"),
        (["--task", "chess"], "invalid choice: 'chess'"),
    ],
)
def test_wrong_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        policy_update.parse(arguments)
    assert message in capsys.readouterr().err


def test_a_model_that_is_no_folder_is_refused():
    with pytest.raises(SystemExit, match=r"--model must be a folder .* got 'no/such/model'"):
        policy_update.main(["--model", "no/such/model"])


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"--model must hold a tokenizer beside the model"):
        policy_update.main(["--model", str(tmp_path)])


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_memory_is_that_of_the_phase():
    phases = Phases(torch.device("cpu"))
    with phases.measure("large"):
        torch.ones(40 * 2**18)  # 40 MiB
    with phases.measure("small"):
        torch.ones(2**18)
    assert 35 < phases.peak_mib["large"] < 60
    assert phases.peak_mib["small"] < 20
