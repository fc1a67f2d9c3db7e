"""Prompts that are read while they are drawn: the order, the position, and who prepares them."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.data.prepare import PromptMaker, prepare
from slime.data.prompts import Dataset, StreamingDataset, open_prompts, shuffled
from slime.data.sample import Sample
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.errors import DataError
from tests.unit.config.tiny_command import make_command
from tests.unit.data.plain_tokenizer import PlainTokenizer
from tests.unit.rollout.fake_engine import make_args

NUM_ROWS = 300


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """300 prompts. Every fifth is much longer than the others."""
    texts = [str(i) + "x" * (50 if i % 5 == 4 else 0) for i in range(NUM_ROWS)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "label": text[:3]}) + "\n" for text in texts))
    return str(path)


def stream(path: str, tokenizer: Any = None, *, max_length: int | None = 10, **settings: Any) -> StreamingDataset:
    maker, read = open_prompts(
        path, PromptMaker(tokenizer or PlainTokenizer(), max_length=max_length, prompt_key="prompt")
    )
    values: dict[str, Any] = {"name": path, "seed": 3, "shuffles": True, "buffer_size": 40}
    return StreamingDataset(read, maker, **(values | settings))


def numbers(samples: list[Sample]) -> list[int]:
    return [int(str(sample.prompt).rstrip("x")) for sample in samples]


SHORT = [i for i in range(NUM_ROWS) if i % 5 != 4]


def test_without_shuffle_rows_come_as_they_stand_in_the_file(rows: str) -> None:
    data = stream(rows, shuffles=False)
    drawn = data.draw(250)
    assert numbers(drawn) == (SHORT + SHORT)[:250]
    assert drawn[2].label == "2"
    assert (data.epoch_id, data.offset) == (1, 12)  # the 10th short row of the epoch is row 12


def test_every_epoch_holds_every_short_prompt_once_in_an_order_of_its_own(rows: str) -> None:
    data = stream(rows)
    first, second = numbers(data.draw(len(SHORT))), numbers(data.draw(len(SHORT)))
    assert sorted(first) == sorted(second) == SHORT
    assert SHORT != first != second
    assert numbers(stream(rows).draw(len(SHORT))) == first
    assert numbers(stream(rows, seed=4).draw(len(SHORT))) != first


def test_a_shuffle_draws_each_row_from_the_next_few_only() -> None:
    order = list(shuffled(iter(range(100)), 10, random.Random(1)))
    assert sorted(order) == list(range(100))
    assert all(row < place + 10 for place, row in enumerate(order))
    firsts = {next(shuffled(iter(range(100)), 10, random.Random(seed))) for seed in range(200)}
    assert firsts == set(range(10))
    assert list(shuffled(iter([]), 10, random.Random(1))) == []


def test_the_file_is_not_read_further_than_the_buffer(rows: str) -> None:
    read = []

    def count(source: Any) -> Any:
        for row in source:
            read.append(row)
            yield row

    data = stream(rows)
    original = data.read
    data.read = lambda: count(original())
    data.draw(5)
    assert len(read) <= 40 + 64 + 1  # the buffer and one chunk


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    size, path = 40_000_000, tmp_path / "large.jsonl"
    with path.open("w") as file:
        for number in range(8000):
            file.write(json.dumps({"prompt": str(number), "note": "x" * (size // 8000)}) + "\n")
    data = stream(str(path), max_length=None, buffer_size=40)
    tracemalloc.start()
    try:
        drawn = [int(str(sample.prompt)) for _ in range(80) for sample in data.draw(100)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sorted(drawn) == list(range(8000))
    assert peak < size / 10


@pytest.mark.parametrize("sizes", [[1] * 30, [7, 23], [30]])
def test_the_order_does_not_depend_on_how_many_are_drawn_at_a_time(rows: str, sizes: list[int]) -> None:
    data = stream(rows)
    drawn = [sample for size in sizes for sample in data.draw(size)]
    assert numbers(drawn) == numbers(stream(rows).draw(30))


@pytest.mark.parametrize("before", [0, 1, 100, 240, 241, 500])
def test_a_stream_continues_from_its_position_as_if_it_had_not_stopped(rows: str, before: int) -> None:
    data = stream(rows)
    data.draw(before)
    other = stream(rows)
    other.seek(data.epoch_id, data.offset)
    assert numbers(other.draw(300)) == numbers(data.draw(300))


def workers_but(others: set[psutil.Process]) -> list[psutil.Process]:
    """Running workers of this process, without those of tests before this one."""
    found = []
    for child in set(psutil.Process().children()) - others:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_the_order_does_not_depend_on_the_number_of_workers(rows: str) -> None:
    others = set(psutil.Process().children())  # of tests before this one
    alone, helped = stream(rows), stream(rows, num_workers=2)
    expected = numbers(alone.draw(400))
    assert numbers(helped.draw(400)) == expected
    assert (helped.epoch_id, helped.offset) == (alone.epoch_id, alone.offset)
    wait_until(lambda: len(workers_but(others)) == 2, Deadline(600, "the workers of the first pass to end"))
    workers = workers_but(others)
    helped.close()
    assert psutil.wait_procs(workers)[1] == []
    whole = Dataset(rows, PlainTokenizer(), None, 10, prompt_key="prompt", num_workers=2)
    assert numbers(whole.samples) == SHORT


def test_a_worker_that_dies_is_an_error_not_a_wait(rows: str) -> None:
    with pytest.raises(DataError, match="--num-data-workers died"):
        stream(rows, PlainTokenizer(poison="70"), num_workers=1).draw(200)


def test_an_error_in_a_worker_says_where_the_row_stands(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1"}\n{"promt": "2"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: there is no 'prompt'.*'promt'"):
        stream(str(path), num_workers=1).draw(1)


def test_a_file_with_long_prompts_only_ends_in_an_error(rows: str) -> None:
    data = stream(rows, max_length=0)
    with pytest.raises(DataError, match=r"all prompts exceed 0 tokens"):
        data.draw(1)
    assert len(stream(rows, max_length=None).draw(NUM_ROWS)) == NUM_ROWS


def test_prompts_that_are_messages_are_not_measured() -> None:
    maker = PromptMaker(PlainTokenizer(), max_length=100, prompt_key="prompt")
    messages = [{"role": "user", "content": "hello"}]
    made = list(prepare(iter([("row 1", {"prompt": messages}), ("row 2", {"prompt": "four"})]), maker))
    assert [one.num_tokens for one in made] == [None, 4]
    rendered = replace(maker, apply_chat_template=True)
    assert rendered.make([("row 1", {"prompt": messages})])[0].num_tokens == len("<user>hello")


@pytest.mark.parametrize("stop", [0, 2, 4])
def test_a_restarted_run_draws_what_the_other_would_have_drawn(tiny_task: Any, tmp_path: Path, stop: int) -> None:
    args = make_args(
        tiny_task.model,
        0,
        prompt_data=f"{tiny_task.train}@[:25]",
        streaming_data=True,
        rollout_shuffle=True,
        rollout_max_prompt_len=8,
        save=str(tmp_path),
        load=str(tmp_path),
    )
    size = 11
    whole = RolloutDataSourceWithBuffer(args)
    assert len(whole) == 0
    expected = [whole.get_samples(size) for _ in range(6)]
    assert whole.epoch_id >= 2
    first = RolloutDataSourceWithBuffer(args)
    for _ in range(stop):
        first.get_samples(size)
    first.save(7)
    second = RolloutDataSourceWithBuffer(args)
    second.load(7)
    drawn = list(itertools.chain.from_iterable(second.get_samples(size) for _ in range(6 - stop)))
    later = list(itertools.chain.from_iterable(expected[stop:]))
    assert [(g[0].prompt, g[0].group_index, g[1].index) for g in drawn] == [
        (g[0].prompt, g[0].group_index, g[1].index) for g in later
    ]


def test_a_switch_between_loading_and_streaming_changes_the_order(tiny_task: Any, tmp_path: Path) -> None:
    settings = {"prompt_data": tiny_task.train, "save": str(tmp_path), "load": str(tmp_path)}
    RolloutDataSourceWithBuffer(make_args(tiny_task.model, 0, **settings)).save(0)
    with pytest.raises(DataError, match=r"--streaming-data \(it was False, now it is True\)"):
        RolloutDataSourceWithBuffer(make_args(tiny_task.model, 0, streaming_data=True, **settings)).load(0)


def test_a_stream_needs_a_length_of_the_run_and_no_slice_from_the_end(tmp_path: Path) -> None:
    command = make_command(tmp_path)
    _, problems = command.run("--streaming-data", "--num-epoch", 2, without=("--num-rollout",))
    assert "--streaming-data does not know the length of an epoch: it needs --num-rollout" in problems
    _, problems = command.run("--streaming-data", "--prompt-data", command.prompts + "@[-2:]")
    assert "the length of the file, which --streaming-data does not know" in problems
    command.resolve("--streaming-data", "--num-data-workers", 2, "--prompt-data", command.prompts + "@[1:3]")
