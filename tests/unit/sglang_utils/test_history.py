"""Drafts from finished responses to the same prompt."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from slime.backends.sglang_utils.cpu_platform.history import Cursor, History

PROMPT, OTHER = [7, 8], [8, 7]


def history_of(*responses: Sequence[int], prompt: Sequence[int] = PROMPT, most_tokens: int = 1000) -> History:
    """The last one is the newest."""
    found = History(most_tokens)
    for response in responses:
        found.add(found.begin(prompt), response)
    return found


def follow(history: History, cursor: Cursor, response: Sequence[int], width: int = 8) -> list[int]:
    """Decode ``response``, whose tokens the model samples. Returns the tokens that each step gains."""
    done, gains = array("q", response[:1]), []
    while len(done) < len(response):
        draft = list(history.draft(cursor, done, min(width - 1, len(response) - len(done) - 1)))
        wanted = list(response[len(done) :])
        accepted = 0
        while accepted < len(draft) and draft[accepted] == wanted[accepted]:
            accepted += 1
        history.note(cursor, len(draft), accepted)
        done.extend(wanted[: accepted + 1])
        gains.append(accepted + 1)
    return gains


def test_a_repeated_response_is_drafted_in_growing_steps() -> None:
    response = list(range(20, 44))
    history = history_of([1, 2, 3], response, [5, 6])
    assert follow(history, history.begin(PROMPT), response) == [3, 5, 8, 7]
    assert follow(history, history.begin(OTHER), response) == [1] * 23


def test_a_draft_continues_after_a_difference() -> None:
    old = list(range(20, 60))
    new = [*old[:10], 3, *old[11:]]
    gains = follow(history := history_of(old), history.begin(PROMPT), new)
    assert sum(gains) == 39
    assert len(gains) < 15


def test_a_long_response_that_resembles_nothing_is_looked_up_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = 0
    find = History._find

    def count(history: History, cursor: Cursor, response: array[int]) -> None:
        nonlocal searches
        searches += 1
        find(history, cursor, response)

    monkeypatch.setattr(History, "_find", count)
    history = history_of(list(range(1000)), list(range(500, 1000)), most_tokens=2000)
    cursor = history.begin(PROMPT)
    response = [*range(2000, 3000), *range(500, 900)]
    gains = follow(history, cursor, response)
    assert gains[:999] == [1] * 999
    assert searches < 40
    # and what does resemble one is found later
    assert len(gains) < 999 + 400


def test_the_newest_response_is_drafted() -> None:
    history = history_of([1, 2, 3], [1, 4, 5])
    assert list(history.draft(history.begin(PROMPT), array("q", [1]), 7)) == [4, 5]


def test_a_sequence_whose_drafts_always_fail_gets_no_more() -> None:
    generator = random.Random(0)
    history = history_of([1, *(generator.choice([2, 3]) for _ in range(100))])
    cursor = history.begin(PROMPT)
    drafted = 0
    done = array("q", [1])
    for _ in range(20):
        draft = history.draft(cursor, done, 7)
        drafted += len(draft)
        history.note(cursor, len(draft), 0)
        done.append(1)
    assert 0 < drafted <= 6


def test_the_oldest_prompts_are_forgotten_when_memory_is_full() -> None:
    history = history_of([1, 2, 3, 4], most_tokens=10)
    history.add(history.begin(OTHER), [1, 2, 3, 4])
    history.add(history.begin([9]), [1, 2, 3, 4])
    drafts = [list(history.draft(history.begin(prompt), array("q", [1]), 7)) for prompt in (PROMPT, OTHER, [9])]
    assert drafts == [[], [2, 3], [2, 3]]
    assert history.num_tokens == 8


def test_a_prompt_keeps_its_newest_responses() -> None:
    history = history_of(*([number, number + 1] for number in range(40)))
    assert history.num_tokens == 64
    assert not history.draft(history.begin(PROMPT), array("q", [2]), 7)
    assert list(history.draft(history.begin(PROMPT), array("q", [39]), 7)) == [40]
