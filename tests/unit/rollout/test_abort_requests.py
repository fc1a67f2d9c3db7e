"""Requests to engines at the end of a rollout while an evaluation goes on there."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from slime.rollout import collect, engine_request
from slime.rollout.engine_request import EngineRequest


class Engines:
    """Two engines in place of ``get`` and ``post``. They count requests and the requests in progress at once."""

    def __init__(self, rounds: int) -> None:
        self.rounds_left = rounds
        self.over = asyncio.Event()
        self.told: Counter[tuple[str, str]] = Counter()
        self.running = self.most_running = 0

    async def get(self, url: str, **_: Any) -> dict[str, Any]:
        self.rounds_left -= 1
        if self.rounds_left == 0:
            self.over.set()
        return {"workers": [{"url": "one"}, {"url": "two"}]}

    async def post(self, url: str, body: dict[str, Any], **_: Any) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        self.told[url, body["rid"]] += 1


def test_lost_attempts_are_aborted_once_and_the_last_of_each_request_in_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [EngineRequest("", {}, None, [f"lost-{i}", f"last-{i}"]) for i in range(100)]

    async def end() -> Engines:
        engines = Engines(rounds=3)
        monkeypatch.setattr(engine_request, "get", engines.get)
        monkeypatch.setattr(engine_request, "post", engines.post)
        monkeypatch.setattr(collect, "_REPEAT_S", 0.001)
        task = asyncio.create_task(engines.over.wait())
        await collect.end_tasks([task], "http://router/workers", 10.0, requests=requests)  # type: ignore[list-item]
        return engines

    engines = asyncio.run(end())
    assert engines.most_running == 64
    for url in ("one/abort_request", "two/abort_request"):
        assert {engines.told[url, f"lost-{i}"] for i in range(100)} == {1}
        assert {engines.told[url, f"last-{i}"] for i in range(100)} == {3}
