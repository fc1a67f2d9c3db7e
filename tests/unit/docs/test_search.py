"""The search of the built site in a headless Chromium: guides come before tables of all flags. Skipped without one."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from benchmarks.browser import Browser, find_chromium

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no chromium here: apt-get install chromium, or name one in CHROMIUM"
)
_ROOT = Path(__file__).parents[3]
_PAGES = "[...document.querySelectorAll('.md-search-result__item a')].map((link) => new URL(link.href).pathname)"


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=_ROOT, capture_output=True, check=True)
    handler = functools.partial(_Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def first_hit(browser: Browser, url: str, words: str) -> str:
    browser.value(f"void (location.href = '{url}/index.html?q={quote(words)}')")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if f"q={quote(words)}" in browser.value("location.href") and (hits := browser.value(_PAGES)):
            return str(hits[0])
    raise AssertionError(f"nothing is found for {words}")


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("tool", "/en/get_started/customization.html"),
        ("multi-turn", "/en/get_started/customization.html"),
        ("learning rate", "/optimizer.html"),
        ("progress bar", "/observability.html"),
        ("LoRA", "/algorithms/lora.html"),
        ("jupyter", "/en/get_started/usage.html"),
    ],
)
def test_the_first_hit_is_the_page_that_explains_it(browser: Browser, url: str, words: str, page: str) -> None:
    assert first_hit(browser, url, words) == page
