"""Runs a function on N ranks, which are separate processes joined by gloo. A case costs about a second.

``ranks.run("tests.dist.some_module:function", 4, argument=...)`` calls ``function(rank, world_size, argument=...)`` on
each rank and returns the results. The ranks are forked from one process that has torch and megatron imported.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.limits import Limit

_ROOT = Path(__file__).parents[2]


class ForkServer:
    """Starts its process with the first case. ``close`` ends it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None

    def run(self, case: str, world_size: int, *, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
        """Return the results of the ranks, by rank.

        Args:
            case: ``module:function``. Arguments and results travel through ``torch.save``.

        Raises:
            AssertionError: a rank failed or did not end in time. It has every rank's traceback and last output.
        """
        directory = Path(tempfile.mkdtemp(prefix="case-", dir=self._directory))
        torch.save(arguments, directory / "arguments.pt")
        request = {"case": case, "world_size": world_size, "timeout_s": timeout_s}
        (directory / "request.json").write_text(json.dumps(request))
        process = self._started()
        assert process.stdin is not None
        process.stdin.write(f"{directory}\n")
        process.stdin.flush()
        answer = json.loads(self._line(timeout_s + 10))
        if any(answer["codes"]):
            raise AssertionError(_failure(case, directory, answer))
        return [torch.load(directory / f"rank_{rank}.pt", weights_only=False) for rank in range(world_size)]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.dist.fork_server"],
                cwd=_ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ready = self._line(60)
            assert ready == "ready", f"the fork server said {ready!r}"
        return self._process

    def _line(self, timeout_s: float) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            limit = Limit(timeout_s)
            while not selector.select(0.2):
                if not limit.is_over:
                    continue
                self.close()
                raise AssertionError(f"the fork server did not answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise AssertionError("the fork server died")
        return line.strip()


def _failure(case: str, directory: Path, answer: dict[str, Any]) -> str:
    lines = [f"{case}: exit codes {answer['codes']}" + (", not finished in time" if answer["is_late"] else "")]
    for rank in range(len(answer["codes"])):
        error, log = directory / f"rank_{rank}.error", directory / f"rank_{rank}.log"
        lines.append(f"--- rank {rank}")
        if log.exists():
            lines.append(log.read_text(errors="replace")[-1500:])
        lines.append(error.read_text()[-4000:] if error.exists() else "(no traceback)")
    return "\n".join(lines)
