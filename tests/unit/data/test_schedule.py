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


def test_a_start_forgets_the_rollouts_that_it_makes_anew(tmp_path):
    schedule = Schedule(tmp_path / SCHEDULE)
    for rollout_id in range(5):
        schedule.batch(rollout_id, [sample(2 * rollout_id, 5)])
    schedule.begin(3)
    assert list(read_schedule(tmp_path / SCHEDULE)) == [0, 1, 2]
    schedule.batch(3, [sample(6, 9)])
    assert list(read_schedule(tmp_path / SCHEDULE)) == [0, 1, 2, 3]


def test_the_first_version_with_other_weights_than_before_a_restart_is_named_once(tmp_path):
    history = WeightHistory(tmp_path / WEIGHTS)
    history.begin(0, 0)
    for version in range(4):
        assert history.add(version, "aa", {"a": "0" * 32, "b": f"{version}" * 32}) is None
    again = WeightHistory(tmp_path / WEIGHTS)
    again.begin(1, 2)
    assert again.add(1, "aa", {"a": "0" * 32, "b": "1" * 32}) is None
    assert again.add(2, "bb", {"a": "0" * 32, "b": "3" * 32}) == "b"
    assert again.add(3, "cc", {"a": "4" * 32}) is None  # made anew: it may differ
    weights = read_weights(tmp_path / WEIGHTS)
    assert list(weights) == [0, 1, 2, 3]
    assert (weights[2].hash, weights[2].tensors) == ("bb", {"a": "0" * 8, "b": "3" * 8})
    assert weights[3].tensors == {"a": "4" * 8}


def test_after_a_difference_no_further_version_is_compared(tmp_path):
    for number in range(2):
        history = WeightHistory(tmp_path / WEIGHTS)
        history.begin(0, 9)
        found = [history.add(version, f"{number}", {"a": f"{number}" * 32}) for version in range(3)]
        assert found == [None if number == 0 else "a", None, None]


def test_a_start_keeps_no_versions_that_it_does_not_make(tmp_path):
    history = WeightHistory(tmp_path / WEIGHTS)
    history.begin(0, 0)
    for version in range(100):
        history.add(version, "aa", {"a": "0" * 32})
    assert history._known == {}
    again = WeightHistory(tmp_path / WEIGHTS)
    again.begin(97, 98)
    assert list(again._known) == [97, 98]


def test_a_run_without_a_record_is_named(tmp_path):
    with pytest.raises(DataError, match=r"schedule\.jsonl does not exist.*--deterministic-mode"):
        read_schedule(tmp_path / SCHEDULE)
