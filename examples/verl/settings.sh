# Sourced by grpo.sh and dapo.sh: `common`, the settings that both algorithms share, for the model named.
SHARED=${SHARED:-1}
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
DATA=${DATA:-$HOME/data/long_prompts}
PROMPT_LENGTH=${PROMPT_LENGTH:-8192}
RESPONSE_LENGTH=${RESPONSE_LENGTH:-2048}
ROLLOUT_N=${ROLLOUT_N:-16}

case $1 in
  qwen3-8b)
    MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
    model=(actor_rollout_ref.rollout.tensor_model_parallel_size=2) ;;
  qwen3-30b-a3b)
    MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-30B-A3B}
    # Weights and optimizer of 30B parameters: off the GPUs while vLLM samples, and sequences over two GPUs.
    model=(
      actor_rollout_ref.rollout.tensor_model_parallel_size=4
      actor_rollout_ref.actor.fsdp_config.param_offload=true
      actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
      actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2
      actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=2
    ) ;;
  *) echo "unknown model: $1 (qwen3-8b, qwen3-30b-a3b)" >&2; exit 1 ;;
esac

# A micro-batch holds this many tokens. veRL counts every copy of a prompt, the plug-in counts it once, so that with
# the same number more rows meet in a forward: of full length 5 instead of 2, of short responses more.
tokens=${MAX_TOKENS:-$((2 * (PROMPT_LENGTH + RESPONSE_LENGTH)))}

common=(
  algorithm.adv_estimator=grpo
  data.train_files="$DATA/train.parquet"
  data.val_files="$DATA/test.parquet"
  data.train_batch_size=$((32 * NNODES))
  data.max_prompt_length="$PROMPT_LENGTH"
  data.max_response_length="$RESPONSE_LENGTH"
  data.filter_overlong_prompts=true
  actor_rollout_ref.model.path="$MODEL_PATH"
  actor_rollout_ref.model.use_remove_padding=true
  actor_rollout_ref.model.enable_gradient_checkpointing=true
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=$((16 * NNODES))
  actor_rollout_ref.actor.use_dynamic_bsz=true
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$tokens"
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n="$ROLLOUT_N"
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$((2 * tokens))
  trainer.nnodes="$NNODES"
  trainer.n_gpus_per_node="$GPUS_PER_NODE"
  trainer.val_before_train=false
  "trainer.logger=[console]"
  "${model[@]}"
)
if [ "$SHARED" = 1 ]; then
  common+=(
    actor_rollout_ref.model.external_lib=flash_attn.integrations.verl
    +actor_rollout_ref.model.override_config.attn_implementation=dualkv
  )
fi
