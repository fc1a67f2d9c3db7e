# shellcheck shell=bash
# Ray for one launch script: use the Ray that is running, else start one and stop that one again. Nothing that this
# script did not start is ever stopped. Sourced by launch.sh.
#
#   RAY_DASHBOARD   job server of a running Ray (http://127.0.0.1:8265); where it answers, nothing is started
#   MASTER_ADDR     address of this machine for the other nodes (127.0.0.1 for one node)
#   HOSTFILE        one address per line of the machines that join by ssh, for recipes of several nodes
#   RAY_PORT        port of the head (6379)

MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
RAY_PORT="${RAY_PORT:-6379}"
RAY_DASHBOARD="${RAY_DASHBOARD:-http://127.0.0.1:8265}"
RAY_START_TIMEOUT_S="${RAY_START_TIMEOUT_S:-120}"
# Longer than Ray's own drain, which lets running work end for up to 30 s.
RAY_STOP_TIMEOUT_S="${RAY_STOP_TIMEOUT_S:-45}"

# need_gpus <total>: how many the recipe takes; several nodes when this one has fewer.
need_gpus() {
   local per_node
   per_node="$(num_gpus)"
   NUM_NODES="$((($1 + per_node - 1) / per_node))"
   GPUS_OF_NODE="$(($1 < per_node ? $1 : per_node))"
   if ((NUM_NODES > 1)); then
      JOB_ENV+=("MASTER_ADDR=${MASTER_ADDR}" "no_proxy=127.0.0.1,localhost,${MASTER_ADDR}")
      if [[ -n "${SOCKET_IFNAME:-}" ]]; then # the network interface between nodes, where detection picks a wrong one
         JOB_ENV+=("GLOO_SOCKET_IFNAME=${SOCKET_IFNAME}" "TP_SOCKET_IFNAME=${SOCKET_IFNAME}")
      fi
   fi
}

# SUBMIT = the `ray job submit` command for a program and its arguments.
submit_command() {
   local environment
   environment="$(python3 -c 'import json, sys
print(json.dumps({"env_vars": dict(word.split("=", 1) for word in sys.argv[1:])}))' \
      "${JOB_ENV[@]}" "NCCL_NVLS_ENABLE=$(has_nvlink)")"
   SUBMIT=(ray job submit "--address=${RAY_DASHBOARD}" "--runtime-env-json=${environment}")
   SUBMIT+=("--submission-id=${SUBMISSION_ID:-${RUN_NAME}}" -- "$@")
}

run_on_ray() {
   local tool
   for tool in python3 ray; do
      command -v "${tool}" >/dev/null || die "${tool} is not on PATH: activate the environment that slime is installed in."
   done
   SUBMISSION_ID="${RUN_NAME}-$(date +%Y%m%d-%H%M%S)-$$"
   JOB_STATE=none SUBMIT_PID="" SUBMIT_ERRORS="" RAY_PID=""
   trap stop_what_we_started EXIT
   trap 'exit 130' INT
   trap 'exit 143' TERM
   if job_server_answers; then
      echo "using the Ray at ${RAY_DASHBOARD}"
   else
      start_ray
   fi
   # Ray asks for a token where one lies in the user's home, but its job client only looks there when it is told to.
   if [[ "$(job_server_status)" == 401 ]]; then
      export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
   fi
   submit_command "$@"
   submit_job
}

# Submit, follow the job's output, return its status. A Ray that has just started takes no job for some seconds.
submit_job() {
   local status tail_pid deadline=$((SECONDS + RAY_START_TIMEOUT_S))
   SUBMIT_ERRORS="$(mktemp "${TMPDIR:-/tmp}/slime-submit-XXXXXX.log")"
   JOB_STATE=running
   while true; do
      status=0
      # In the background, because bash would put off a signal until a program in the foreground has ended.
      "${SUBMIT[@]}" 2>"${SUBMIT_ERRORS}" &
      SUBMIT_PID=$!
      tail --follow --lines=+1 --sleep-interval=0.2 --pid="${SUBMIT_PID}" "${SUBMIT_ERRORS}" >&2 &
      tail_pid=$!
      wait "${SUBMIT_PID}" || status=$?
      wait "${tail_pid}" || true # it prints the rest
      if ((status == 0 || SECONDS > deadline)) || ! grep -q "No available agent to submit job" "${SUBMIT_ERRORS}"; then
         break
      fi
      echo "Ray takes no jobs yet: trying again. (If it never does: another Ray may hold its agent port 52365.)"
      sleep 0.5
   done
   JOB_STATE=ended
   return "${status}"
}

# HTTP status with which RAY_DASHBOARD answers; fails when nothing answers.
job_server_status() {
   python3 -c 'import sys, urllib.error, urllib.request as web
try:
    print(web.build_opener(web.ProxyHandler({})).open(sys.argv[1] + "/api/version", timeout=3).status)
except urllib.error.HTTPError as error:
    print(error.code)' "${RAY_DASHBOARD}" 2>/dev/null
}

