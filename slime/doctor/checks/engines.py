"""Slow checks, behind ``--deep``: the engines can be imported, the device computes. Each in its own process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from slime.doctor.finding import Finding, Situation, fail, ok

__all__ = ["device_works", "imports"]

_MODULES = ("torch", "transformers", "ray", "sglang.srt.server_args", "megatron.core", "sglang_router")
_TIMEOUT_S = 300.0
_COMPUTE = """
import torch
from slime.utils import accelerator
device = accelerator.current().device()
x = torch.eye(64, device=device) * 2
assert float((x @ x).sum()) == 256.0
name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
print(f"{max(1, accelerator.current().num_devices())} x {name}, torch {torch.__version__}")
"""


def imports(situation: Situation, modules: tuple[str, ...] = _MODULES) -> Iterator[Finding]:
    """Every engine's package imports."""
    if not situation.is_deep:
        return
    for module in modules:
        started = time.monotonic()
        output, error = _python(f"import {module}")
        if error:
            yield fail("import", f"{module}: {error}", "reinstall it: make setup")
        else:
            yield ok("import", f"{module} in {time.monotonic() - started:.1f} s{output}")


def device_works(situation: Situation, code: str = _COMPUTE) -> Iterator[Finding]:
    """A product of two matrices on the device."""
    if not situation.is_deep:
        return
    output, error = _python(code)
    if error:
        yield fail("compute", error, "check the driver (nvidia-smi) and torch's CUDA version")
    else:
        yield ok("compute", output)


def _python(code: str) -> tuple[str, str]:
    """(last line of the output, last line of the error; empty when it worked)."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_TIMEOUT_S:.0f} s"
    output = done.stdout.strip().splitlines()[-1:]
    if done.returncode == 0:
        return "".join(output), ""
    return "", "".join(done.stderr.strip().splitlines()[-1:]) or f"exit status {done.returncode}"
