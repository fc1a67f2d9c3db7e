"""The state of a run in its folder, and the rule that restarts a run."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slime.config.groups import RunConfig
from slime.ray.run.restart import MAX_RESTARTS, run_to_the_end
from slime.ray.watch.progress import PROGRESS, Progress, phase
from slime.utils.errors import ProcessDied, SlimeError, StartFailed
from tests.unit.ray.test_arguments import parse


@dataclass
class Run:
    progress: Progress

    @phase("trainer", "sync")
    def sync(self, num_trained: int, fails: bool = False) -> dict[str, Any]:
        if fails:
            raise RuntimeError("no")
        return {"num_trained": num_trained}


def read(directory: Path) -> dict[str, Any]:
    return json.loads((directory / PROGRESS).read_text())


def test_the_file_names_phase_and_rollout_of_each_lane(tmp_path):
    progress = Progress(tmp_path, ledger="l")
    assert read(tmp_path)["trainer"]["phase"] == "start"
    with progress.phase("engines", "generate", 4):
        assert read(tmp_path)["engines"]["phase"] == "generate"
        assert read(tmp_path)["engines"]["rollout_id"] == 4
        assert read(tmp_path)["trainer"]["phase"] == "start"
    assert read(tmp_path)["engines"]["phase"] == "idle"
    progress.update(state="finished")
    assert read(tmp_path)["state"] == "finished"
    assert read(tmp_path)["ledger"] == "l"


def test_a_decorated_method_is_a_phase_by_position_and_by_name(tmp_path):
    run = Run(Progress(tmp_path))
    assert run.sync(3) == run.sync(num_trained=3) == {"num_trained": 3}
    assert read(tmp_path)["trainer"]["phase"] == "idle"
    with pytest.raises(RuntimeError):
        run.sync(5, fails=True)
    assert read(tmp_path)["trainer"]["phase"] == "sync", "an error leaves the phase it came from"
    assert read(tmp_path)["trainer"]["rollout_id"] == 5


def test_a_second_start_of_the_same_process_counts_as_a_restart(tmp_path):
    for restarts in range(3):
        Progress(tmp_path)
        assert read(tmp_path)["restarts"] == restarts
    for other in ({"pid": -1}, {"pid_since": 1.0}):  # in a container every command has the same number
        Progress(tmp_path)
        (tmp_path / PROGRESS).write_text(json.dumps(read(tmp_path) | other))
        Progress(tmp_path)
        assert read(tmp_path)["restarts"] == 0, "the run of another process"


def test_a_disk_that_cannot_be_written_does_not_end_the_run(tmp_path):
    progress = Progress(tmp_path / "gone")
    with progress.phase("trainer", "train", 0):
        pass


def arguments(tmp_path: Path, **other: Any) -> RunConfig:
    values: dict[str, Any] = {"use_fault_tolerance": True, "save": str(tmp_path), "load": "elsewhere"}
    values |= {"ckpt_step": 7, "start_rollout_id": 0, "finetune": True, "no_load_optim": True, "no_load_rng": True}
    values |= {
        "no_save_optim": False,
        "no_save_rng": False,
        "use_wandb": False,
        "wandb_run_id": None,
        "hf_checkpoint": "hf",
    }
    return RunConfig(values | other)


def dying(times: int, seen: list[Namespace], error: type[SlimeError] = ProcessDied):
    def train(args: Namespace) -> None:
        seen.append(args)
        args.num_rollout = "resolved"
        if len(seen) <= times:
            raise error(f"death {len(seen)}")

    return train


def test_a_run_is_begun_again_three_times_and_no_more(tmp_path):
    seen: list[Namespace] = []
    run_to_the_end(dying(MAX_RESTARTS, seen), arguments(tmp_path))
    assert len(seen) == MAX_RESTARTS + 1
    with pytest.raises(ProcessDied, match="death 4"):
        run_to_the_end(dying(MAX_RESTARTS + 1, seen := []), arguments(tmp_path))
    assert len(seen) == MAX_RESTARTS + 1


@pytest.mark.parametrize("other", [{"use_fault_tolerance": False}, {"save": None}])
def test_without_fault_tolerance_or_a_place_for_checkpoints_a_death_is_the_end(tmp_path, other):
    with pytest.raises(ProcessDied):
        run_to_the_end(dying(1, seen := []), arguments(tmp_path, **other))
    assert len(seen) == 1


def test_other_errors_are_the_end(tmp_path):
    with pytest.raises(SlimeError):
        run_to_the_end(dying(1, seen := [], SlimeError), arguments(tmp_path))
    assert len(seen) == 1


def test_a_first_start_that_fails_is_not_tried_again_but_a_death_during_a_later_one_is_made_good(tmp_path):
    with pytest.raises(StartFailed):
        run_to_the_end(dying(1, seen := [], StartFailed), arguments(tmp_path))
    assert len(seen) == 1

    def train(args: Namespace) -> None:
        seen.append(args)
        if len(seen) <= 2:
            raise (ProcessDied, StartFailed)[len(seen) - 1]("death")

    seen.clear()
    run_to_the_end(train, arguments(tmp_path))
    assert len(seen) == 3


def test_before_the_first_checkpoint_the_run_begins_as_at_first(tmp_path):
    run_to_the_end(dying(1, seen := []), arguments(tmp_path))
    assert vars(seen[1]) == vars(seen[0])
    assert seen[1] is not seen[0]


def test_after_a_checkpoint_it_continues_from_it_with_its_optimizer(tmp_path):
    checkpoint = tmp_path / "iter_0000003"
    checkpoint.mkdir()
    (checkpoint / "metadata.json").write_text("{}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    run_to_the_end(dying(1, seen := []), arguments(tmp_path))
    again = seen[1]
    assert again.load == str(tmp_path)
    assert again.ckpt_step is again.start_rollout_id is None
    assert {again.finetune, again.no_load_optim, again.no_load_rng} == {False}
    assert seen[0].load == "elsewhere"


def test_fault_tolerance_without_checkpoints_says_what_it_cannot_replace(tiny_task, tmp_path):
    told = [notice.text for notice in parse(tiny_task, "--use-fault-tolerance").notices]
    assert any("a trainer rank that dies ends the run" in text for text in told)
    told = [
        notice.text
        for notice in parse(tiny_task, "--use-fault-tolerance", "--save", tmp_path, "--save-interval", 1).notices
    ]
    assert not any("a trainer rank" in text for text in told)


@pytest.mark.parametrize("seconds", ["0.5", "-1"])
def test_a_heartbeat_that_every_process_would_miss_is_refused(seconds, tiny_task, capsys):
    with pytest.raises(SystemExit):
        parse(tiny_task, "--heartbeat-timeout", seconds)
    assert f"--heartbeat-timeout {seconds} is less than a healthy process" in capsys.readouterr().err