job_server_answers() {
   job_server_status >/dev/null
}

# free_ports <n>: ports that no program listens on.
free_ports() {
   python3 -c 'import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for sock in sockets:
    sock.bind(("", 0))
print(*(sock.getsockname()[1] for sock in sockets))' "$1"
}

start_ray() {
   if ((NUM_NODES > 1)) && [[ -z "${HOSTFILE:-}" || "${MASTER_ADDR}" == 127.0.0.1 ]]; then
      die "this recipe needs ${NUM_NODES} nodes of ${GPUS_OF_NODE} GPUs and no Ray answers at ${RAY_DASHBOARD}. Start a" \
         "Ray cluster and run this on its head, or set MASTER_ADDR to this machine's address and HOSTFILE to a file with" \
         "one address per line: they join by ssh."
   fi
   local log agent_port client_port deadline=$((SECONDS + RAY_START_TIMEOUT_S))
   # Ray's fixed defaults for these two collide with any other Ray on the machine, and then it takes no jobs.
   read -r agent_port client_port < <(free_ports 2)
   log="$(mktemp "${TMPDIR:-/tmp}/slime-ray-XXXXXX.log")"
   # --block makes Ray's processes children of this one; setsid gives them a process group of their own, so that both
   # Ctrl-C reaches this script first and the whole group can be ended without a look at any other process.
   setsid ray start --head --block --node-ip-address "${MASTER_ADDR}" --port "${RAY_PORT}" \
      --num-gpus "${GPUS_OF_NODE}" --disable-usage-stats --dashboard-host="${RAY_DASHBOARD_HOST:-127.0.0.1}" \
      --dashboard-port="${RAY_DASHBOARD##*:}" --dashboard-agent-listen-port "${agent_port}" \
      --ray-client-server-port "${client_port}" >"${log}" 2>&1 &
   RAY_PID=$!
   until job_server_answers; do
      if ! kill -0 "${RAY_PID}" 2>/dev/null; then
         RAY_PID=""
         tail -n 20 "${log}" >&2
         die "ray start failed; its output is in ${log}"
      fi
      if ((SECONDS > deadline)); then
         tail -n 20 "${log}" >&2
         die "Ray did not answer at ${RAY_DASHBOARD} within ${RAY_START_TIMEOUT_S} s; its output is in ${log}"
      fi
      sleep 0.3
   done
   echo "started Ray on ${MASTER_ADDR}:${RAY_PORT} (log: ${log}); it stops with this script"
   if ((NUM_NODES > 1)); then
      start_workers
   fi
}

# The machines of HOSTFILE join. They are not stopped by name later: without its head a Ray node ends by itself.
start_workers() {
   local host ray_program failed=""
   local -a hosts=()
   local -A pids=()
   ray_program="$(command -v ray)"
   mapfile -t hosts < <(grep -Ev '^[[:space:]]*(#|$)' "${HOSTFILE}" | awk '{print $1}' | grep -Fvx "${MASTER_ADDR}")
   for host in "${hosts[@]}"; do
      # shellcheck disable=SC2029  # the arguments are this machine's on purpose
      ssh -o BatchMode=yes -o ConnectTimeout=15 "${host}" \
         "timeout ${RAY_START_TIMEOUT_S} '${ray_program}' start --address '${MASTER_ADDR}:${RAY_PORT}'" \
         "--node-ip-address '${host}' --num-gpus '${GPUS_OF_NODE}' --disable-usage-stats" </dev/null &
      pids["${host}"]=$!
   done
   for host in "${!pids[@]}"; do
      wait "${pids[${host}]}" || failed+=" ${host}"
   done
   if [[ -n "${failed}" ]]; then
      die "ray start failed over ssh on:${failed}"
   fi
   if ((${#hosts[@]} + 1 < NUM_NODES)); then
      die "${HOSTFILE} names ${#hosts[@]} machines besides ${MASTER_ADDR}; the recipe needs $((NUM_NODES - 1))."
   fi
}

# At exit: our job if it still runs, then our Ray if we started one.
stop_what_we_started() {
   local status=$? deadline
   trap - EXIT INT TERM
   rm -f "${SUBMIT_ERRORS}"
   if [[ "${JOB_STATE}" == running ]]; then
      kill -TERM "${SUBMIT_PID}" 2>/dev/null || true
      timeout 30 ray job stop --no-wait "--address=${RAY_DASHBOARD}" "${SUBMISSION_ID}" >/dev/null 2>&1 || true
   fi
   if [[ -n "${RAY_PID}" ]] && kill -TERM "${RAY_PID}" 2>/dev/null; then
      deadline=$((SECONDS + RAY_STOP_TIMEOUT_S))
      while kill -0 "${RAY_PID}" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
      kill -KILL -- "-${RAY_PID}" 2>/dev/null || true # what is left of our own process group
      for _ in {1..10}; do # the kernel takes a moment
         kill -0 -- "-${RAY_PID}" 2>/dev/null || break
         sleep 0.05
      done
   fi
   exit "${status}"
}
