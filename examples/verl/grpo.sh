#!/usr/bin/env bash
# GRPO with veRL (0.9.1, FSDP2, vLLM), with shared prompts or without: SHARED=1 (default) or SHARED=0.
#
#   bash examples/verl/grpo.sh qwen3-8b                        # one node of 8 GPUs
#   NNODES=4 bash examples/verl/grpo.sh qwen3-30b-a3b          # four; start Ray on them before ("ray start ...")
#   SHARED=0 bash examples/verl/grpo.sh qwen3-8b trainer.total_training_steps=20     # further settings of veRL's
#
# DATA holds train.parquet and test.parquet in veRL's format; MODEL_PATH is a local copy of the model.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/settings.sh" "${1:?the model: qwen3-8b or qwen3-30b-a3b}"

exec "${PYTHON:-python3}" -m verl.trainer.main_ppo "${common[@]}" \
  trainer.project_name=shared_prompts \
  trainer.experiment_name="grpo_$1_shared$SHARED" \
  actor_rollout_ref.actor.use_kl_loss=true \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  "${@:2}"
