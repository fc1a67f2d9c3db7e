"""``train_async.py``, but the driver kills itself in the phase ``DIES_IN``, such as ``sync 3``: it cannot be missed."""

import os
import signal
import sys
from contextlib import contextmanager
from threading import Timer

from slime.ray.run.main import main_async
from slime.ray.watch.progress import Progress

_phase = Progress.phase


@contextmanager
def _deadly_phase(progress, lane, name, rollout_id):
    with _phase(progress, lane, name, rollout_id):
        dies = os.environ["DIES_IN"] == f"{name} {rollout_id}"
        if dies:
            Timer(0.05, _die).start()  # in the middle of the phase, if it is longer
        yield
        if dies:
            _die()


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Progress.phase = _deadly_phase
    sys.exit(main_async())
