# shellcheck shell=bash
# The common part of every launch script; sourced first. A script then says, in this order,
#
#   model <preset> <directory below MODEL_DIR>      -> MODEL_ARGS, CKPT_ARGS
#   colocate | separate | train_only  ...           -> PLACEMENT_ARGS
#   ROLLOUT_ARGS=(...) EVAL_ARGS=(...) ...          its recipe
#   launch train.py "$@"                            checks, Ray, job
#
# From the environment: BASE_DIR (/root), MODEL_DIR, DATA_DIR, OUTPUT_DIR below it; HF_CHECKPOINT, REF_LOAD, LOAD_DIR,
# SAVE_DIR for single paths; see scripts/README.md. `--dry-run` or SLIME_DRY_RUN=1 prints the command and runs nothing.
set -euo pipefail

LIB_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
SLIME_DIR="$(cd -- "${LIB_DIR}/../.." && pwd)"
RUN_NAME="$(basename -- "$0" .sh)"
RUN_NAME="${RUN_NAME#run-}"

BASE_DIR="${BASE_DIR:-${BASE_FOLDER:-/root}}"
MODEL_DIR="${MODEL_DIR:-${BASE_DIR}}"
DATA_DIR="${DATA_DIR:-${BASE_DIR}}"
OUTPUT_DIR="${OUTPUT_DIR:-${BASE_DIR}/outputs}"

# KEY=VALUE for every process of the job. With one kernel queue per GPU, communication of tensor-parallel layers starts
# before the products that it overlaps.
JOB_ENV=("PYTHONPATH=${SLIME_DIR}${PYTHONPATH:+:${PYTHONPATH}}" "PYTHONUNBUFFERED=1" "CUDA_DEVICE_MAX_CONNECTIONS=1")

# The arrays that make up a command, in the order in which they are passed: of two equal flags the later one counts.
COMMAND_ARRAYS=(
   PLACEMENT_ARGS MODEL_ARGS CKPT_ARGS ROLLOUT_ARGS EVAL_ARGS PERF_ARGS ALGO_ARGS OPTIMIZER_ARGS MTP_ARGS SGLANG_ARGS
   PRECISION_ARGS TRACKING_ARGS MISC_ARGS
)

# shellcheck source=machine.sh
source "${LIB_DIR}/machine.sh"
# shellcheck source=ray.sh
source "${LIB_DIR}/ray.sh"
# shellcheck source=defaults.sh
source "${LIB_DIR}/defaults.sh"

die() {
   printf '%s: %s\n' "$(basename -- "$0")" "$*" >&2
   exit 2
}

# model <preset> <directory>: the model's flags, and where its weights are read and written.
model() {
   local preset="$1" directory="$2"
   HF_CHECKPOINT="${HF_CHECKPOINT:-${MODEL_DIR}/${directory}}"
   # A converted checkpoint loads faster than Hugging Face files, so it is taken when there is one.
   if [[ -z "${REF_LOAD:-}" && -d "${HF_CHECKPOINT}_torch_dist" ]]; then
      REF_LOAD="${HF_CHECKPOINT}_torch_dist"
   fi
   SAVE_DIR="${SAVE_DIR:-${OUTPUT_DIR}/${RUN_NAME}}"
   LOAD_DIR="${LOAD_DIR:-${SAVE_DIR}}"
   # shellcheck source=/dev/null
   source "${SLIME_DIR}/scripts/models/${preset}.sh"
}

# colocate <nodes> <GPUs per node>: trainer and engines take turns on the same GPUs.
colocate() {
   # shellcheck disable=SC2034
   PLACEMENT_ARGS=(--actor-num-nodes "$1" --actor-num-gpus-per-node "$2" --colocate)
   need_gpus "$(($1 * $2))"
}

# separate <nodes> <GPUs per node> <GPUs>: the trainer on nodes x GPUs, the engines on GPUs of their own.
separate() {
   # shellcheck disable=SC2034
   PLACEMENT_ARGS=(--actor-num-nodes "$1" --actor-num-gpus-per-node "$2" --rollout-num-gpus "$3")
   need_gpus "$(($1 * $2 + $3))"
}

# train_only <nodes> <GPUs per node>: no engines, as for supervised fine-tuning.
train_only() {
   # shellcheck disable=SC2034
   PLACEMENT_ARGS=(--actor-num-nodes "$1" --actor-num-gpus-per-node "$2" --debug-train-only)
   need_gpus "$(($1 * $2))"
}

# Are we asked for the command only?
is_dry_run() {
   [[ -n "${SLIME_DRY_RUN:-}" && "${SLIME_DRY_RUN}" != 0 ]] || [[ " $* " == *" --dry-run "* ]]
}

# launch <entry script> [flags]: run the recipe. The arrays are read by name; flags come last and so win.
launch() {
   local entry="$1" name
   shift
   local -a extra=() command=(python3 "${SLIME_DIR}/${entry}")
   for name in "$@"; do
      if [[ "${name}" != --dry-run ]]; then extra+=("${name}"); fi
   done
   for name in "${COMMAND_ARRAYS[@]}"; do
      if declare -p "${name}" &>/dev/null; then
         local -n array="${name}"
         command+=(${array[@]+"${array[@]}"})
         unset -n array
      fi
   done
   command+=(${extra[@]+"${extra[@]}"})
   if is_dry_run "$@"; then
      submit_command "${command[@]}"
      print_command "${SUBMIT[@]}"
      return
   fi
   if [[ " $* " == *" --plan "* ]]; then # needs neither Ray nor a GPU, and names paths that do not exist
      env "${JOB_ENV[@]}" "${command[@]}"
      return
   fi
   check_paths "${command[@]}"
   run_on_ray "${command[@]}"
}

# A command as text that can be pasted into a shell, one flag per line.
print_command() {
   local word text=""
   for word in "$@"; do
      if [[ "${word}" == --* && -n "${text}" ]]; then text+=$' \\\n  '; fi
      if [[ "${word}" =~ ^[A-Za-z0-9_./:=,@+-]+$ ]]; then text+=" ${word}"; else text+=" ${word@Q}"; fi
   done
   printf '%s\n' "${text# }"
}

# Every path that the command reads must exist; all that do not are named at once.
check_paths() {
   local flag="" word path problems=""
   local -A paths=()
   for word in "$@"; do
      case "${word}" in
         --*) flag="${word}" ;;
         *) if [[ "${flag}" =~ ^--(hf-checkpoint|ref-load|prompt-data|eval-prompt-data|opd-teacher-load)$ ]]; then
            paths["${flag}"]="${word}" # the last word: `--eval-prompt-data aime FILE`
         fi ;;
      esac
   done
   for flag in "${!paths[@]}"; do
      path="${paths[${flag}]%%@\[*}" # a slice such as FILE@[0:100] is not part of the name
      if [[ ! -e "${path}" ]]; then
         problems+=$'\n'"  ${flag} ${path} does not exist. $(remedy "${flag}")"
      fi
   done
   if [[ -n "${problems}" ]]; then
      die "nothing was started:${problems}"
   fi
}

remedy() {
   case "$1" in
      --hf-checkpoint) echo "Download the model there, or set MODEL_DIR or HF_CHECKPOINT." ;;
      --ref-load) echo "Convert the model (tools/convert_hf_to_torch_dist.py), or set REF_LOAD." ;;
      --prompt-data) echo "Download the data set there, or set DATA_DIR or pass --prompt-data." ;;
      *) echo "Set DATA_DIR, or pass $1." ;;
   esac
}
