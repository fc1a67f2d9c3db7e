"""The order of prompts by expected length, and the time of the slowest samples."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.data.sample import Sample
from slime.rollout import prompt_history
from slime.rollout.prompt_history import LongTail, tail_time


def group(prompt: str, *lengths: int) -> list[Sample]:
    return [Sample(prompt=prompt, response_length=length) for length in lengths or (0,)]


def order(tail: LongTail, prompts: str, *, longest_first: bool = True) -> str:
    fetch = tail.begin(lambda count: [group(name) for name in prompts[:count]], longest_first=longest_first)
    return "".join(entry[0].prompt for entry in fetch(len(prompts)))


def test_prompts_are_generated_by_their_last_lengths_and_unknown_ones_as_the_mean() -> None:
    tail = LongTail()
    assert order(tail, "cab") == "cab", "without history the order stays"
    tail.end([group("a", 10, 30), group("b", 90), group("c", 1, 1)])
    assert order(tail, "acbx") == "bxac"
    tail.end([group("a", 500)])
    assert order(tail, "acbx") == "axbc"
    assert order(tail, "acbx", longest_first=False) == "acbx"
    tail.end([group("c", 9000)])
    assert order(tail, "acbx") == "axbc", "without the flag nothing is remembered"


def test_prompts_that_an_earlier_rollout_left_over_come_first() -> None:
    """With over-sampling, those of short responses would otherwise wait for ever."""
    tail = LongTail()
    order(tail, "")
    tail.end([group("a", 10), group("b", 20), group("c", 30)])

    def fetched(*samples: tuple[str, int]) -> list[int | None]:
        groups = [[Sample(prompt=name, index=index)] for name, index in samples]
        return [entry[0].index for entry in tail.begin(lambda _: groups, longest_first=True)(len(groups))]

    assert fetched(("a", 0), ("b", 1), ("c", 2)) == [2, 1, 0]
    assert fetched(("a", 0), ("b", 1), ("a", 3), ("b", 4), ("c", 5)) == [0, 1, 5, 4, 3]


def test_the_oldest_lengths_are_forgotten() -> None:
    tail = LongTail(most=2)
    order(tail, "")
    tail.end([group("a", 10), group("b", 20)])
    tail.end([group("a", 30), group("c", 40)])
    assert order(tail, "abc") == "cba", "b has no history and counts as the mean of a and c"


def test_prompts_of_messages_have_lengths_too() -> None:
    tail = LongTail()
    chats = [[{"role": "user", "content": name}] for name in "ab"]
    order(tail, "")
    tail.end([[Sample(prompt=chat, response_length=length)] for chat, length in zip(chats, (1, 2), strict=True)])
    fetch = tail.begin(lambda count: [[Sample(prompt=chat)] for chat in chats], longest_first=True)
    assert [entry[0].prompt for entry in fetch(2)] == chats[::-1]


def test_the_tail_is_the_time_after_95_percent_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tail_time([3.0]) == 0.0
    assert tail_time([*range(19), 60.0]) == 42.0
    assert tail_time([float(n) for n in reversed(range(100))]) == 5.0
    tail, now = LongTail(), iter([1.0, 2.0, 7.0])
    monkeypatch.setattr(prompt_history, "time", SimpleNamespace(monotonic=lambda: next(now)))
    tail.note_sample(counts=True)  # of an agent's server outside a rollout
    assert tail.end([]) == {}
    order(tail, "")
    for _ in range(3):
        tail.note_sample(counts=True)
        tail.note_sample(counts=False)
    assert tail.end([]) == {"perf/tail_time": 0.0}
    assert tail.end([]) == {}
