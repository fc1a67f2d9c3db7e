"""Ray starts this file in place of its ``setup_worker.py``. It has the worker forked from a process of ``preloading``.

    raylet               worker_launcher                         process of preloading
    ------               ---------------                         ---------------------
    starts it  ------->  sends words, environment, logs  ----->  forks the worker, which runs Ray's default_worker.py
                         ends                            <-----  answers
               <------------------------------------------------ the worker registers with its own pid

The worker starts as Ray would start it, with a line in ``raylet.err``, if that process has ended, or if it had another
environment when it imported its modules. Imports the standard library only: every worker waits for it.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from pathlib import Path

WORKER_FORKS = "SLIME_WORKER_FORKS"
"""Environment variable of the cluster: pid of the process of ``preloading``, and the folder with its sockets."""
WORKER_ROLE = "SLIME_WORKER_ROLE"
"""Environment variable of an actor: name of the socket whose process has imported its modules."""

# Nothing reads them before the worker runs. Ray's are read by its import, which is done by the worker.
_MAY_DIFFER = {WORKER_FORKS, WORKER_ROLE, "SLIME_FORK_SERVER", "SLIME_GUARD_FD", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"}
_MAY_DIFFER |= {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG"}
_MAY_DIFFER |= {"SPT_NOENV"}  # of Ray
_RAYS = "RAY_"
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="
_MESSAGE_BYTES = 1 << 16


class NotForked(Exception):
    """Why the worker cannot be forked."""


def worker_of(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words and the environment of the worker that Ray starts by ``words``. Raises ``NotForked``."""
    kept = [word for word in words if not word.startswith((_CONTEXT, _LANGUAGE))]
    context = json.loads(next((word[len(_CONTEXT) :] for word in words if word.startswith(_CONTEXT)), "{}"))
    given = context.pop("env_vars", None) or {}
    others = {name for name, value in context.items() if value and value != sys.executable}
    if others or not kept[0].endswith(".py") or any("$" in value for value in given.values()):
        raise NotForked(f"Ray starts it in a special way: {sorted(others) or kept[0]}")
    return kept, {**os.environ, **given}


def differing(theirs: dict[str, str], ours: dict[str, str]) -> set[str]:
    """Names of variables that modules may have read at their import, and that have another value here."""
    names = {name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)}
    return {name for name in names - _MAY_DIFFER if not name.startswith(_RAYS)}


def _environment_of(pid: str) -> dict[str, str]:
    """The environment with which a process was started."""
    lines = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def fork(words: list[str]) -> int:
    """Have the worker forked that Ray starts by ``words``. Returns its pid.

    Raises:
        NotForked: it has to be started from scratch.
        OSError: the process that preloads has ended.
    """
    argv, env = worker_of(words)
    logs = [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)]
    if not all(map(os.path.exists, logs)):
        raise NotForked(f"its output goes to {logs}, and not to files")
    pid, folder = os.environ[WORKER_FORKS].split(maxsplit=1)
    if names := differing(_environment_of(pid), env):
        raise NotForked(f"its environment differs in {', '.join(sorted(names))}")
    request = {
        "argv": argv,
        "env": env,
        "log": logs[0],
        "errors": logs[1],
        "directory": os.getcwd(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "niceness": os.nice(0),
        "oom_score": Path("/proc/self/oom_score_adj").read_text(encoding="ascii"),
    }
    # No timeout: Ray ends this process after RAY_worker_register_timeout_seconds.
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.path.join(folder, env.get(WORKER_ROLE, "worker")))
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = connection.makefile("rb").readline(_MESSAGE_BYTES)
    if not answer:
        raise OSError("the process that preloads has ended")
    return int(json.loads(answer)["pid"])


def be_agent(options: dict[str, str]) -> None:
    """Take the place of the agent of Ray's dashboard, as one without services. Its imports take over a second."""
    for name in ("dashboard_agent_listen", "metrics_agent", "metrics_export"):
        path = Path(options["--session-dir"], f"{name}_port_{options['--node-id']}")
        path.with_suffix(".new").write_text("-1", encoding="ascii")
        path.with_suffix(".new").replace(path)
    while str(os.getppid()) == os.environ["RAY_RAYLET_PID"]:
        time.sleep(1)


def main() -> None:
    words = sys.argv[1:]
    if words[0].startswith("--node-id="):
        return be_agent(dict(word.split("=", 1) for word in words if "=" in word))
    try:
        fork(words)
    except (NotForked, OSError) as error:
        print(f"a worker imports all modules itself, which takes seconds: {error}", file=sys.stderr, flush=True)
        script = next(word for word in words if word.endswith("default_worker.py"))
        os.execv(sys.executable, [sys.executable, str(Path(script).with_name("setup_worker.py")), *words])


if __name__ == "__main__":
    main()
