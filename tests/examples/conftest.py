"""Each example has a separate model. Nothing of one test's tokenizer may reach the next test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def fresh_generate_state() -> Iterator[None]:
    from slime.rollout.sglang_rollout import GenerateState

    GenerateState.clear_instances()
    yield
    GenerateState.clear_instances()
