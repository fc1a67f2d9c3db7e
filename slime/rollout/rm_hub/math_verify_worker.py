"""The process behind ``--rm-type math_verify``: JSON lines ``[response, truth, seconds]`` in, lines with grades out.

Started by :mod:`slime.rollout.rm_hub.math_verify_grader` as a script, so it imports nothing of slime. The kernel ends
it when a line takes longer than its seconds, or the start longer than those of the first argument, whatever C code it
is in, also when its parent died.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import sys

__all__ = ["main"]

_MAX_MEMORY_BYTES = 4 * 2**30


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    logging.disable()
    from math_verify import parse, verify

    signal.setitimer(signal.ITIMER_REAL, 0)
    print("ready", flush=True)
    for line in sys.stdin:
        response, truth, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        grade = 0.0
        with contextlib.suppress(Exception):  # whatever the library trips over is not the right answer
            gold = parse(truth, parsing_timeout=None)  # its own limits are signals too, which C code does not see
            grade = float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(grade, flush=True)


if __name__ == "__main__":
    main()
