"""Fixtures of the rollout tests: a fresh ``GenerateState``, and engines that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slime.rollout.sglang_rollout import GenerateState
from tests.unit.rollout.fake_engine import FakeEngine


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    GenerateState.clear_instances()
    yield
    GenerateState.clear_instances()


@pytest.fixture
def engine() -> Iterator[Callable[..., FakeEngine]]:
    """``engine(on_generate) -> FakeEngine``, any number of times."""
    servers: list[FakeEngine] = []

    def start(on_generate: Any = None) -> FakeEngine:
        servers.append(FakeEngine(on_generate))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
