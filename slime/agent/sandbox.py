"""Sandboxes, in which the commands of agents run: the protocol, long commands, and a client of E2B.

Called by harnesses and users' generate functions. A command of minutes is not one remote call: :func:`exec_and_wait`
starts it, and polls for the file that marks its end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from slime.utils.errors import DeadlineExceeded, translated

logger = logging.getLogger(__name__)

ExecResult: TypeAlias = tuple[int, str, str]
"""(exit code, stdout, stderr)"""
FileContent: TypeAlias = "str | bytes | Path"
"""Text, bytes, or the path of a file on this machine."""
Result = TypeVar("Result")

EXIT_TIME_BUDGET_EXCEEDED = -1
HOMES = PurePosixPath("/home")
AGENT_HOME = str(HOMES / "agent")
_POLL_S = 5
_TAIL_BYTES = 512
# Longest pause before the first repetition, and before any.
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 1.0, 32.0
_CREATE_TIMEOUT_S = 600.0  # the image may have to be fetched
_CALL_TIMEOUT_S = 120.0


class CommandRefused(RuntimeError):
    """A command that cannot run, or wrote too much. The sandbox goes on."""


@runtime_checkable
class Sandbox(Protocol):
    """A separate machine for one agent. The async context manager creates and destroys it."""

    @property
    def sandbox_id(self) -> str: ...

    async def __aenter__(self) -> Sandbox: ...

    async def __aexit__(self, *exc_info: Any) -> None: ...

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: int = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> ExecResult:
        """Run ``cmd`` in bash.

        Args:
            timeout: seconds.
            check: a non-zero exit raises RuntimeError.
            idempotent: whether it may be sent again after a connection error.
        """
        ...

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None: ...

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """Raises FileNotFoundError if the file cannot be read."""
        ...


class BaseSandbox(ABC):
    """Implements :meth:`Sandbox.exec` with the call of a backend."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Kind and id, for errors."""

    @abstractmethod
    async def _exec(self, cmd: str, *, user: str, env: dict[str, str], timeout: int, idempotent: bool) -> ExecResult:
        """Run ``cmd`` in bash. Arguments are those of :meth:`Sandbox.exec`."""

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: int = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> ExecResult:
        code, out, err = await self._exec(cmd, user=user, env=env or {}, timeout=timeout, idempotent=idempotent)
        if check and code != 0:
            raise RuntimeError(f"{self.label}: {cmd[:200]!r} ended with {code}: {(err or out)[-500:]}")
        return code, out, err


async def exec_and_wait(
    sb: Sandbox,
    *,
    cmd: str,
    time_budget_sec: int,
    tag: str,
    user: str = "root",
    env: dict[str, str] | None = None,
    workdir: str | None = None,
    out_file: str | None = None,
    want_output: bool = False,
) -> tuple[int, str]:
    """Run a long command. Runs under the same ``tag`` in the same sandbox must not overlap.

    Returns:
        (exit code, output). The code is ``EXIT_TIME_BUDGET_EXCEEDED`` when it was still running after
        ``time_budget_sec`` seconds. The output is the whole of ``out_file`` with ``want_output``; else "" after
        success and the last 512 bytes after a failure.
    """
    launcher, lock, done = f"/tmp/.{tag}.sh", f"/tmp/.{tag}.spawned", f"/tmp/.{tag}.done"
    out = out_file or f"/tmp/.{tag}.out"
    home = "/root" if user == "root" else str(HOMES / user)
    enter = f"cd {shlex.quote(workdir)} || exit 1\nexport HOME={home}\n" if workdir else ""
    # A subshell, so that an `exit` in the command does not skip the marker.
    script = f"#!/bin/bash\nmkdir -p {lock}/started\n(\n{enter}{cmd}\n)\necho $? > {done}\n"
    await sb.write_file(launcher, script, user=user)
    # A separate call, not under the lock: a lock left by an earlier run would skip it.
    await sb.exec(f"rm -rf {lock} {shlex.quote(out)} {done}", user="root", check=True)
    # mkdir is atomic: a call that is sent again finds the lock and does not start the command twice. setsid: the
    # command outlives this call, which must not end before: a sandbox may kill the processes that are left.
    await sb.exec(
        f"chmod +x {launcher}; mkdir {lock} 2>/dev/null || exit 0; "
        f"setsid bash {launcher} < /dev/null > {shlex.quote(out)} 2>&1 & "
        f"until test -d {lock}/started; do sleep 0.1; done",
        user=user,
        env=env,
        check=True,
    )
    code = await _await_done_marker(sb, done, time_budget_sec)
    if want_output:
        return code, await sb.read_file(out)
    if code == 0:
        return code, ""
    _, tail, _ = await sb.exec(f"tail -c {_TAIL_BYTES} {shlex.quote(out)}")
    return code, tail


