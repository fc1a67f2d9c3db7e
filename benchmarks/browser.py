"""A headless Chromium, driven through its debugging port: values and pictures of a page after its scripts ran."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_TIMEOUT_S = 120.0


def find_chromium() -> str | None:
    """The command of Chromium. None if it is not installed (``apt-get install chromium``)."""
    return os.environ.get("CHROMIUM") or next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a Chromium without a window.

    Raises:
        RuntimeError: Chromium is not installed.
    """

    def __init__(self) -> None:
        command = find_chromium()
        if command is None:
            raise RuntimeError("there is no chromium; apt-get install chromium, or name one in CHROMIUM")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # The sandbox does not work as root. /dev/shm of a container is often too small.
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        flags += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
        flags += [f"--user-data-dir={self._profile.name}", "--remote-debugging-port=0", "about:blank"]
        self._process = subprocess.Popen([command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self._wait(self._connect())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._session.close())
        self._loop.close()
        self._process.kill()
        self._process.wait(_TIMEOUT_S)
        self._profile.cleanup()

    def open(self, url: str, size: tuple[int, int] = (1280, 900), theme: str = "light") -> None:
        """Load a page of the board. Returns when it is painted and waits for no answer."""
        self._tell(
            "Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False
        )
        self._tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        # Another address of the same page would not load it again.
        self._tell("Page.navigate", url="about:blank")
        self.seconds_until_painted(url)
        self.settle()

    def settle(self) -> None:
        """Wait until the page waits for no answer and has drawn the last one."""
        drawn = (
            "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(document.body.dataset.asking))))"
        )
        deadline = time.monotonic() + _TIMEOUT_S
        num_quiet = 0
        while num_quiet < 2 and time.monotonic() < deadline:
            num_quiet = num_quiet + 1 if self.value(drawn) == "0" else 0
            time.sleep(0.05)

    def seconds_until_painted(self, url: str) -> float:
        """Real seconds from the begin of the navigation until the page notes ``data-painted`` on its body."""
        self._tell("Page.navigate", url=url)
        # Until the navigation commits, the script still runs in the blank page.
        expression = "location.href == 'about:blank' ? null : document.body?.dataset.painted ?? null"
        deadline = time.monotonic() + _TIMEOUT_S
        while (painted := self.value(expression)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return int(painted) / 1000

    def value(self, expression: str) -> Any:
        """The JSON value of a script's expression, also of a promise."""
        answer = self._tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def allow(self, folder: Path) -> None:
        """Let the page save files in ``folder``, and write and read the clipboard, which needs the focus."""
        self._tell("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        self._tell("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        self._tell("Emulation.setFocusEmulationEnabled", enabled=True)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the left button at ``start``, move to ``end`` and release it there."""
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            self._tell("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path) -> None:
        """Write a PNG of the page as large as its window."""
        path.write_bytes(base64.b64decode(self._tell("Page.captureScreenshot", format="png")["data"]))

    def _wait(self, work: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, _TIMEOUT_S))

    def _tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        async def exchange() -> dict[str, Any]:
            self._number += 1
            await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
            # Events of the page arrive in between. They have no id.
            while (answer := await self._socket.receive_json()).get("id") != self._number:
                pass
            if "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            return dict(answer["result"])

        return dict(self._wait(exchange()))

    async def _connect(self) -> None:
        # Chromium writes the port into this file. Before the first newline the number may be incomplete.
        place = Path(self._profile.name) / "DevToolsActivePort"
        while not place.is_file() or not place.read_text().count("\n"):
            await asyncio.sleep(0.05)
        port = place.read_text().splitlines()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as reply:
            page = next(item for item in await reply.json() if item["type"] == "page")
        # A picture is larger than the default limit of a message.
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)


def dom_of(url: str) -> str:
    """The document after the page's scripts ran."""
    with Browser() as browser:
        browser.open(url)
        return str(browser.value("document.documentElement.outerHTML"))
