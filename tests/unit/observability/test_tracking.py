"""The files of metrics, their form, and the readable part when a run ends early."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from slime.config.groups import add_group, groups_in
from slime.config.plan import plan_files
from slime.config.resolve import paths
from slime.data.ledger import LEDGER
from slime.data.schedule import SCHEDULE, WEIGHTS
from slime.observability import arguments, logging_utils, tracking
from slime.observability.sinks import JsonlSink
from slime.observability.terminal import SHOWN_LINES
from slime.observability.tracking import Tracker, create_tracker
from slime.utils.errors import ConfigError
from slime.utils.files import RunLock, lock_save


def parsed(*argv: str, **more: Any) -> Namespace:
    import argparse

    parser = argparse.ArgumentParser()
    for group in groups_in(arguments):
        add_group(parser, group)
    args = parser.parse_args([str(token) for token in argv])
    vars(args).update(rank=0, rollout_batch_size=8, n_samples_per_prompt=4, global_batch_size=16, **more)
    return args


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory))
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)


def test_without_a_flag_metrics_and_events_go_to_the_folder_of_the_run(tmp_path: Path) -> None:
    tracker = create_tracker(parsed("--experiment-name", "mine"))
    tracker.log({"train/loss": 0.5, "train/step": 3}, "train/step")
    tracker.log({"train/loss": 0.25, "train/step": 4}, "train/step")
    tracker.close()
    run = tmp_path / "outputs" / "mine"
    first, second = records(run / "metrics.jsonl")
    assert first["step_key"] == "train/step"
    assert (first["train/step"], first["train/loss"], second["train/loss"]) == (3, 0.5, 0.25)
    assert first["time"] > 1e9
    assert scalars(run) == {"train/loss": [(3, 0.5), (4, 0.25)]}


def test_a_run_without_a_name_is_named_by_its_start_in_every_place(tmp_path: Path) -> None:
    tracker = create_tracker(parsed("--use-tensorboard", "--tb-project-name", "p"))
    tracker.log({"a": 1.0, "x": 0}, "x")
    tracker.close()
    (run,) = (tmp_path / "outputs").iterdir()
    (events,) = (tmp_path / "tensorboard_log" / "p").iterdir()
    assert run.name == events.name


def test_use_tensorboard_takes_the_project_layout_and_the_environment_beats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parsed("--use-tensorboard", "--tb-experiment-name", "e")
    assert tracking.event_directory(args, "now") == Path("tensorboard_log/slime/e")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "here"))
    assert tracking.event_directory(args, "now") == tmp_path / "here"
    assert tracking.event_directory(parsed(), "now") == tmp_path / "here"


@pytest.mark.parametrize("variable", [None, "", "here"])
@pytest.mark.parametrize("flags", ["", "--use-tensorboard", "--use-wandb", "--use-wandb --use-tensorboard"])
def test_the_plan_names_the_folder_of_the_events(
    flags: str, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("TENSORBOARD_DIR", variable)
    args = parsed("--experiment-name", "mine", *flags.split())
    planned = {output.what: output.where for output in plan_files(args, None)}.get("TensorBoard events")
    place = tracking.event_directory(args, "now")
    assert planned == (None if place is None else str(place))


def test_a_folder_whose_tracker_could_not_be_made_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: Namespace) -> None:
        raise ConfigError("no W&B")

    monkeypatch.setattr(tracking, "WandbSink", broken)
    args = parsed("--experiment-name", "mine", "--use-wandb")
    with pytest.raises(ConfigError, match="no W&B"):
        create_tracker(args)
    folder = tracking.run_directory(args)
    (folder / "run.lock").write_text("somebody else")  # one process may hold the lock several times
    RunLock(folder, "--flag", "Fix").close()


def test_wandb_alone_writes_no_events(tmp_path: Path) -> None:
    assert tracking.event_directory(parsed("--use-wandb"), "now") is None
    assert tracking.event_directory(parsed("--use-wandb", "--use-tensorboard"), "now") is not None


def test_values_that_json_does_not_have_are_null_and_tensors_are_numbers(tmp_path: Path) -> None:
    import numpy as np

    tracker = create_tracker(parsed("--experiment-name", "e"))
    tracker.log({"a": math.nan, "b": math.inf, "c": np.float32(0.5), "d": np.int64(3), "e": [1], "x": 0}, "x")
    tracker.close()
    (record,) = records(tmp_path / "outputs/e/metrics.jsonl")
    assert [record[name] for name in "abcde"] == [None, None, 0.5, 3, "[1]"]


def test_a_record_is_on_disk_before_the_next_one(tmp_path: Path) -> None:
    tracker = create_tracker(parsed("--experiment-name", "e"))
    tracker.log({"a": 1.0, "x": 7}, "x")
    assert records(tmp_path / "outputs/e/metrics.jsonl")[0]["x"] == 7
    tracker.close()


def test_a_second_run_under_the_same_name_continues_the_file(tmp_path: Path) -> None:
    for step in (0, 1):
        tracker = create_tracker(parsed("--experiment-name", "e"))
        tracker.log({"a": 1.0, "x": step}, "x")
        tracker.close()
    assert [record["x"] for record in records(tmp_path / "outputs/e/metrics.jsonl")] == [0, 1]


RECORDS = (LEDGER, SCHEDULE, WEIGHTS)  # without --save they are in the run's folder, and belong together


def test_a_run_that_starts_anew_moves_the_files_of_an_earlier_run_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "outputs/e"
    for step, is_new in ((0, True), (1, True), (2, False)):
        monkeypatch.setattr(tracking, "_started", set())  # each is another process
        tracker = create_tracker(parsed("--experiment-name", "e"), is_new=is_new)
        tracker.log({"a": 1.0, "x": step}, "x")
        tracker.close()
        for name in RECORDS:
            (folder / name).touch()
    (earlier,) = folder.glob("earlier_*")
    assert [record["x"] for record in records(earlier / "metrics.jsonl")] == [0]
    assert (earlier / "run.json").is_file()
    assert all((earlier / name).is_file() for name in RECORDS)
    assert [record["x"] for record in records(folder / "metrics.jsonl")] == [1, 2]
    create_tracker(parsed("--experiment-name", "e"), is_new=True).close()  # a restart in the same job
    assert len(records(folder / "metrics.jsonl")) == 2


def test_files_that_a_flag_names_stay_where_a_run_starts_anew(tmp_path: Path) -> None:
    folder = tmp_path / "outputs/e"
    (folder / "samples").mkdir(parents=True)
    (folder / "engines").mkdir()
    (folder / "progress.json").write_text("{}")
    (folder / "engines" / "fork_server.log").write_text("of this run, which has begun to import SGLang")
    (folder / "engines" / "engine_0.log").write_text("of the earlier run")
    args = parsed("--experiment-name", "e", "--output-dir", str(tmp_path / "outputs"))
    args.load_debug_rollout_data = str(folder / "samples" / "{rollout_id}.pt")
    create_tracker(args, is_new=True).close()
    assert (folder / "samples").is_dir()
    assert [path.name for path in (folder / "engines").iterdir()] == ["fork_server.log"]
    (moved,) = folder.glob("earlier_*/engines/*")
    assert moved.name == "engine_0.log"


def test_the_first_run_of_a_name_moves_nothing(tmp_path: Path) -> None:
    """The process that imports SGLang early has written its log before the tracker starts."""
    log = tmp_path / "outputs/e/engines/fork_server.log"
    log.parent.mkdir(parents=True)
    log.write_text("imported")
    create_tracker(parsed("--experiment-name", "e"), is_new=True).close()
    assert list((tmp_path / "outputs/e").glob("earlier_*")) == []
    assert log.read_text() == "imported"


def test_a_line_that_a_crash_cut_does_not_swallow_the_next_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step_key": "train/step", "train/st')
    sink = JsonlSink(path)
    sink.log({"train/note": "\ud800"}, "train/step", 7)
    sink.close()
    assert json.loads(path.read_text())["train/step"] == 7
    JsonlSink(path).close()
    assert path.read_text().endswith("}\n")


def test_an_array_among_a_user_s_metrics_is_written_as_text_and_ends_nothing(tmp_path: Path) -> None:
    tracker = Tracker([JsonlSink(tmp_path / "metrics.jsonl")])
    tracker.log({"rollout/step": 1, "rollout/a": np.arange(2), "rollout/b": np.ones((1, 1))}, "rollout/step")
    (record,) = records(tmp_path / "metrics.jsonl")
    assert (record["rollout/a"], record["rollout/b"]) == ("[0 1]", 1.0)


def test_rollout_and_eval_axes_count_optimizer_steps_on_request(tmp_path: Path) -> None:
    tracker = create_tracker(parsed("--experiment-name", "e", "--wandb-always-use-train-step"))
    for axis in ("rollout/step", "eval/step", "train/step"):
        tracker.log({"a": 1.0, axis: 3}, axis)
    tracker.close()
    found = records(tmp_path / "outputs/e/metrics.jsonl")
    assert [record[record["step_key"]] for record in found] == [6, 6, 3]  # 3 rollouts x 32 samples / batches of 16


class Recorder:
    def __init__(self, fails: bool = False) -> None:
        self.closed, self.fails = 0, fails
        self.seen: list[tuple[dict[str, Any], str, int]] = []

    def log(self, metrics: dict[str, Any], step_key: str, step: int) -> None:
        self.seen.append((metrics, step_key, step))

    def close(self) -> None:
        self.closed += 1
        if self.fails:
            raise OSError("the disk is full")


def test_a_sink_that_fails_to_close_does_not_keep_the_next_one_open() -> None:
    first, second = Recorder(fails=True), Recorder()
    tracker = Tracker([first, second])
    tracker.log({"a": 1, "x": 2}, "x")
    tracker.close()
    tracker.close()
    assert (first.closed, second.closed) == (1, 1)
    assert second.seen == [({"a": 1}, "x", 2)]


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output-dir .*file"):
        create_tracker(parsed("--output-dir", str(tmp_path / "file")))


HOLD = """
import sys
from pathlib import Path
from slime.utils.files import RunLock
lock = RunLock(Path(sys.argv[1]), "--flag", "Fix")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_live_run_keeps_others_out_of_its_folder_and_a_dead_one_does_not(tmp_path: Path) -> None:
    args = parsed("--output-dir", str(tmp_path), "--experiment-name", "mine")
    create_tracker(args).close()  # an earlier run that ended
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "mine")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"--experiment-name mine: process {other.pid} on host .* writes to"):
            create_tracker(args)
        other.kill()
        other.wait()
    create_tracker(args).close()


