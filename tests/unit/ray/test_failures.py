"""The messages for the user when a run ends badly."""

from __future__ import annotations

import errno

import pytest
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayTaskError

from slime.backends.training.arguments import CheckpointArgs
from slime.ray.run.restart import exit_status
from slime.ray.watch.failure_report import message_of
from slime.utils.errors import DataError, ProcessDied


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("train", "a traceback", cause)


@pytest.mark.parametrize("wrap", [lambda error: error, task_error, lambda error: task_error(task_error(error))])
def test_an_error_that_slime_raised_is_told_without_rays_traceback_however_deep_it_was(wrap):
    assert message_of(wrap(DataError("row 3 is empty"))) == "row 3 is empty"
    assert message_of(wrap(ProcessDied("rank 1 died"))) == "rank 1 died"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_called_that_and_old_checkpoints_are_said_to_be_whole(number):
    message = message_of(task_error(OSError(number, "no room", "/save/iter_0000003")))
    assert message is not None
    assert "the disk is full" in message
    assert "/save/iter_0000003" in message
    assert "Checkpoints that were complete still are" in message


@pytest.mark.parametrize("error", [ObjectStoreFullError("2 GB"), OutOfDiskError("95 %")])
def test_a_full_object_store_names_what_fills_it(error):
    message = message_of(task_error(error))
    assert message is not None
    assert "object store is full" in message
    assert "--rollout-batch-size" in message


@pytest.mark.parametrize("error", [KeyError("x"), task_error(KeyError("x")), OSError(errno.ENOENT, "gone")])
def test_a_bug_keeps_its_traceback(error):
    assert message_of(error) is None


def test_expected_errors_become_a_message_and_status_1(capsys):
    with pytest.raises(SystemExit) as caught, exit_status():
        raise DataError("row 3 is empty")
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: row 3 is empty\n"


@pytest.mark.parametrize(
    ("saved", "load", "hint"),
    [
        (None, "elsewhere", "No checkpoint was saved: the same command starts anew."),
        (7, "elsewhere", "The same command with --load {save} continues with rollout 8."),
        (7, "{save}", "The same command continues with rollout 8."),
    ],
)
def test_an_interruption_is_status_130_and_names_the_rollout_that_follows(saved, load, hint, tmp_path, capsys):
    if saved is not None:
        (tmp_path / f"iter_{saved:07}").mkdir()
        (tmp_path / f"iter_{saved:07}" / "metadata.json").write_text("{}")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(saved))
    checkpoints = CheckpointArgs(save=str(tmp_path), load=load.format(save=tmp_path))
    with pytest.raises(SystemExit) as caught, exit_status(checkpoints):
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err == (
        f"interrupted: every process of the run was stopped. {hint.format(save=tmp_path)}\n"
    )
