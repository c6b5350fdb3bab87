"""The training examples end to end on a tiny model: logs, curves, and the two ways equal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import model_path

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def examples():
    sys.path.insert(0, str(ROOT / "examples"))
    yield
    sys.path.remove(str(ROOT / "examples"))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_both_ways_train_alike_and_are_drawn(loss_type, folder, tmp_path, capsys, monkeypatch):
    from grpo.tasks import TaskSource
    from grpo_reasoning_gym import main

    # The tiny model never answers right: another reward, so that there is something to learn.
    monkeypatch.setattr(TaskSource, "reward", lambda self, task, response, credit: sum(response) % 7 / 7)

    common = [
        "--model", model_path(folder), "--out", str(tmp_path), "--steps", "3", "--num-prompts", "2",
        "--quiet", "--num-responses", "4", "--prompt-length", "60", "--max-new-tokens", "24", "--loss-type",
        loss_type, "--seeds", "0", "1", "--learning-rate", "1e-3",
    ]  # fmt: skip
    main(["--shared-prompt", *common])
    main(["--replicated", *common])
    for seed in (0, 1):
        shared, replicated = (
            [
                json.loads(line)
                for line in (tmp_path / f"{v}-{loss_type}-seed{seed}.jsonl").read_text().splitlines()
            ]
            for v in ("shared", "replicated")
        )
        assert shared[0]["run"]["machine"]["backend"] == "cpu" and shared[0]["run"]["loss_type"] == loss_type
        assert [entry["step"] for entry in shared[1:]] == [1, 2, 3]
        for a, b in zip(replicated[1:], shared[1:], strict=True):
            assert b["shared_prompt/fallbacks"] == 0
            assert b["shared_prompt/packed_tokens"] < b["shared_prompt/replicated_tokens"]
            assert "shared_prompt/packed_tokens" not in a
            for name in ("reward", "loss", "grad_norm", "entropy", "num_tokens"):
                assert a[name] == pytest.approx(b[name], abs=1e-5)
            assert sum(b["phases"].values()) == pytest.approx(b["seconds"])
            assert min(b["phases"].values()) > -1e-3 and b["phases"]["policy update"] > 0
            assert b["tokens_per_second"] > 0
        assert any(entry["grad_norm"] > 1e-3 for entry in shared[1:])
    logs = sorted(map(str, tmp_path.glob("*.jsonl")))
    main(["--plot", *logs, "--figure", str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert "times as fast when shared" in capsys.readouterr().out


def test_sampling_behind_the_common_prefix_changes_no_token(folder):
    import torch
    from grpo.sampling import common_prefix, generate_behind_prefix
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path(folder), attn_implementation="sdpa").eval()
    start = list(range(5, 25))
    rows = [[*start, 40, 41], [*start, 40, 42, 43, 44], [*start, 50], [*start, 40, 41]]
    assert common_prefix(rows) == 20 and common_prefix([[1, 2, 3]] * 2) == 2
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": 1, "pad_token_id": 0}
    passed = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: passed.append(args[0].numel())
    )
    found = generate_behind_prefix(model.generate, model, ids, mask, **options)
    hook.remove()
    assert torch.equal(found, model.generate(ids, attention_mask=mask, **options))
    assert passed[:2] == [20, 4 * 4]  # the prefix once, then the padded rests


def test_means_of_the_curves():
    from grpo.curves import Run, running_mean, summary

    assert running_mean([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]
    steps = [
        {"step": i, "reward": float(i), "seconds": 2.0, "phases": {"policy update": 1.0}} for i in range(40)
    ]
    (found,) = summary([Run({"shared": True, "seed": 3}, steps)]).values()
    assert found["first_rewards"] == [4.5] and found["last_rewards"] == [34.5] and found["seeds"] == [3]
    assert found["median_update_seconds"] == 1.0


def test_credit_for_the_right_words_in_any_order():
    from grpo.tasks import common_words

    assert common_words("b, a, c", "a, b, c") == common_words("A b C", "a, b, c") == 1
    assert common_words("a, a, d", "a, b, c") == pytest.approx(1 / 3)
    assert common_words("", "a, b, c") == 0


def test_agreement_of_curves(tmp_path):
    from grpo.curves import Run, agreement, from_json, write_json

    def run(shared, seed, offset):
        steps = [{"step": i, "reward": 0.1 * i + offset, "seconds": 1.0, "phases": {}} for i in range(20)]
        return Run({"shared": shared, "seed": seed, "machine": {"device": "x"}}, steps)

    runs = [run(False, 0, 0.0), run(False, 1, 1.0), run(True, 0, 0.1), run(True, 1, 1.1)]
    assert agreement(runs, "reward") == pytest.approx({"same_seed": 0.1, "other_seed": 1.0, "inside": 1.0})
    assert agreement([*runs[:3], run(True, 1, 2.9)], "reward")["inside"] == 0  # the mean is above both
    assert agreement(runs[:3], "reward") is None
    write_json(runs, tmp_path / "runs.json")
    assert from_json(json.loads((tmp_path / "runs.json").read_text())) == runs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shared-prompt", "--num-responses", "1"], "--num-responses must be at least 2"),
        (["--shared-prompt", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["--replicated", "--temperature", "0"], "--temperature must be above 0"),
        ([], "one of the arguments --shared-prompt --replicated --plot is required"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    from grpo_reasoning_gym import parse

    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_log_is_named(tmp_path):
    from grpo_reasoning_gym import main

    (tmp_path / "x.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(SystemExit, match=r"x\.jsonl is not a log of this example"):
        main(["--plot", str(tmp_path / "x.jsonl")])


def test_a_folder_beside_the_logs_is_passed_over(tmp_path):
    from grpo_reasoning_gym import main

    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(SystemExit, match=r"no \.jsonl file"):
        main(["--plot", str(tmp_path / "checkpoints")])
    (tmp_path / "x.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(SystemExit, match=r"x\.jsonl is not a log"):
        main(["--plot", *map(str, sorted(tmp_path.iterdir()))])


def test_runs_side_by_side_give_one_file(folder, tmp_path):
    """Forks, so in a process of its own: this one has threads."""
    command = [
        sys.executable, str(ROOT / "benchmarks" / "trl_training.py"), "--seeds", "0", "1", "--out",
        str(tmp_path / "runs.json"), "--", "--model", model_path(folder), "--steps", "2",
        "--num-prompts", "1", "--num-responses", "4", "--prompt-length", "60",
        "--max-new-tokens", "4", "--task", "letter_counting:short",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert sorted((run["settings"]["shared"], run["settings"]["seed"]) for run in runs) == [
        (False, 0), (False, 1), (True, 0), (True, 1)
    ]  # fmt: skip
    assert all([step["step"] for step in run["steps"]] == [1, 2] for run in runs)
    assert "replicated 1 done" in done.stdout and "shared 0 done" in done.stdout
    command[command.index("letter_counting:short")] = "nothing"
    failed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert failed.returncode != 0 and "invalid choice: 'nothing'" in failed.stderr


def test_dpo_pairs_are_equal_both_ways(folder, capsys):
    from dpo_pairs import main

    arguments = [
        "--model",
        model_path(folder),
        "--prompt-length",
        "60",
        "--steps",
        "3",
        "--learning-rate",
        "1e-3",
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "losses equal within" in printed and "tokens through the models" in printed


def test_the_update_benchmark_times_both_ways(tmp_path, capsys):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from trl_updates import main

    out = tmp_path / "updates.json"
    earlier = {"case": {"model": "another"}}
    out.write_text(json.dumps([earlier]))
    main([
        "--model", "tiny", "--device", "cpu", "--dtype", "float32", "--prompt-lens", "256",
        "--num-responses", "8", "--response-len", "8", "--providers",
        "shared", "replicated-sdpa", "replicated-flash_attention_2", "--repeats", "1", "--calibrate", "0",
        "--groups", "2", "--max-tokens", "1100", "--out", str(out),
    ])  # fmt: skip
    kept, shared, sdpa, flash = json.loads(out.read_text())
    assert kept == earlier
    assert shared["provider"] == "trl-shared" and shared["time_ms"] > 0 and sdpa["time_ms"] > 0
    assert flash["error"].startswith("ImportError")  # no GPU here, and no time that was not measured
    assert "time_ms" not in flash
    assert shared["verdict"] == "share" and 1 < shared["predicted_speedup"] < 8
    replicated = shared["flops"] * shared["predicted_speedup"]
    assert replicated == pytest.approx(sdpa["flops"], rel=1e-5)  # both have six digits
    assert "of predicted; planner: share" in capsys.readouterr().out