def test_a_folder_that_one_process_locked_twice_is_free_after_the_second_close(tmp_path: Path) -> None:
    first, second = (RunLock(tmp_path, "--flag", "Fix") for _ in range(2))
    first.close()
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    refused = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=env, text=True)
    assert f"process {os.getpid()} on host" in refused.stderr
    second.close()
    assert subprocess.run(command, stdin=subprocess.DEVNULL, env=env).returncode == 0


def test_two_live_runs_do_not_share_a_directory_of_checkpoints(tmp_path: Path) -> None:
    save = tmp_path / "run" / "checkpoints"
    lock_save(str(save)).close()  # an earlier run that ended
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", HOLD, str(save)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        (tmp_path / "link").symlink_to(tmp_path / "run")
        link = tmp_path / "link" / "checkpoints"
        with pytest.raises(
            ConfigError, match=rf"--save {link}: process {other.pid} on host .* writes to .*end that run"
        ):
            lock_save(str(link))
        other.kill()
        other.wait(10)
    first = lock_save(str(save))
    lock_save(str(save)).close()  # a restart in the same job
    first.close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--save .*/file/checkpoints cannot be written"):
        lock_save(str(tmp_path / "file" / "checkpoints"))


def test_a_driver_in_another_container_is_another_one_even_with_the_same_host_name_and_pid(tmp_path: Path) -> None:
    twin = (
        f"import os, socket\nos.getpid = lambda: {os.getpid()}\nsocket.gethostname = lambda: {socket.gethostname()!r}\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    (tmp_path / "mine").mkdir()
    command = [sys.executable, "-c", twin + HOLD, str(tmp_path / "mine")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} on host .* writes to"):
            create_tracker(parsed("--output-dir", str(tmp_path), "--experiment-name", "mine"))
        other.kill()


def test_a_driver_may_open_its_own_folder_again(tmp_path: Path) -> None:
    args = parsed("--output-dir", str(tmp_path), "--experiment-name", "mine")
    first, second = create_tracker(args), create_tracker(args)
    second.close()
    first.close()


def test_runs_without_a_name_that_start_in_one_second_have_folders_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = set()
    for pid in (7, 8):
        args = Namespace(experiment_name=None, tb_experiment_name=None)
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        monkeypatch.setattr("time.strftime", lambda form: "20260101_000000")
        paths.experiment_name(args)
        names.add(args.experiment_name)
    assert names == {"20260101_000000_7", "20260101_000000_8"}


def test_wandb_without_the_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"--use-wandb.*pip install"):
        create_tracker(parsed("--use-wandb"))