async def _await_done_marker(sb: Sandbox, done: str, time_budget_sec: int) -> int:
    """The exit code in the marker file. The budget limits both the elapsed time and the sum of the pauses."""
    end, slept = time.monotonic() + time_budget_sec, 0
    while True:
        code, text, _ = await sb.exec(f"test -f {done} && cat {done}")
        # The marker is empty while the shell writes it.
        if code == 0 and text.strip():
            return int(text.strip())
        if slept >= time_budget_sec or time.monotonic() >= end:
            return EXIT_TIME_BUDGET_EXCEEDED
        await asyncio.sleep(min(_POLL_S, time_budget_sec - slept))
        slept += _POLL_S


async def write_folder(sb: Sandbox, path: str, folder: Path) -> None:
    """Copy the files of ``folder`` on this machine to ``path``. They lose their modes."""
    for place, _, names in os.walk(folder):
        for name in names:
            file = Path(place, name)
            await sb.write_file(f"{path}/{file.relative_to(folder).as_posix()}", file)


async def ensure_agent_user(sb: Sandbox, workdir: str) -> None:
    """Create a user ``agent`` who owns ``workdir``, because agents' programs refuse to run as root."""
    place = shlex.quote(workdir)
    await sb.exec(
        "id agent >/dev/null 2>&1 || useradd -m -s /bin/bash agent; "
        f"chown -R agent:agent {AGENT_HOME} {place}; "
        "git config --system --add safe.directory '*' || true",
        timeout=60,
    )
    await sb.exec("id agent", check=True, timeout=60)


def _getenv(*names: str, default: str = "") -> str:
    """The first of these variables that is set and not empty."""
    return next((value for name in names if (value := os.environ.get(name))), default)


_TRANSIENT = frozenset(
    (
        *("ProtocolError", "LocalProtocolError", "RemoteProtocolError", "SSLError", "PoolTimeout"),
        *("ConnectError", "ReadError", "WriteError", "ConnectTimeout", "ReadTimeout", "WriteTimeout"),
    )
)
_FINAL_KINDS = frozenset({"NotFoundException", "InvalidArgumentException", "NotEnoughSpaceException"})
_OVER_LIMIT = "exceeding 'timeout'"  # in the text of e2b's error for a command
# Errors after which the sandbox does not come back.
_FINAL_SANDBOX_ERRORS = ("does not exist", "STOPPED state")


