"""Earlier responses are sent to the engines as drafts of the next ones."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.rollout.prompt_history import DraftHistory, prompt_key
from tests.unit.rollout.fake_engine import FakeEngine

SEPARATOR = -(2**31)


def sample(
    prompt: str, *response: int, steps: int = 1, status: str = "completed", ids: tuple[int, ...] = (1, 2)
) -> Sample:
    made = Sample(prompt=prompt, tokens=[*ids, *response], response_length=len(response), status=Sample.Status(status))
    made.spec_info.completion_token_num, made.spec_info.spec_verify_ct = len(response), steps
    return made


def keys(*prompts: str) -> list[bytes]:
    return [prompt_key(Sample(prompt=prompt)) for prompt in prompts]


def test_the_newest_responses_of_the_prompts_come_last_and_have_priority() -> None:
    history = DraftHistory()
    history.remember([sample("a", 10, 11), sample("a", 12), sample("a", 13, status="aborted"), sample("a")])
    history.remember([sample("b", 20)])
    history.remember([sample("a", 99, ids=(1, 2, 3))])  # a later turn of an agent
    assert history.corpus(keys("b", "a", "c", "a"), 100) == [
        *([SEPARATOR, 1, 2], [10, 11]),
        *([SEPARATOR, 1, 2], [12]),
        *([SEPARATOR, 1, 2], [20]),
    ]
    assert history.corpus(keys("a", "b"), 8) == [[SEPARATOR, 1, 2], [20], [SEPARATOR, 1, 2], [12]]
    assert history.corpus(keys("c"), 100) == []


def test_a_prompt_keeps_its_newest_responses_and_the_oldest_prompts_are_forgotten() -> None:
    history = DraftHistory(most_tokens=20)
    history.remember([sample("a", number) for number in range(30)])
    assert [chunk for chunk in history.corpus(keys("a"), 100) if chunk[0] != SEPARATOR] == [[n] for n in range(22, 30)]
    assert history.num_tokens == 2 + 8
    history.remember([sample("b", *range(7))])
    assert history.num_tokens == 19
    history.remember([sample("c", 1)])
    assert not history.corpus(keys("a"), 100)
    assert history.num_tokens == 9 + 3


class Corpora(FakeEngine):
    """Router and engine, which takes corpora or refuses them."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(lambda payload, number: (self.status, {"message": "full" if self.status != 200 else ""}))
        self.status = status

    @property
    def chunks(self) -> list[Any]:
        return [request.get("token_chunks") for request in self.requests]


def rollout(history: DraftHistory, engine: FakeEngine, *fetches: list[list[Sample]], port: int | None = None) -> None:
    args = Namespace(
        sglang_speculative_algorithm="NGRAM",
        sglang_speculative_ngram_external_corpus_max_tokens=None,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=port or engine.port,
    )

    async def run() -> None:
        submit: Callable[..., Any] = history.begin(args, lambda groups: [])
        for groups in fetches:
            submit([[Sample(prompt=entry.prompt)] for group in groups for entry in group[:1]])
        if history._sending is not None:
            await history._sending
        history.end([group for groups in fetches for group in groups])

    asyncio.run(run())


def test_engines_get_one_corpus_of_all_prompts_that_were_drawn() -> None:
    history = DraftHistory()
    with closing(Corpora()) as engine:
        rollout(history, engine, [[sample("a", 5)], [sample("b", 6)]])
        assert engine.requests == [], "there is no history"
        rollout(history, engine, [[sample("a", 7, 7)]], [[sample("b", 8, 8)], [sample("x", 9)]])
    assert {request["corpus_id"] for request in engine.requests} == {"slime"}
    of_a, of_b = ([SEPARATOR, 1, 2], [5]), ([SEPARATOR, 1, 2], [6])
    assert engine.chunks == [None, [*of_a], None, [*of_b, *of_a]], "the old corpus is removed first"


def test_drafts_that_do_not_help_are_forgotten() -> None:
    history = DraftHistory()
    with closing(Corpora()) as engine:
        rollout(history, engine, [[sample("a", 5, 5)]])
        rollout(history, engine, [[sample("a", 6, 6, steps=1)]])
        assert len(history.corpus(keys("a"), 100)) == 4, "two tokens per verification"
        rollout(history, engine, [[sample("a", 7, 7, steps=2)]])
        assert history.corpus(keys("a"), 100) == [[SEPARATOR, 1, 2], [7, 7]]
        assert history.num_tokens == 4


def test_after_a_refusal_nothing_is_kept_or_sent(caplog: pytest.LogCaptureFixture) -> None:
    history = DraftHistory()
    with closing(Corpora(status=400)) as engine, caplog.at_level(logging.INFO):
        for _ in range(3):
            rollout(history, engine, [[sample("a", 5)]])
        assert [chunks is None for chunks in engine.chunks] == [True, False]
    assert f'earlier responses are not sent to the engines: {engine.url}: {{"message": "full"}}' in caplog.text
    assert history.num_tokens == 0


def test_a_rollout_goes_on_when_router_or_engine_fail(caplog: pytest.LogCaptureFixture) -> None:
    history = DraftHistory()
    with closing(Corpora()) as engine:
        rollout(history, engine, [[sample("a", 5)]])
        rollout(history, engine, [[sample("a", 5)]], port=1)
        engine.status = 500
        rollout(history, engine, [[sample("a", 5)]])
        assert caplog.text.count("did not reach the engines") == 2
        rollout(history, engine, [[sample("a", 5)]])
        assert len(engine.requests) == 4, "the next rollout sends again"
