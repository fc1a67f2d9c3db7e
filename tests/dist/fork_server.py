"""A process that has everything imported and forks the ranks of one case after the other. Run by ``ranks``.

A line on stdin names a directory. Its ``request.json`` has the function and the number of ranks. Each rank leaves
``rank_N.pt`` (what it returned) or ``rank_N.error`` (a traceback), and ``rank_N.log``. The answer is one line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slime.utils.net import claim_ports
from tests.limits import Limit

_IMPORTED = (
    "slime.backends.megatron_utils.actor",
    "slime.backends.fsdp_utils.actor",
    "transformers.models.qwen3.modeling_qwen3",
    "torch._dynamo",  # the first optimizer imports it, and torch.onnx
    "torch.onnx",
    "tests.unit.megatron_utils.tiny_trainer",
)
"""Imports of every rank. Importing them again would take more than half of the time of a small case."""

_GRACE_S = 3.0
"""Seconds that the other ranks get after a failure: enough to report their own errors."""


def main() -> None:
    _die_with_parent()
    torch.set_num_threads(1)
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        directory = Path(line.strip())
        print(json.dumps(_run(directory, **json.loads((directory / "request.json").read_text()))), flush=True)


def _run(directory: Path, case: str, world_size: int, timeout_s: float) -> dict[str, Any]:
    # On all addresses, because torch's store listens on all. Claimed: neither another case nor the kernel uses it.
    port = claim_ports("0.0.0.0")
    ranks = {_fork(directory, case, rank, world_size, port.first): rank for rank in range(world_size)}
    limit = Limit(timeout_s)
    codes: dict[int, int] = {}
    is_late = False
    while len(codes) < world_size:
        for pid, rank in ranks.items():
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank] != 0:
                        limit.seconds = min(limit.seconds, limit.used + _GRACE_S)
        if limit.is_over:
            is_late = is_late or not any(codes.values())
            for pid, rank in ranks.items():
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    port.release()
    return {"codes": [codes[rank] for rank in range(world_size)], "is_late": is_late}


def _fork(directory: Path, case: str, rank: int, world_size: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _die_with_parent()
        log = os.open(directory / f"rank_{rank}.log", os.O_CREAT | os.O_WRONLY)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
        module, name = case.split(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        arguments = torch.load(directory / "arguments.pt", weights_only=False)
        torch.save(function(rank, world_size, **arguments), directory / f"rank_{rank}.pt")
        code = 0
    except BaseException:
        (directory / f"rank_{rank}.error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(code)  # threads of the process group must not hold it up


def _die_with_parent() -> None:
    """Leave no process, however the tests end (Linux)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
