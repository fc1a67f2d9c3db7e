"""Run Python that a model wrote, in one process with limits and without the environment of this process.

    result = await run_python("print(6 * 7)", Limits())

The sandbox limits accidents: endless loops, memory bombs, too much output, files in the wrong place and processes
that do not end. The code runs with ``python -I -S -B`` in an empty temporary directory, as a new session, with
resource limits, a minimal environment, and without the modules that reach the network or start processes.

It does not stop an attacker. The check for forbidden modules can be bypassed, and the code can read all files of the
user. For code that you do not trust at all, run the sandbox in a container or a
micro-VM without a network. ``run_python`` is the only function to replace.
"""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from typing import Literal

__all__ = ["Limits", "Result", "run_python"]

FORBIDDEN = frozenset(
    {
        *("asyncio", "ctypes", "ftplib", "http", "importlib", "io", "multiprocessing", "os", "pathlib", "posix", "pty"),
        *("resource", "runpy", "shutil", "signal", "smtplib", "socket", "ssl", "subprocess", "sys", "telnetlib"),
        *("threading", "urllib", "webbrowser", "xmlrpc", "_io", "_posixsubprocess", "_socket", "_thread"),
    }
)
FORBIDDEN_NAMES = frozenset({"__import__", "breakpoint", "compile", "eval", "exec", "input", "open"})

# Runs inside the new process before the code does: limits hold for it and for whatever it would start.
_BOOT = """
import resource, sys
cpu_s, memory, size, files = map(int, sys.argv[1:5])
for limit, value in ((resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
                     (resource.RLIMIT_NOFILE, files), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (value, value))
code = sys.stdin.read()
del resource, sys, cpu_s, memory, size, files, limit, value
exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
"""


@dataclass(frozen=True)
class Limits:
    """Limits of one run."""

    timeout_s: float = 5.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 4096
    file_bytes: int = 1 << 20
    open_files: int = 16


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        kind: ``ok``, ``error`` (an exception, or killed by a limit), ``timeout`` or ``refused`` (never ran).
        output: standard output, or the last line of the error. Cut to ``output_bytes``.
    """

    kind: Literal["ok", "error", "timeout", "refused"]
    output: str


async def run_python(code: str, limits: Limits) -> Result:
    """Run ``code`` to its end, or to the end of ``timeout_s``. Errors of the code do not raise here."""
    problem = refusal(code)
    if problem is not None:
        return Result("refused", problem)
    with tempfile.TemporaryDirectory(prefix="slime_sandbox_") as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-B", "-c", _BOOT),
            # The CPU limit has whole seconds. One more, so that the timeout below fires first.
            *map(str, (int(limits.timeout_s) + 1, limits.memory_bytes, limits.file_bytes, limits.open_files)),
            cwd=folder,
            env={"PATH": "", "HOME": folder, "LANG": "C.UTF-8"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # A process group that _end kills as a whole.
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(limits.timeout_s):
                output, errors = await _talk(process, code, limits.output_bytes)
                status = await process.wait()
        except TimeoutError:
            return Result("timeout", f"TimeoutError: no result within {limits.timeout_s:g} s")
        finally:
            await _end(process)
    if status == 0:
        return Result("ok", output)
    # The last line of a traceback has the exception, without paths of this machine.
    lines = errors.strip().splitlines()
    return Result("error", lines[-1] if lines else f"killed by signal {-status}")


async def _talk(process: asyncio.subprocess.Process, code: str, most: int) -> tuple[str, str]:
    assert process.stdin is not None, "made with pipes"
    assert process.stdout is not None, "made with pipes"
    assert process.stderr is not None, "made with pipes"
    try:
        process.stdin.write(code.encode())
        await process.stdin.drain()
        process.stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it ended before it had read everything, and its status has the reason
    # Both at once: a full pipe of one stream would block the process while the other is read.
    output, errors = await asyncio.gather(_head(process.stdout, most), _tail(process.stderr, most))
    return output, errors


async def _head(stream: asyncio.StreamReader, most: int) -> str:
    """The first ``most`` bytes. The rest is read and dropped, so that the writer does not block."""
    kept, dropped = b"", 0
    while chunk := await stream.read(65536):
        room = most - len(kept)
        kept += chunk[:room]
        dropped += max(0, len(chunk) - room)
    text = kept.decode(errors="replace")
    return f"{text}... ({dropped} more bytes)" if dropped else text


async def _tail(stream: asyncio.StreamReader, most: int) -> str:
    kept = b""
    while chunk := await stream.read(65536):
        kept = (kept + chunk)[-most:]
    return kept.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process and all it may have started: they share its session's process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it is gone, and so is its group
    await process.wait()


def refusal(code: str) -> str | None:
    """The reason to refuse ``code``, or None."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error.args[0] if error.args else error}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            modules = []
        bad = next((name for name in modules if name.split(".")[0] in FORBIDDEN), None)
        if bad is not None:
            return f"ImportError: {bad} is not available here"
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            return f"NameError: {node.id} is not available here"
        # Double underscores lead from any object to forbidden modules.
        if isinstance(node, ast.Attribute) and node.attr.startswith("__"):
            return f"AttributeError: {node.attr} is not available here"
    return None
