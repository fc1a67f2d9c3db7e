"""A sandbox in a container of this machine, through the ``docker`` command (or ``podman``)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import subprocess
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from slime.agent.sandbox import BaseSandbox, CommandRefused, ExecResult, FileContent
from slime.utils.errors import ConfigError, DeadlineExceeded

_START_TIMEOUT_S = 600  # the image may have to be fetched
_FILE_TIMEOUT_S = 120
_LINGER_S = 5  # of a command after SIGTERM
# Output of a command that is kept in memory. More ends the command.
_MOST_BYTES = 256 << 20
_LONGEST_COMMAND = (128 << 10) - 1  # of one word of a command line, on Linux
# Variables for the container that would change the behavior of the client on this machine.
_READ_BY_THE_CLIENT = ("PATH", "HOME", "XDG_", "LD_", "DOCKER_", "CONTAINER", "PODMAN_")
_building: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)


def built_image(folder: Path, timeout_s: float, command: str = "docker") -> str:
    """The image of the Dockerfile in ``folder``. This process builds it once, also for callers at the same time.

    Raises:
        ConfigError: there is no Dockerfile, or it cannot be built.
    """
    with _building[folder]:
        return _build(folder, timeout_s, command)


@functools.lru_cache(maxsize=1024)
def _build(folder: Path, timeout_s: float, command: str) -> str:
    # Another process builds again, but the builder keeps layers, so that is quick.
    if not (folder / "Dockerfile").is_file():
        raise ConfigError(f"{folder}: there is no Dockerfile in it, and no other image is named: give one of them")
    words = [command, "build", "--quiet", str(folder)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{folder}: {command} build took more than its limit of {timeout_s:g} s") from None
    if done.returncode != 0:
        raise ConfigError(f"{folder}: {command} build ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()


class DockerSandbox(BaseSandbox):
    """Implements :class:`slime.agent.sandbox.Sandbox`.

    Args:
        image: must have bash, and ``timeout`` of coreutils or busybox.
        timeout: seconds after which the container ends, even if this process has died.
        command: the program that runs containers.
        run_args: further words for ``docker run``, such as ``("--network=host",)`` so that the adapter of this machine
            is reached, or limits of memory and processes.
    """

    def __init__(
        self, image: str, *, timeout: int = 3600, command: str = "docker", run_args: Sequence[str] = ()
    ) -> None:
        self.image = image
        self.timeout = timeout
        self.command = command
        self.run_args = tuple(run_args)
        self._id = ""

    @property
    def sandbox_id(self) -> str:
        return self._id

    async def __aenter__(self) -> DockerSandbox:
        # The entry point of an image would take `sleep` as one of its arguments.
        program = ["--entrypoint", "sleep", self.image, str(self.timeout)]
        # --rm: the container is removed when ``sleep`` ends. --init: orphaned processes of the agent are reaped.
        code, out, err = await self._run(
            ["run", "--detach", "--rm", "--init", *self.run_args, *program], _START_TIMEOUT_S
        )
        if code != 0:
            raise RuntimeError(f"{self.command} run {self.image} ended with {code}: {err[-500:]}")
        self._id = out.strip().splitlines()[-1]
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        if self._id:
            await self._run(["rm", "--force", self._id], _FILE_TIMEOUT_S)
            self._id = ""

    @property
    def label(self) -> str:
        return f"container {self._id[:12]}"

    async def _exec(self, cmd: str, *, user: str, env: dict[str, str], timeout: int, idempotent: bool) -> ExecResult:
        # Every user of this machine can read command lines, so they hold the names of variables, not the values.
        hidden = {name: value for name, value in env.items() if not name.startswith(_READ_BY_THE_CLIENT)}
        shown = [name if name in hidden else f"{name}={value}" for name, value in env.items()]
        variables = [word for variable in shown for word in ("--env", variable)]
        if "\0" in cmd or len(cmd.encode(errors="replace")) > _LONGEST_COMMAND:
            raise CommandRefused(f"a command has no character 0, and at most {_LONGEST_COMMAND} bytes: {cmd[:200]!r}")
        # Ends the command when the wait below has ended: a killed client leaves it running in the container.
        limit = ["timeout", "-k", str(_LINGER_S), str(timeout + 1)]
        words = ["exec", "--user", user, *variables, self._id, *limit, "bash", "-c", cmd]
        return await self._run(words, timeout, env=hidden)

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        data = content.read_bytes() if isinstance(content, Path) else content
        folder, place = shlex.quote(str(PurePosixPath(path).parent)), shlex.quote(path)
        words = ["exec", "--interactive", "--user", user, self._id, "bash", "-c", f"mkdir -p {folder} && cat > {place}"]
        code, _, err = await self._run(words, _FILE_TIMEOUT_S, data.encode() if isinstance(data, str) else data)
        if code != 0:
            raise RuntimeError(f"{self.label}: {path} could not be written: {err[-500:]}")

    async def read_file(self, path: str, *, user: str = "root") -> str:
        code, out, err = await self.exec(f"cat {shlex.quote(path)}", user=user, timeout=_FILE_TIMEOUT_S)
        if code != 0:
            raise FileNotFoundError(f"{self.label}: {path}: {err.strip()}")
        return out

    async def _run(
        self, words: Sequence[str], timeout: float, data: bytes = b"", env: Mapping[str, str] | None = None
    ) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            self.command,
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | dict(env or {}),
        )
        try:
            out, err = await asyncio.wait_for(_communicate(process, data), timeout)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.command} {words[0]} took more than {timeout} s: {words[-1][:200]}") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.communicate()  # the process only ends after its output is read
        assert process.returncode is not None
        if max(len(out), len(err)) > _MOST_BYTES:
            raise CommandRefused(
                f"{self.command} {words[0]} wrote more than {_MOST_BYTES >> 20} MiB: {words[-1][:200]}"
            )
        return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")


async def _communicate(process: asyncio.subprocess.Process, data: bytes) -> tuple[bytes, bytes]:
    """Return (stdout, stderr) like ``process.communicate``, but kill a process whose output exceeds the limit."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    out, err, _ = await asyncio.gather(
        _read(process.stdout, process), _read(process.stderr, process), _write(process.stdin, data)
    )
    await process.wait()
    return out, err


async def _read(stream: asyncio.StreamReader, process: asyncio.subprocess.Process) -> bytes:
    read = bytearray()
    while part := await stream.read(1 << 16):
        if len(read) <= _MOST_BYTES:
            read += part
        elif process.returncode is None:
            # Reading continues to the end of the stream: the process ends only after its output is read.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return bytes(read)


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the process does not read its input
        stream.write(data)
        await stream.drain()
    stream.close()
