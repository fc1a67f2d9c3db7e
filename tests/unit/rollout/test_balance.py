"""Requests leave the queue of an engine that lags."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from slime.rollout import direct_engines
from slime.rollout.direct_engines import Load, keep_balanced, moves
from slime.rollout.engine_request import EngineRequest
from slime.utils import http_utils


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([("a", 16, 59), ("b", 0, 0)], [("a", 32)]),
        ([("a", 16, 5), ("b", 0, 0)], [("a", 5)]),
        ([("a", 16, 59), ("b", 16, 0), ("c", 16, 30)], [("a", 24), ("c", 10)]),
        ([("a", 16, 8), ("b", 14, 0)], []),  # the router would send them back
        ([("a", 16, 59), ("b", 16, 1)], []),  # no engine has room
        ([("a", 16, 0), ("b", 2, 0)], []),  # nothing waits
        ([], []),
    ],
)
def test_half_of_the_difference_leaves_a_queue(loads: list[Any], expected: list[Any]) -> None:
    assert moves([Load(*load) for load in loads]) == expected


class Fleet:
    """Router and two engines. ``slow`` runs one request, and has the others in its queue.

    Args:
        names: ids of the requests under way. Those of the fast engine are x, y and z. A user's function sent u.
    """

    def __init__(self, names: str) -> None:
        self.requests = {
            EngineRequest("", {}, None, [f"lost-{name}", name], session_id="" if name == "u" else name): None
            for name in names
        }
        self.at_slow = [name for name in names if name not in "xyz"]
        self.told: list[str] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/workers":
            others = [{"url": "http://prefill", "worker_type": "prefill"}, {"url": "http://starts"}]
            return httpx.Response(200, json={"workers": [{"url": "http://slow"}, {"url": "http://fast"}, *others]})
        if request.url.path == "/v1/loads":
            assert request.url.host != "prefill"
            if request.url.host == "starts":
                return httpx.Response(503)
            count = len(self.at_slow) if request.url.host == "slow" else 0
            half = {"num_running_reqs": min(1, count), "num_waiting_reqs": max(0, count - 1)}
            return httpx.Response(200, json={"loads": [half, {"num_running_reqs": 0, "num_waiting_reqs": 0}]})
        assert str(request.url) == "http://slow/abort_request", "the fast engine has no queue"
        rid = json.loads(request.content)["rid"]
        self.told.append(rid)
        if rid in self.at_slow:
            self.at_slow.remove(rid)
            self.requests.pop(next(one for one in self.requests if one.rids[-1] == rid))
        return httpx.Response(200)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fleet, int], None]:
    """``keep_balanced`` for a number of rounds."""
    monkeypatch.setattr(direct_engines, "_EVERY_S", 0.01)
    monkeypatch.setattr(direct_engines, "_REPLY_PAUSE_S", 0.0)
    monkeypatch.setattr(direct_engines, "_LEAST_DIFFERENCE", 2)

    async def some_rounds(fleet: Fleet, rounds: int) -> None:
        seen = 0

        def answer(request: httpx.Request) -> httpx.Response:
            nonlocal seen
            seen += request.url.path == "/workers"
            if seen > rounds:
                task.cancel()
            return fleet.answer(request)

        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            monkeypatch.setattr(http_utils, "_http_client", client)
            task = asyncio.create_task(keep_balanced("http://router/workers", fleet.requests))
            await asyncio.wait([task])

    return lambda fleet, rounds: asyncio.run(some_rounds(fleet, rounds))


def test_the_newest_requests_of_the_slow_engine_move_until_the_engines_are_nearly_equal(run: Any) -> None:
    fleet = Fleet("abcdefxgy")
    run(fleet, 1)
    # Of 7 requests 2 move. Those of the other engine are asked for, too.
    assert sorted(fleet.told) == ["f", "g", "x", "y"]
    run(fleet, 2)
    assert "".join(fleet.at_slow) == "abc", "then the router would send them back"


def test_requests_of_users_functions_stay(run: Any) -> None:
    fleet = Fleet("uuuuuuuu")
    run(fleet, 3)
    assert fleet.told == []


def test_a_sample_moves_three_times_at_most(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, sent_back = Fleet("abcdef"), Fleet.answer

    def answer(self: Fleet, request: httpx.Request) -> httpx.Response:
        """The router sends each request back to the slow engine, under another id."""
        before = set(self.requests)
        reply = sent_back(self, request)
        for gone in before - set(self.requests):
            again = f"{gone.session_id}{len(self.told)}"
            self.requests[EngineRequest("", {}, None, [again], session_id=gone.session_id)] = None
            self.at_slow.append(again)
        return reply

    monkeypatch.setattr(Fleet, "answer", answer)
    run(fleet, 30)
    assert Counter(rid[0] for rid in fleet.told) == dict.fromkeys("abcdef", 3)
