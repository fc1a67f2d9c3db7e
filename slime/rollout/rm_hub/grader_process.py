"""The processes in which answers are graded: one that imports the libraries, and its forks, one per socket.

    python -m slime.rollout.rm_hub.grader_process 5,6,7

Started by :mod:`slime.rollout.rm_hub.grader_pool`. A fork reads lines ``[grader, arguments, cpu_s, wall_s]`` from its
socket and answers ``{"grade": ...}``, ``{"error": ...}`` or, when a limit ended it, ``{"stopped": ...}``. The kernel
enforces the limits, also inside C code: two interval timers, and RLIMIT_AS. The first process replaces a fork that
ended, which takes milliseconds because the libraries are loaded. Standard input is the guard: when it closes, the
parent has ended, and all processes end at once.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import pkgutil
import resource
import select
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GRADERS = {
    "sympy": "slime.rollout.rm_hub.math_utils:compare_with_sympy",
    "math_verify": "slime.rollout.rm_hub.rules:compare_with_math_verify",
    "ifbench": "slime.rollout.rm_hub.rules:compute_ifbench_reward",
}
# Graded before the first fork, so that every fork has the libraries and their caches.
_EXAMPLES: dict[str, list[Any]] = {
    "sympy": [r"2\sqrt{3}", r"\sqrt{12}"],
    "math_verify": [r"\boxed{\frac{1}{2}}", "$0.5$"],
    "ifbench": ["text", None, {"instruction_id_list": ["none"]}],
}
# Of one answer, on top of the libraries: some of them reserve many GiB of addresses that they do not use.
_MAX_MEMORY_BYTES = 2 * 2**30
# Exit status of a fork.
_OUT_OF_MEMORY = 3
_STOPPED_BY = {
    signal.SIGPROF: "it took more CPU time than an answer may",
    signal.SIGALRM: "it took longer than an answer may",
}


def main() -> None:
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1].split(",")]
    _become_quiet()
    for name, example in _EXAMPLES.items():
        with contextlib.suppress(Exception):  # a missing library is reported with the first answer that needs it
            _grader(name)(*example)
    gc.freeze()  # the collector would write to these objects, and their pages would be copied in every fork
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)  # POLLHUP alone
    forks: dict[int, tuple[int, socket.socket]] = {}
    for own in sockets:
        _fork(own, sockets, forks, poll)
    while forks:
        for descriptor, _ in poll.poll():
            if descriptor == sys.stdin.fileno():
                for pid, _ in forks.values():
                    os.kill(pid, signal.SIGKILL)
                return
            poll.unregister(descriptor)
            os.close(descriptor)
            pid, own = forks.pop(descriptor)
            _, status = os.waitpid(pid, 0)
            # A fork that ended normally has seen the end of its socket. Any other end is the answer to its request.
            if status != 0:
                own.sendall(json.dumps({"stopped": _why(status)}).encode() + b"\n")
                _fork(own, sockets, forks, poll)


def _become_quiet() -> None:
    logging.disable()
    warnings.simplefilter("ignore")  # about text of models that is compiled
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the parent is what counts
    for number in _STOPPED_BY:
        signal.signal(number, signal.SIG_DFL)  # the parent may ignore or block them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPED_BY)


def _grader(name: str) -> Callable[..., Any]:
    grader: Callable[..., Any] = pkgutil.resolve_name(_GRADERS[name])
    return grader


def _fork(
    own: socket.socket, sockets: list[socket.socket], forks: dict[int, tuple[int, socket.socket]], poll: select.poll
) -> None:
    pid = os.fork()
    if pid:
        descriptor = os.pidfd_open(pid)
        forks[descriptor] = pid, own
        poll.register(descriptor, select.POLLIN)
        return
    status = 1
    try:
        for other in sockets:
            if other is not own:
                other.close()  # a socket closes for the parent when its own fork and the first process are gone
        _serve(own)
        status = 0
    except MemoryError:
        status = _OUT_OF_MEMORY
    finally:
        # Without cleanup: exit handlers and buffers belong to the first process.
        os._exit(status)


def _serve(own: socket.socket) -> None:
    limit = _address_space() + _MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in own.makefile("r"):
        name, arguments, cpu_s, wall_s = json.loads(line)
        try:
            grader = _grader(name)
            # CPU time (SIGPROF) and wall time (SIGALRM). The default action ends the fork, also inside C code.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            signal.setitimer(signal.ITIMER_REAL, wall_s)
            outcome = {"grade": grader(*arguments)}
        except MemoryError:
            # Ends the fork: its address space is at the limit.
            raise
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"[:1000], "is_import": isinstance(error, ImportError)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        own.sendall(json.dumps(outcome).encode() + b"\n")


def _address_space() -> int:
    """Bytes of this process, as RLIMIT_AS counts them."""
    num_pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(num_pages) * resource.getpagesize()


def _why(status: int) -> str:
    if not os.WIFSIGNALED(status):
        is_memory = os.waitstatus_to_exitcode(status) == _OUT_OF_MEMORY
        return f"it took more than {_MAX_MEMORY_BYTES >> 30} GiB of memory" if is_memory else "its grader exited"
    number = os.WTERMSIG(status)
    return _STOPPED_BY.get(signal.Signals(number)) or f"its grader died of {signal.Signals(number).name}"


if __name__ == "__main__":
    main()