def test_wandb_gets_axes_and_offline_mode_and_never_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: dict[str, Any] = {"axes": {}, "logged": []}

    class Run:
        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            calls["axes"][name] = step_metric

        def log(self, metrics: dict[str, Any]) -> None:
            calls["logged"].append(metrics)

        def finish(self) -> None:
            calls["finished"] = True

    def init(**kwargs: Any) -> Run:
        calls["init"] = kwargs
        return Run()

    library = Namespace(init=init, login=lambda **_: pytest.fail("offline"))
    monkeypatch.setitem(sys.modules, "wandb", library)
    roles = tmp_path / "roles.yaml"
    roles.write_text("megatron: [{role: actor, overrides: {lr: 0.5}}, {role: critic, overrides: {lr: 0.25}}]")
    values = {"use_critic": True, "megatron_config_path": str(roles), "lr": 0.1, "kl_coef": 0.2}
    tracker = create_tracker(
        parsed(
            *("--use-wandb", "--wandb-mode", "offline", "--wandb-key", "secret", "--wandb-group", "g"),
            *("--wandb-run-id", "id7"),
            **(values | {"save": None, "load": None}),
        )
    )
    config = calls["init"]["config"]
    assert (config["lr"], config["critic/lr"]) == (0.5, 0.25), "values that differ between the roles"
    assert (config["kl_coef"], config["critic/kl_coef"]) == (0.2, 0.0)
    tracker.log({"train/loss": 1.0, "train/step": 2}, "train/step")
    tracker.close()
    assert (calls["init"]["mode"], calls["init"]["group"], calls["init"]["name"]) == (
        "offline",
        "g_id7",
        "g_id7-RANK_0",
    )
    assert "secret" not in str(calls["init"])
    assert calls["axes"]["perf/*"] == "rollout/step"
    assert calls["logged"] == [{"train/loss": 1.0, "train/step": 2}]
    assert calls["finished"]


