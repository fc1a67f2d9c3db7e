"""The journal of finished rollouts: a start after a death finds them as they were, and only those."""

from __future__ import annotations

import logging
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.training import checkpoint_files
from slime.config.groups import RunConfig
from slime.data.sample import Sample, iter_samples
from slime.data.schedule import note_part
from slime.ray import journal
from slime.ray.journal import Entry, Journal
from slime.rollout.source_state import outstanding_path, state_path, write_state


def arguments(folder: Path, **values: Any) -> Namespace:
    defaults: dict[str, Any] = dict.fromkeys(("debug_train_only", "debug_rollout_only", "keep_old_actor"), False)
    defaults |= {"save": str(folder), "load": str(folder), "save_interval": 4, "start_rollout_id": None}
    return Namespace(**{**defaults, "load_debug_rollout_data": None, "deterministic_mode": True, **values})


def entry(number: int, length: int = 3) -> Entry:
    samples = [
        Sample(
            group_index=number,
            index=2 * number + i,
            tokens=[7, *range(length)],
            response="é" * length,
            response_length=length,
            loss_mask=[1, 0] * (length // 2) + [1] * (length % 2),
            rollout_log_probs=[-(i + 1) / 3 for _ in range(length)],  # not a float32
            teacher_log_probs=[-0.5] * length,
            weight_versions=[str(number), str(number + 1)],
            reward={"score": 0.1},
            metadata={"turn": (1, 2)} if i else {},
            status=Sample.Status.COMPLETED,
        )
        for i in range(2)
    ]
    note_part(samples[0], "1")
    return Entry([[samples[0], [samples[1], samples[0]]]], {"rollout/kept": 1.0}, str(number))


def add(made: Journal, save: Path, rollout_id: int, **values: Any) -> Entry:
    """Add a rollout, with the states that the Data Buffer saves before."""
    write_state(state_path(str(save), rollout_id), {"sample_offset": rollout_id})
    write_state(outstanding_path(str(save), rollout_id), {"groups": []})
    added = entry(rollout_id, **values)
    made.add(rollout_id, added)
    made.wait(rollout_id)
    return added


def names(save: Path) -> list[str]:
    return sorted(str(path.relative_to(save / "rollout")) for path in (save / "rollout").rglob("*") if path.is_file())


@pytest.mark.parametrize("length", [3, 60_001])  # as JSON, and packed
def test_a_later_start_takes_the_rollouts_as_they_were(tmp_path: Path, length: int) -> None:
    first = Journal(RunConfig.of(arguments(tmp_path)))
    assert first.begin(5) == 5
    added = add(first, tmp_path, 5, length=length)
    add(first, tmp_path, 6)
    second = Journal(RunConfig.of(arguments(tmp_path)))
    assert second.begin(5) == 7
    found = second.take(5)
    assert found is not None
    ((one, several),), ((expected, _),) = found.groups, added.groups
    assert len(several) == 2
    for again, before in zip(iter_samples(found.groups), iter_samples(added.groups), strict=True):
        assert vars(again) == vars(before)
    assert type(one.rollout_log_probs[0]) is float
    assert one.parts == expected.parts
    assert (found.metrics, found.version, found.newest) == ({"rollout/kept": 1.0}, "5", "6")
    assert second.take(7) is None


def test_numbers_are_packed_into_few_bytes(tmp_path: Path) -> None:
    made = Journal(RunConfig.of(arguments(tmp_path)))
    length = 60_000
    added = entry(0, length)
    for sample in iter_samples(added.groups):
        sample.rollout_log_probs, sample.teacher_log_probs = [-0.5] * length, None
        sample.response = ""
    made.add(0, added)
    made.wait(0)
    (file,) = (tmp_path / "rollout" / "journal").iterdir()
    assert file.suffix == ".pt"
    assert file.stat().st_size < 3 * length * 9.1


class OfAUser:
    """A value that JSON lacks."""

    level = 3


def test_objects_of_user_code_come_back_and_those_that_cannot_be_written_do_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Journal(RunConfig.of(arguments(tmp_path)))
    for rollout_id, value in ((0, OfAUser()), (1, lambda: 3)):
        added = entry(rollout_id)
        next(iter_samples(added.groups)).metadata["user"] = value
        first.add(rollout_id, added)
        first.wait(rollout_id)
    assert "rollout 1 was not written" in caplog.text
    second = Journal(RunConfig.of(arguments(tmp_path)))
    assert second.begin(0) == 1
    found = second.take(0)
    assert found is not None
    assert next(iter_samples(found.groups)).metadata["user"].level == 3


@pytest.mark.parametrize("how", ["other flags", "damaged", "gap", "another run", "given start"])
def test_rollouts_that_do_not_continue_the_run_are_generated_again_and_deleted(tmp_path: Path, how: str) -> None:
    first = Journal(RunConfig.of(arguments(tmp_path)))
    for rollout_id in range(3):
        add(first, tmp_path, rollout_id)
    flags: dict[str, Any] = {}
    stop = 0
    match how:
        case "other flags":
            flags = {"rollout_temperature": 0.5}
        case "damaged":
            path = next((tmp_path / "rollout" / "journal").glob("1.*"))
            path.write_bytes(path.read_bytes()[:100])
            stop = 1
        case "gap":
            next((tmp_path / "rollout" / "journal").glob("1.*")).unlink()
            stop = 1
        case "another run":
            flags = {"load": str(tmp_path / "other")}
        case "given start":
            flags = {"start_rollout_id": 0}
    second = Journal(RunConfig.of(arguments(tmp_path, **flags)))
    assert second.begin(0) == stop
    kept = [name for name in names(tmp_path) if name.startswith("journal/")]
    assert [Path(name).stem for name in kept] == [str(rollout_id) for rollout_id in range(stop)]
    assert Journal(RunConfig.of(arguments(tmp_path))).begin(0) == stop


def test_a_checkpoint_covers_its_rollouts_and_keeps_its_own_state(tmp_path: Path) -> None:
    made = Journal(RunConfig.of(arguments(tmp_path)))
    for rollout_id in range(4):
        add(made, tmp_path, rollout_id)
    partial = checkpoint_files.partial_directory(tmp_path, "iter_0000002")
    checkpoint_files.make_empty(partial)
    (partial / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    checkpoint_files.publish(tmp_path, "iter_0000002", 2, layout={}, content={}, checksums={})
    add(made, tmp_path, 4)
    assert [name for name in names(tmp_path) if name.startswith("journal/")] == ["journal/3.pt", "journal/4.pt"]
    states = [name for name in names(tmp_path) if name.startswith("global")]
    assert states == [f"global_dataset_state_dict_{number}.json" for number in (2, 3, 4)]
    assert Journal(RunConfig.of(arguments(tmp_path))).begin(3) == 5


def test_the_files_of_a_checkpoint_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        partial = checkpoint_files.partial_directory(tmp_path, name_of(number))
        checkpoint_files.make_empty(partial)
        (partial / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        checkpoint_files.publish(tmp_path, name_of(number), number, layout={}, content={}, checksums={})
    looked: list[str] = []
    real = checkpoint_files.what_is_torn

    def look(directory: Path) -> str | None:
        looked.append(directory.name)
        return real(directory)

    monkeypatch.setattr(checkpoint_files, "what_is_torn", look)
    monkeypatch.setattr(journal, "what_is_torn", look, raising=False)
    made = Journal(RunConfig.of(arguments(tmp_path)))
    for rollout_id in range(2, 6):
        add(made, tmp_path, rollout_id)
    assert looked == [name_of(1), name_of(2)]


def name_of(number: int) -> str:
    return f"iter_{number:07d}"


def test_a_disk_that_hangs_is_reported_and_the_run_goes_on_without_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(journal, "write_encoded", lambda *_: goes_on.wait())
    monkeypatch.setattr(journal, "_WAIT_S", 0.01)
    made = Journal(RunConfig.of(arguments(tmp_path)))
    made.add(0, entry(0))
    made.wait(0)
    assert "rollout 0 was not written" in caplog.text
    assert "the disk has not taken it" in caplog.text
    made.add(1, entry(1))
    assert "rollout 1 is not in" in caplog.text
    goes_on.set()


def test_a_slow_disk_is_reported_with_the_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal, "_SLOW_S", -1.0)
    add(Journal(RunConfig.of(arguments(tmp_path))), tmp_path, 0)
    assert "s until the disk had rollout 0" in caplog.text


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(journal, "write_encoded", full)
    made = Journal(RunConfig.of(arguments(tmp_path)))
    made.add(0, entry(0))
    made.wait(0)
    assert "a run that dies now generates it again (no space left on device)" in caplog.text


@pytest.mark.parametrize(
    "values",
    [
        {"save": None},
        {"save_interval": None},
        {"debug_train_only": True},
        {"debug_rollout_only": True},
        {"load_debug_rollout_data": "x"},
        {"keep_old_actor": True},
        {"deterministic_mode": False},
    ],
)
def test_a_run_without_checkpoints_or_generation_has_no_journal(tmp_path: Path, values: dict[str, Any]) -> None:
    assert Journal.of(RunConfig.of(arguments(tmp_path))) is not None
    assert Journal.of(RunConfig.of(arguments(tmp_path, **values))) is None
