"""A headless Chromium, driven from its command line: the page's elements after its scripts ran, and pictures of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """The command of Chromium. None if it is not installed (``apt-get install chromium``)."""
    return os.environ.get("CHROMIUM") or next((path for name in _NAMES if (path := shutil.which(name))), None)


def dom_of(url: str, wait_ms: int = 3000) -> str:
    """The document as it is after ``wait_ms`` of the page's own time."""
    return _run([f"--virtual-time-budget={wait_ms}", "--dump-dom", url])


def picture_of(url: str, path: Path, size: tuple[int, int], wait_ms: int = 3000) -> None:
    """A PNG of the page in a window of ``size``."""
    flags = [f"--screenshot={path.resolve()}", f"--window-size={size[0]},{size[1]}", "--hide-scrollbars"]
    _run([f"--virtual-time-budget={wait_ms}", *flags, url])


def seconds_until_painted(url: str) -> float:
    """Real seconds from the begin of the navigation until the page notes ``data-painted`` on its body.

    The command line of Chromium only knows a virtual clock, so this asks through its debugging port.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [*_flags(profile), "--remote-debugging-port=0", "about:blank"]
        process = subprocess.Popen([_command(), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return asyncio.run(asyncio.wait_for(_painted(Path(profile), url), _TIMEOUT_S))
        finally:
            process.kill()
            process.wait(_TIMEOUT_S)


async def _painted(profile: Path, url: str) -> float:
    async with aiohttp.ClientSession() as session:
        # Chromium writes the port into this file. Before the first newline the number may be incomplete.
        while not (place := profile / "DevToolsActivePort").is_file() or not place.read_text().count("\n"):
            await asyncio.sleep(0.05)
        port = place.read_text().splitlines()[0]
        async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
            page = next(item for item in await reply.json() if item["type"] == "page")
        async with session.ws_connect(page["webSocketDebuggerUrl"]) as socket:
            await _tell(socket, 1, "Page.navigate", url=url)
            while True:
                # Until the navigation commits, the script still runs in the blank page.
                expression = "location.href == 'about:blank' ? null : document.body?.dataset.painted ?? null"
                answer = await _tell(socket, 2, "Runtime.evaluate", expression=expression)
                if (painted := answer["result"].get("result", {}).get("value")) is not None:
                    return int(painted) / 1000
                await asyncio.sleep(0.05)


async def _tell(socket: Any, number: int, method: str, **parameters: Any) -> dict[str, Any]:
    await socket.send_json({"id": number, "method": method, "params": parameters})
    # Events of the page arrive in between. They have no id.
    while (answer := await socket.receive_json()).get("id") != number:
        pass
    return dict(answer)


def _command() -> str:
    command = find_chromium()
    if command is None:
        raise RuntimeError("there is no chromium; apt-get install chromium, or name one in CHROMIUM")
    return command


def _flags(profile: str) -> list[str]:
    # The sandbox does not work as root. /dev/shm of a container is often too small.
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
    return [*fixed, "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]


def _run(flags: list[str]) -> str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [_command(), *_flags(profile), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    return done.stdout
