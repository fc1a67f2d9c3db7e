"""A sandbox for trying an example on a machine without containers: a temporary directory. It isolates nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from slime.agent.sandbox import BaseSandbox, ExecResult, FileContent
from slime.utils.errors import DeadlineExceeded

__all__ = ["LocalSandbox"]


class LocalSandbox(BaseSandbox):
    """Implements :class:`slime.agent.sandbox.Sandbox`. Paths are relative, and users are ignored.

    Args:
        image: directory that is copied.
    """

    def __init__(self, image: str) -> None:
        self.image = image
        self.root = Path()

    @property
    def sandbox_id(self) -> str:
        return self.root.name

    async def __aenter__(self) -> LocalSandbox:
        self.root = Path(tempfile.mkdtemp(prefix="slime-sandbox-"))
        await asyncio.to_thread(shutil.copytree, self.image, self.root, dirs_exist_ok=True)
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await asyncio.to_thread(shutil.rmtree, self.root, ignore_errors=True)

    @property
    def label(self) -> str:
        return f"sandbox {self.sandbox_id}"

    async def _exec(self, cmd: str, *, user: str, env: dict[str, str], timeout: int, idempotent: bool) -> ExecResult:
        # Not the whole environment: it may hold keys of the run.
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.root), **env}
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", cmd),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.root,
            env=environment,
            # Makes the process the leader of a group, which killpg below ends as a whole.
            start_new_session=True,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout)
        except TimeoutError:
            raise DeadlineExceeded(f"{cmd[:200]!r} took more than {timeout} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has started
        assert process.returncode is not None
        return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        data = content.read_bytes() if isinstance(content, Path) else content
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data.encode() if isinstance(data, str) else data)

    async def read_file(self, path: str, *, user: str = "root") -> str:
        return self._place(path).read_text()

    def _place(self, path: str) -> Path:
        # Resolved: ".." and symbolic links of the agent must not lead out of the directory.
        place = (self.root / path).resolve()
        if not place.is_relative_to(self.root.resolve()):
            raise ValueError(f"{path} is outside of the sandbox: a local sandbox takes relative paths")
        return place
