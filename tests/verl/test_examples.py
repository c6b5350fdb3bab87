"""Launch scripts give settings that this release of veRL has; the one for CPUs trains both ways alike."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import verl.trainer.config
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "verl"


def overrides(script: str, model: str, folder: Path, **environment: str) -> list[str]:
    """What the script hands to veRL: a program that prints its arguments stands in for Python."""
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    command = ["bash", str(EXAMPLES / script), model, "trainer.total_training_steps=7"]
    settings = {**os.environ, "PYTHON": str(python), **environment}
    text = subprocess.run(command, env=settings, capture_output=True, text=True, check=True).stdout
    flag, module, *rest = text.splitlines()
    assert (flag, module) == ("-m", "verl.trainer.main_ppo")
    return rest


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("script", ["grpo.sh", "dapo.sh"])
def test_launch_scripts_compose_with_and_without_the_plugin(script, model, tmp_path):
    folder = str(Path(verl.trainer.config.__file__).parent)
    found = {}
    for shared in "10":
        given = overrides(script, model, tmp_path, SHARED=shared, NNODES="4")
        with initialize_config_dir(folder, version_base=None):
            config = compose("ppo_trainer", given)
        found[shared] = OmegaConf.to_container(config, resolve=False)
        assert config.trainer.nnodes == 4 and config.trainer.total_training_steps == 7
        assert config.actor_rollout_ref.actor.strategy == "fsdp2"
        assert config.actor_rollout_ref.model.use_remove_padding
        # veRL wants both passes to batch alike.
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        assert actor.use_dynamic_bsz == rollout.log_prob_use_dynamic_bsz is True
    model_settings = found["1"]["actor_rollout_ref"]["model"]
    assert model_settings.pop("external_lib") == "flash_attn.integrations.verl"
    assert model_settings.pop("override_config") == {"attn_implementation": "dualkv"}
    plain = found["0"]["actor_rollout_ref"]["model"]
    assert plain.pop("external_lib") is None and plain.pop("override_config") == {}
    found["0"]["trainer"]["experiment_name"] = found["1"]["trainer"]["experiment_name"]
    assert found["0"] == found["1"]  # the two runs differ in nothing else


@pytest.mark.parametrize("shared", ["1", "0"])
def test_the_settings_of_a_launch_script_reach_the_engine(shared, tmp_path, folder):
    """veRL's real worker of a cluster, from the script's settings to its engine; only the model is a tiny
    one. (flash_attention_2, veRL's default, does not exist on CPUs.)"""
    from tiny import model_path
    from verl.workers.engine_workers import ActorRolloutRefWorker

    given = overrides("grpo.sh", "qwen3-8b", tmp_path, SHARED=shared, MODEL_PATH=model_path(folder))
    given.append("+actor_rollout_ref.model.load_tokenizer=false")
    if shared == "0":
        given.append("+actor_rollout_ref.model.override_config.attn_implementation=sdpa")
    with initialize_config_dir(str(Path(verl.trainer.config.__file__).parent), version_base=None):
        config = compose("ppo_trainer", given)
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    engine = worker.actor.engine
    assert engine._shares is (shared == "1")
    assert engine.engine_config.use_dynamic_bsz and engine.engine_config.max_token_len_per_gpu == 20480


def test_unknown_models_are_named():
    command = ["bash", str(EXAMPLES / "grpo.sh"), "gpt-5"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and "unknown model: gpt-5 (qwen3-8b, qwen3-30b-a3b)" in result.stderr


def test_updates_on_a_cpu_are_the_same_from_fewer_tokens():
    import cpu_update

    steps = cpu_update.main(["--steps", "2", "--prompt-len", "48", "--response-len", "6"])
    assert len(steps) == 2
    for both in steps:
        replicated, shared = both["replicated"], both["shared"]
        assert shared["tokens"] < 0.4 * replicated["tokens"]
        assert shared["loss"] == pytest.approx(replicated["loss"], abs=1e-6)
        assert shared["grad_norm"] == pytest.approx(replicated["grad_norm"], rel=1e-4)
