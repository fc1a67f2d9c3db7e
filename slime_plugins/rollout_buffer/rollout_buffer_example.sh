#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# GRPO on math with trajectories of the rollout buffer service: four GPUs train, four generate.
# From the environment: PRESET and MODEL_NAME, the model; ROLLOUT_BUFFER_URL, a service that runs already.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model "${PRESET:-qwen3-4B}" "${MODEL_NAME:-Qwen3-4B}"
separate 1 4 4

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rollout-function-path slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout
   --rollout-buffer-url "${ROLLOUT_BUFFER_URL:-http://127.0.0.1:8889}"
   --rollout-task-type math
   --loss-mask-type "${LOSS_MASK_TYPE:-qwen3}"
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 128
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 1024
   --log-passrate
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)
ALGO_ARGS=(--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl --keep-old-actor)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 1)

if ! is_dry_run "$@" && [[ " $* " != *" --plan "* && -z "${ROLLOUT_BUFFER_URL:-}" ]]; then
   PYTHONPATH="${SLIME_DIR}${PYTHONPATH:+:${PYTHONPATH}}" python3 -m slime_plugins.rollout_buffer.buffer --port 8889 &
   trap 'kill $!' EXIT
fi
launch train_async.py "$@"
