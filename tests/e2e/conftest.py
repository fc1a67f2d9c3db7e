"""The process with SGLang imported, from which the tests of single engines fork their servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.server_args import server_env
from tests.e2e import running
from tests.e2e.warm import Warm


@pytest.fixture(scope="session", autouse=True)
def _imports_are_done_once() -> Iterator[None]:
    running.warm.append(Warm(running.GIVEN))
    yield
    running.warm.pop().stop()


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("fork") / "log", server_env())
    yield server
    server.stop()