def test_importing_and_writing_needs_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from slime.observability.sinks import TensorboardSink
sink = TensorboardSink(Path({str(tmp_path)!r}))
sink.log({{"a": 1.0}}, "x", 0)
sink.close()
assert not {{"torch", "tensorflow"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert scalars(tmp_path) == {"a": [(0, 1.0)]}


def test_the_public_verbs_open_log_and_close_one_tracker(tmp_path: Path) -> None:
    args = parsed("--experiment-name", "verbs")
    logging_utils.log(args, {"a": 1, "x": 0}, "x")  # before: nothing happens
    logging_utils.init_tracking(args, primary=False)
    assert not (tmp_path / "outputs").exists()
    logging_utils.init_tracking(args)
    logging_utils.log(args, {"a": 1, "x": 5}, "x")
    logging_utils.finish_tracking(args)
    logging_utils.finish_tracking(args)
    assert [record["x"] for record in records(tmp_path / "outputs/verbs/metrics.jsonl")] == [5]


def test_the_log_line_has_time_prefix_file_and_line() -> None:
    program = """
import logging
from slime.observability.logging_utils import configure_logger
configure_logger(" 100%")
configure_logger(" second")
logging.getLogger("x").info("hello")
logging.getLogger("httpx").info("noise")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert line.endswith(" 100%] INFO <string>:6 - hello")
    assert logging.getLogger("slime").level == logging.NOTSET


def test_a_sink_that_fails_is_complained_about_once_and_keeps_nobody_from_writing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def log(self, metrics: Any, step_key: str, step: int) -> None:
            raise ConnectionError("server away")

        def close(self) -> None:
            pass

    class Kept:
        steps: ClassVar[list[int]] = []

        def log(self, metrics: Any, step_key: str, step: int) -> None:
            self.steps.append(step)

        def close(self) -> None:
            pass

    tracker = Tracker([Broken(), Kept()])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            tracker.log({"train/loss": 1.0, "train/step": step}, "train/step")
    assert Kept.steps == [0, 1, 2]
    assert caplog.text.count("server away") == 1


def test_wandb_writes_offline_with_the_axes_of_the_metrics(tmp_path: Path) -> None:
    """The real library, without a network: its run file holds the logged values."""
    pytest.importorskip("wandb", reason="pip install 'slime[wandb]'")
    script = """
import sys
from tests.unit.observability.test_tracking import parsed
from slime.observability.tracking import create_tracker
tracker = create_tracker(parsed("--use-wandb", "--wandb-mode", "offline", "--wandb-dir", ".", "--experiment-name", "x"))
tracker.log({"train/loss": 0.125, "train/step": 3}, "train/step")
tracker.close()
"""
    root = Path(__file__).parents[3]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(root), "WANDB_SILENT": "true"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, check=True)
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = run.glob("*.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content
    assert b"0.125" in content
    assert b"rollout/step" in content  # an axis


def test_a_wandb_server_that_is_away_makes_the_run_an_offline_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modes = []

    class Away:
        @staticmethod
        def init(mode: str, **_: Any) -> Any:
            modes.append(mode)
            if mode == "online":
                raise ConnectionError("no route")
            return Namespace(define_metric=lambda *_, **__: None, log=lambda _: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", Away)
    with caplog.at_level(logging.WARNING):
        create_tracker(parsed("--use-wandb")).close()
    assert modes == ["online", "offline"]
    assert "no route" in caplog.text


@pytest.mark.parametrize("flags", [[], ["--log-metric-lines"]])
def test_metrics_are_lines_of_the_log_for_scripts_that_grep_them(
    caplog: pytest.LogCaptureFixture, flags: list[str]
) -> None:
    with caplog.at_level(logging.INFO):
        tracker = create_tracker(parsed(*flags))
        tracker.log({"rollout/raw_reward": 0.5, "perf/train_time": 2.0, "rollout/step": 3}, "rollout/step")
        tracker.log({"train/loss": 0.25, "train/critic-loss": 1.0, "train/step": 7}, "train/step")
        tracker.close()
    records = [record for record in caplog.records if "metrics:" not in record.getMessage()]
    assert {record.name == SHOWN_LINES for record in records} == {bool(flags)}
    assert [record.getMessage() for record in records] == [
        "rollout 3: {'rollout/raw_reward': 0.5}",
        "perf 3: {'perf/train_time': 2.0}",
        "step 7: {'train/loss': 0.25}",
        "critic-step 7: {'train/critic-loss': 1.0}",
    ]
