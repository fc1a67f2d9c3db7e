"""A slow disk for every Python process that starts with this folder in ``PYTHONPATH``, as ``chaos_pairs.py`` uses it.

Each flush and each new name of a file takes up to a second. ``SLOW_DISK_LOG`` names a file that gets a line for each.
"""

import os
import random
import sys
import time

_LONGEST_S = 1.0


def _slow(name, real):
    def operation(*args, **kwargs):
        # Imports write and rename files of byte code: the start is not the subject.
        if "slime" in sys.modules:
            time.sleep(random.uniform(0.0, _LONGEST_S))
            with open(os.environ["SLOW_DISK_LOG"], "a", encoding="utf-8") as log:
                log.write(f"{os.getpid()} {name}\n")
        return real(*args, **kwargs)

    return operation


if "SLOW_DISK_LOG" in os.environ:
    for _name in ("fsync", "replace", "rename"):
        setattr(os, _name, _slow(_name, getattr(os, _name)))
