# shellcheck shell=bash
# CKPT_ARGS from the environment; sourced by every preset. Variables that are unset give no flag:
#
#   HF_CHECKPOINT  --hf-checkpoint: Hugging Face directory, for tokenizer, engines and first weights
#   REF_LOAD       --ref-load: reference weights, where they are not HF_CHECKPOINT
#   LOAD_DIR       --load: checkpoint to resume from; may be empty or missing at the first start
#   SAVE_DIR       --save, every SAVE_INTERVAL (20) rollouts
#
# A CKPT_ARGS that the script filled itself is kept; one that an earlier preset left is built anew.
if [[ "${CKPT_ARGS[*]-}" == "${_slime_ckpt_args-}" ]]; then
   CKPT_ARGS=(
      ${HF_CHECKPOINT:+--hf-checkpoint "${HF_CHECKPOINT}"}
      ${REF_LOAD:+--ref-load "${REF_LOAD}"}
      ${LOAD_DIR:+--load "${LOAD_DIR}"}
      ${SAVE_DIR:+--save "${SAVE_DIR}" --save-interval "${SAVE_INTERVAL:-20}"}
   )
   _slime_ckpt_args="${CKPT_ARGS[*]-}"
fi
