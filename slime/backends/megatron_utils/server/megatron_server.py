"""Entry point of the log-prob server: ``python -m slime.backends.megatron_utils.server.megatron_server --help``.

The code is in ``slime.ray.logprob_server``. The path of this module is public.
"""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("slime.ray.logprob_server", run_name="__main__", alter_sys=True)
