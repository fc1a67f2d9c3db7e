"""The router as users' launchers start it."""

from __future__ import annotations

import multiprocessing

from slime.backends.sglang_utils.router import _is_alive
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.http_utils import run_router, terminate_process
from slime.utils.net import free_port


def test_a_router_serves_in_a_process_of_its_own_until_that_is_ended():
    from sglang_router.router_args import RouterArgs

    port, metrics = free_port(), free_port()
    args = RouterArgs(host="127.0.0.1", port=port, prometheus_port=metrics, prometheus_host="127.0.0.1")
    process = multiprocessing.get_context("spawn").Process(target=run_router, args=(args,), daemon=True)
    process.start()
    try:
        wait_until(lambda: _is_alive(f"http://127.0.0.1:{port}"), Deadline(600, "the router to answer"))
    finally:
        terminate_process(process)
    assert not process.is_alive()
    assert not _is_alive(f"http://127.0.0.1:{port}")
