#!/usr/bin/env bash
# DAPO with veRL: as grpo.sh, with the higher upper clip, no KL, groups of equal rewards drawn anew, and a penalty
# for responses near the limit.
#
#   bash examples/verl/dapo.sh qwen3-8b            SHARED=0 bash examples/verl/dapo.sh qwen3-30b-a3b
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/settings.sh" "${1:?the model: qwen3-8b or qwen3-30b-a3b}"

exec "${PYTHON:-python3}" -m verl.trainer.main_ppo "${common[@]}" \
  trainer.project_name=shared_prompts \
  trainer.experiment_name="dapo_$1_shared$SHARED" \
  actor_rollout_ref.actor.use_kl_loss=false \
  actor_rollout_ref.actor.clip_ratio_low=0.2 \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  algorithm.filter_groups.enable=true \
  algorithm.filter_groups.metric=reward \
  algorithm.filter_groups.max_num_gen_batches=10 \
  reward.reward_manager.name=dapo \
  +reward.reward_kwargs.max_resp_len="$RESPONSE_LENGTH" \
  +reward.reward_kwargs.overlong_buffer_cfg.enable=true \
  +reward.reward_kwargs.overlong_buffer_cfg.len=$((RESPONSE_LENGTH / 8)) \
  +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
  +reward.reward_kwargs.overlong_buffer_cfg.log=false \
  "${@:2}"
