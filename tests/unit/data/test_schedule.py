"""The records of a schedule and of weights: read back, and the last line of a batch or version counts."""

from __future__ import annotations

import pytest

from slime.data.sample import Sample
from slime.data.schedule import SCHEDULE, WEIGHTS, Schedule, WeightHistory, note_part, read_schedule, read_weights
from slime.utils.errors import DataError


def sample(index: int, *tokens: int, **values) -> Sample:
    return Sample(group_index=index // 2, index=index, tokens=[1, *tokens], response_length=len(tokens), **values)


def test_every_sample_is_read_back_with_its_parts_and_its_checksum(tmp_path):
    schedule = Schedule(tmp_path / SCHEDULE)
    parts, by_function, unknown = sample(0, 5), sample(2, 5, 6, weight_versions=["3", "3"]), sample(4, 5)
    note_part(parts, "2")
    parts.tokens, parts.response_length = [1, 5, 6, 7], 3
    note_part(parts, "4")
    failed = sample(3, 0, metadata={"failure": {"boundary": "generate"}})
    schedule.batch(7, [parts, sample(1, 9, weight_versions=["4"]), by_function, failed, unknown])
    rows = read_schedule(tmp_path / SCHEDULE)[7]
    assert [row.parts for row in rows] == [((2, 1), (4, 3)), ((4, 1),), ((3, 2),), ((None, 1),), ((None, 1),)]
    assert [(row.group, row.index, row.failed) for row in rows][3] == (1, 3, "generate")
    assert len({row.crc for row in rows}) == 5


def test_a_batch_that_is_made_again_replaces_the_first_and_a_torn_line_does_not_count(tmp_path):
    schedule = Schedule(tmp_path / SCHEDULE)
    schedule.batch(0, [sample(0, 5)])
    schedule.batch(0, [sample(0, 6)])
    with (tmp_path / SCHEDULE).open("a") as file:
        file.write('{"batch": 1, "sam')
    assert read_schedule(tmp_path / SCHEDULE).keys() == {0}
    crc = read_schedule(tmp_path / SCHEDULE)[0][0].crc
    Schedule(tmp_path / SCHEDULE).batch(1, [sample(0, 6)])
    assert read_schedule(tmp_path / SCHEDULE)[1][0].crc == crc


def test_a_version_with_other_weights_than_before_a_restart_is_named(tmp_path):
    history = WeightHistory(tmp_path / WEIGHTS)
    assert history.add(1, "aa", {"a": "0" * 32, "b": "1" * 32}) is None
    again = WeightHistory(tmp_path / WEIGHTS)
    assert again.add(1, "aa", {"a": "0" * 32, "b": "1" * 32}) is None
    assert again.add(1, "bb", {"a": "0" * 32, "b": "2" * 32}) == "b"
    assert again.add(2, "cc", {"c": "3" * 32}) is None
    weights = read_weights(tmp_path / WEIGHTS)
    assert (weights[1].hash, weights[1].tensors) == ("bb", {"a": "0" * 8, "b": "2" * 8})
    assert weights[2].tensors == {"c": "3" * 8}


def test_a_run_without_a_record_is_named(tmp_path):
    with pytest.raises(DataError, match=r"schedule\.jsonl does not exist.*--deterministic-mode"):
        read_schedule(tmp_path / SCHEDULE)
