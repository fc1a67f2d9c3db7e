"""The fork server of all multi-process tests, and the table of their comparisons."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.comparison import ComparisonTable
from tests.dist.ranks import ForkServer


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """``ranks.run("tests.dist.module:function", world_size, argument=...)``."""
    server = ForkServer(tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def table() -> Iterator[ComparisonTable]:
    comparisons = ComparisonTable()
    yield comparisons
    comparisons.close()
