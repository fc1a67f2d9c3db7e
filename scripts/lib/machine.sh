# shellcheck shell=bash
# What the machine has. Sourced by launch.sh; prints answers, changes nothing.

# Number of GPUs: NUM_GPUS if set, else those that a vendor's tool lists, else 8.
num_gpus() {
   local count=0
   if [[ -n "${NUM_GPUS:-}" ]]; then
      echo "${NUM_GPUS}"
      return
   fi
   if command -v nvidia-smi >/dev/null; then
      count="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true)"
   elif command -v rocm-smi >/dev/null; then
      count="$(rocm-smi --showid 2>/dev/null | grep -o '^GPU\[[0-9]*\]' | sort -u | wc -l || true)"
   fi
   echo "$((count > 0 ? count : 8))"
}

# 1 where GPUs are linked by NVLink, else 0: NVLink SHARP (NCCL_NVLS_ENABLE) needs it.
has_nvlink() {
   local links=0
   if command -v nvidia-smi >/dev/null; then
      links="$(nvidia-smi topo -m 2>/dev/null | grep -Eow 'NV[0-9]+' | wc -l || true)"
   fi
   echo "$((links > 0))"
}