class E2BSandbox(BaseSandbox):
    """A sandbox of a service that speaks E2B's protocol. Needs the package ``e2b``.

    Connection errors are retried, at growing random intervals, unless a command is not idempotent.

    Args:
        image: container image, handed over as metadata.
        timeout: seconds that the sandbox lives: ``SLIME_AGENT_SANDBOX_LIFETIME_SEC``, else 3600.
        image_metadata_key: ``SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY``, required. The size goes under ``<prefix>/size``.
        rpc_retries: ``SLIME_AGENT_SANDBOX_RPC_RETRIES``, else 6.
        size: ``SLIME_AGENT_E2B_SANDBOX_SIZE``, else "md".

    Raises:
        RuntimeError: on entering, without a metadata key.
    """

    def __init__(
        self,
        image: str,
        *,
        timeout: int | None = None,
        image_metadata_key: str | None = None,
        rpc_retries: int | None = None,
        size: str | None = None,
    ) -> None:
        self.image = image
        self.timeout = timeout or int(
            _getenv("SLIME_AGENT_SANDBOX_LIFETIME_SEC", "SWE_SANDBOX_LIFETIME_SEC", default="3600")
        )
        self.image_metadata_key = image_metadata_key or _getenv(
            "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "SWE_SANDBOX_IMAGE_METADATA_KEY"
        )
        default_retries = _getenv("SLIME_AGENT_SANDBOX_RPC_RETRIES", "SWE_RPC_RETRIES", default="6")
        self.rpc_retries = int(default_retries) if rpc_retries is None else rpc_retries
        self.size = size or _getenv("SLIME_AGENT_E2B_SANDBOX_SIZE", "SWE_E2B_SANDBOX_SIZE", default="md")
        self._sandbox: Any = None

    @property
    def sandbox_id(self) -> str:
        return str(self._sandbox.sandbox_id) if self._sandbox is not None else ""

    async def __aenter__(self) -> E2BSandbox:
        if not self.image_metadata_key:
            raise RuntimeError(
                "the sandbox service must be told the image: set SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY to the "
                "metadata key that it reads it from"
            )
        from e2b import AsyncSandbox

        prefix = self.image_metadata_key.rpartition("/")[0]
        metadata = {self.image_metadata_key: self.image, f"{prefix}/size" if prefix else "size": self.size}
        self._sandbox = await self._call(
            lambda: AsyncSandbox.create(timeout=self.timeout, metadata=metadata), timeout_s=_CREATE_TIMEOUT_S
        )
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        if self._sandbox is not None:
            try:
                await self._call(self._sandbox.kill, idempotent=False)
            except DeadlineExceeded as error:  # the error of the block is more important
                logger.warning("%s; it ends by itself %d s after its start", error, self.timeout)
            self._sandbox = None

    @property
    def label(self) -> str:
        return f"sandbox {self.sandbox_id}"

    async def _exec(self, cmd: str, *, user: str, env: dict[str, str], timeout: int, idempotent: bool) -> ExecResult:
        async def run() -> ExecResult:
            try:
                result = await self._sandbox.commands.run(cmd, user=user, envs=env, timeout=timeout)
            except Exception as error:
                if type(error).__name__ == "TimeoutException" and _OVER_LIMIT in str(error):
                    raise DeadlineExceeded(f"{self.label}: a command took more than {timeout} s: {cmd[:200]}") from None
                if not hasattr(error, "exit_code"):
                    raise
                result = error  # e2b raises for a non-zero exit, with the fields of a result
            return int(result.exit_code), str(result.stdout or ""), str(result.stderr or "")

        # The service ends the command itself after ``timeout``. The rest is for the connection.
        return await self._call(run, idempotent, timeout_s=timeout + _CALL_TIMEOUT_S)

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        data = content.read_bytes() if isinstance(content, Path) else content
        await self._call(lambda: self._sandbox.files.write(path, data, user=user))

    async def read_file(self, path: str, *, user: str = "root") -> str:
        with translated(lambda error: FileNotFoundError(f"{self.label}: {path}: {error}")):
            return str(await self._call(lambda: self._sandbox.files.read(path, user=user)))

    async def _call(
        self, function: Callable[[], Awaitable[Result]], idempotent: bool = True, timeout_s: float | None = None
    ) -> Result:
        timeout_s, attempt = timeout_s or _CALL_TIMEOUT_S, 0
        while True:
            limit = asyncio.timeout(timeout_s)
            try:
                async with limit:
                    return await function()
            except Exception as error:
                if limit.expired():
                    sandbox = f"sandbox {self.sandbox_id}" if self._sandbox is not None else f"sandbox of {self.image}"
                    raise DeadlineExceeded(f"{sandbox}: the service did not answer in {timeout_s:g} s") from None
                if not idempotent or attempt >= self.rpc_retries or not _is_transient(error):
                    raise
            # Random: calls that failed together must not be sent again together.
            await asyncio.sleep(random.SystemRandom().uniform(0, min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2**attempt)))
            attempt += 1


def _is_transient(error: Exception) -> bool:
    """Compares class names, because the classes belong to packages that need not be installed."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if "SandboxException" in names:
        return not names & _FINAL_KINDS and not any(text in str(error) for text in _FINAL_SANDBOX_ERRORS)
    return bool(names & _TRANSIENT)
