"""Where the log-prob server is started: ``python -m slime.backends.megatron_utils.server.megatron_server --help``.

Starting it is wiring, and wiring is in ``slime.ray``.
"""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("slime.ray.logprob_server", run_name="__main__", alter_sys=True)
