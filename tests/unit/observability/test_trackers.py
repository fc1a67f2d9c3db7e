"""The trackers of ``--trackers``, each with its real library and without a network.

A library that is not installed is a skipped test: ``pip install 'slime[NAME]'`` runs it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slime.observability.sinks import TRACKERS
from slime.observability.tracking import create_tracker
from slime.utils.errors import ConfigError
from tests.unit.observability.test_tracking import parsed

ROOT = Path(__file__).parents[3]

RUN_TWICE = """
from tests.unit.observability.test_tracking import parsed
from slime.observability.tracking import create_tracker
for part in range(2):  # the second is the first, resumed
    flags = ("--experiment-name", "mine", "--trackers", "{name}", "--wandb-key", "hidden7")
    tracker = create_tracker(parsed(*flags, learning_rate=0.125), is_new=part == 0)
    metrics = {{"train/loss": 0.5 - part / 4, "train/pass@1": float("nan"), "train/text": "x"}}
    tracker.log(metrics | {{"train/step": 3 + part}}, "train/step")
    tracker.log({{"rollout/raw_reward": 0.25, "rollout/step": 1 + part}}, "rollout/step")
    tracker.close()
"""

READ = {
    "mlflow": """
import mlflow
client = mlflow.MlflowClient("sqlite:///outputs/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("slime").experiment_id])
assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
assert (run.data.params["learning_rate"], run.data.params["wandb_key"]) == ("0.125", "***")
history = client.get_metric_history(run.info.run_id, "train/loss")
losses = [(point.step, point.value) for point in history]
assert {"train/pass_1", "rollout/raw_reward"} <= set(run.data.metrics)
""",
    "swanlab": """
import glob
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader
records = []
for file in sorted(glob.glob("swanlog/run-*/run-*.swanlab")):
    reader = DataStoreReader()
    reader.open(file)
    records += [Record.FromString(data) for data in reader]
starts = [record.start for record in records if record.HasField("start")]
assert [start.name for start in starts] == ["mine"] * 2
assert starts[0].id == starts[1].id  # one run for the server
points = [record.scalar for record in records if record.HasField("scalar")]
losses = [(point.step, point.value.number) for point in points if point.key == "train/loss"]
assert [point.step for point in points if point.key == "rollout/raw_reward"] == [1, 2]
""",
    "trackio": """
import trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("slime")
assert (run.name, run.config["learning_rate"], run.config["wandb_key"]) == ("mine", 0.125, "***")
logs = SQLiteStorage.get_logs("slime", "mine", run_id=run.id)
losses = [(log["step"], log["train/loss"]) for log in logs if "train/loss" in log]
assert [log["step"] for log in logs if "rollout/raw_reward" in log] == [1, 2]
""",
}


def test_every_tracker_is_tested_here() -> None:
    assert READ.keys() == TRACKERS.keys()


@pytest.mark.parametrize("name", sorted(READ))
def test_a_tracker_gets_the_curves_and_settings_of_a_run_and_continues_when_it_is_resumed(
    name: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'slime[{name}]'")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths), "SWANLAB_MODE": "offline"}
    env |= {"TRACKIO_DIR": "trackio", "MLFLOW_DISABLE_TELEMETRY": "true"}
    expected = "assert losses == [(3, 0.5), (4, 0.25)], losses\n"
    for script in (RUN_TWICE.format(name=name), READ[name] + expected):
        # With the flag of a key: libraries may store the command line.
        command = [sys.executable, "-c", script, "--wandb-key", "hidden7"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert name in json.loads((tmp_path / "outputs" / "mine" / "trackers.json").read_text())
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [str(file) for file in files if b"hidden7" in file.read_bytes()]


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_tracker_whose_package_is_not_installed_names_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"--trackers {name} needs .* pip install 'slime\[{name}\]'"):
        create_tracker(parsed("--trackers", name))


def test_a_tracker_that_cannot_start_is_an_error_with_its_flag_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*given: object) -> None:
        raise PermissionError("the key is refused")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TRACKERS, "trackio", refuses)
    with pytest.raises(ConfigError, match="--trackers trackio: the tracker could not start: the key is refused"):
        create_tracker(parsed("--trackers", "trackio"))


def scraped(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return str(reply.read().decode())


def test_prometheus_scrapes_the_last_value_of_every_metric_under_a_stable_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO):
        tracker = create_tracker(parsed("--experiment-name", "mine", "--metrics-port", "0"))
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", caplog.text)
    tracker.log({"train/loss": 0.5, "train/lr-pg_0": 1e-6, "train/step": 3}, "train/step")
    tracker.log({"train/loss": float("nan"), "mine/pass@1": True, "mine/text": "x", "train/step": 4}, "train/step")
    text = scraped(url)
    values = {family.name: family.samples for family in text_string_to_metric_families(text)}
    assert math.isnan(values["slime_train_loss"][0].value)
    assert values["slime_train_loss"][0].labels == {"run": "mine"}
    assert values["slime_train_lr_pg_0"][0].value == 1e-6
    assert (values["slime_mine_pass_1"][0].value, values["slime_train_step"][0].value) == (1, 4)
    assert abs(values["slime_last_record_timestamp_seconds"][0].value - time.time()) < 100
    assert "mine_text" not in text
    assert "# HELP slime_train_loss train/loss: what is differentiated" in text
    with pytest.raises(ConfigError, match=r"--metrics-port \d+ .*cannot listen there"):
        create_tracker(parsed("--experiment-name", "other", "--metrics-port", url.split(":")[2].split("/")[0]))
    tracker.close()
    with pytest.raises(OSError, match="refused"):
        scraped(url)
