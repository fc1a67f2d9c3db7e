"""One real run with two turns per sample, and everything a person does with its folder afterwards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.board import serving
from benchmarks.browser import dom_of, find_chromium
from benchmarks.made_run import make_run
from slime.observability.metric_table import describe
from slime.observability.metric_utils import request_metrics
from slime.observability.sample_record import read_rows, record_file, sample_of_row, train_files
from tests.e2e.running import PLUGINS, ROOT, metrics, run_train
from tests.programs import run_program
from tools.trace_timeline_viewer import timeline_rows

NUM_SAMPLES = 16

needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason="no chromium here: apt-get install chromium, or name one in CHROMIUM"
)


@pytest.fixture(scope="module")
def run(tiny_task, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("record")
    done = run_train(
        [
            *("--hf-checkpoint", tiny_task.model, "--prompt-data", tiny_task.train, "--label-key", "label"),
            *("--apply-chat-template", "--rollout-batch-size", 4, "--n-samples-per-prompt", 4),
            *("--custom-generate-function-path", f"{PLUGINS}:two_turns"),
            *("--custom-rm-path", f"{PLUGINS}:share_of_sevens"),
            *("--rollout-max-response-len", 32, "--fp32", "--use-kl-loss", "--lr", "1e-3"),
            *("--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1, "--num-rollout", 2, "--save", output / "ckpt"),
            *("--save-interval", 1, "--sglang-context-length", 128, "--sglang-max-total-tokens", 8192),
            *("--output-dir", output, "--experiment-name", "run", "--wandb-key", "do-not-keep"),
            *("--use-pytorch-profiler", "--profile-target", "train_actor"),
            *("--profile-step-start", 1, "--profile-step-end", 2),
        ],
        output,
    )
    assert done.status == 0, done.output[-4000:]
    return output / "run"


def slime(*words: Any) -> subprocess.CompletedProcess[str]:
    return run_program("-m", "slime", *words)


def with_other_functions(run: Path, name: str, old: str, new: str) -> Path:
    """The record of the run with another function on its command line."""
    info = json.loads((run / "run.json").read_text())
    changed = run.parent / name
    (changed / "samples").mkdir(parents=True)
    record_file(changed, "rollout", 1).write_bytes(record_file(run, "rollout", 1).read_bytes())
    argv = [word.replace(old, new) for word in info["argv"]]
    (changed / "run.json").write_text(json.dumps(info | {"argv": argv}))
    return changed


def test_the_folder_holds_samples_with_both_sides_and_their_traces(run: Path) -> None:
    rows = read_rows(record_file(run, "rollout", 1))
    assert [row["position"] for row in rows] == list(range(NUM_SAMPLES))
    assert {row["weight_version"] for row in rows} == {"1"}
    trained = {row["position"]: row for file in train_files(run, 1) for row in read_rows(file)}
    assert len(train_files(run, 1)) == 2
    for row in rows:
        mine = trained[row["position"]]
        assert mine["sample_index"] == row["index"]
        pairs = zip(mine["log_probs"], row["rollout_log_probs"], row["loss_mask"], strict=True)
        assert max(abs(t - e) for t, e, kept in pairs if kept) < 1e-4
        assert 0 in row["loss_mask"]
    samples = [sample_of_row(row) for row in rows]
    drawn = timeline_rows(sample.to_dict() for sample in samples)
    names = {item["name"] for line in drawn for item in line["items"]}
    assert {"generate_and_rm_group", "generate_and_rm", "reward_model"} <= names
    assert {line["open_count"] for line in drawn} == {0}
    assert request_metrics(samples) == {}  # a function of the user sends its own requests
    assert "do-not-keep" not in (run / "run.json").read_text()
    assert len(list((run / "profile").glob("train_actor_rollout_1_rank_*.json.gz"))) == 2


def test_every_metric_of_a_run_is_in_the_table(run: Path) -> None:
    axes = {"time", "step_key", "train/step", "rollout/step", "eval/step"}
    names = {name for record in metrics(run) for name in record} - axes
    assert sorted(name for name in names if describe(name) is None) == []
    record = next(record for record in reversed(metrics(run)) if record["step_key"] == "rollout/step")
    assert record["perf/step_time"] >= record["perf/train_time"] >= record["perf/actor_train_time"] > 0
    assert record["perf/update_weights_bytes"] > 1e6
    assert 0 < record["rollout/masked_share"] < 0.5


def test_a_recorded_sample_is_replayed_to_the_token_the_reward_and_the_log_probs(run: Path) -> None:
    done = slime("replay", run, "--rollout", 1, "--sample", 6)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [row for file in train_files(run, 1) for row in read_rows(file) if row["position"] == 6]
    mask = read_rows(record_file(run, "rollout", 1))[6]["loss_mask"]
    expected = sum(p for p, kept in zip(row["log_probs"], mask, strict=True) if kept) / sum(mask)
    found = re.search(r"^  log_probs +(\S+)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert float(found.group(1)) == pytest.approx(expected, abs=1e-4)
    assert "rollout 0" in done.stdout  # the checkpoint that generated it


def test_a_code_change_is_seen_by_the_replay(run: Path) -> None:
    changed = with_other_functions(run, "changed", "two_turns", "two_other_turns")
    done = slime("replay", changed, "--rollout", 1, "--sample", 6, "--no-train")
    assert done.returncode == 2
    assert "departs from the recording at token" in done.stdout + done.stderr


def test_a_breakpoint_in_the_reward_stops_there(run: Path) -> None:
    stopping = with_other_functions(run, "stopping", "share_of_sevens", "reward_with_a_breakpoint")
    words = ("replay", stopping, "--rollout", "1", "--sample", "6", "--no-train")
    left_by_ray = {"PYTHONBREAKPOINT": "ray.util.rpdb._driver_set_trace"}  # ray.init sets it for all children
    kwargs = {"input": 'p ("stopped at", sample.index)\nc\n', "env": os.environ | left_by_ray, "cwd": ROOT}
    done = subprocess.run([sys.executable, "-m", "slime", *words], capture_output=True, text=True, **kwargs)
    assert f"('stopped at', {read_rows(record_file(run, 'rollout', 1))[6]['index']})" in done.stdout
    assert done.returncode == 0, done.stderr


def test_the_doctor_finds_nothing_wrong_with_it(run: Path) -> None:
    done = slime("doctor", "mismatch", run, "--rollout", 0, "--json")
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert (verdict["cause"], verdict["num_samples"]) == ("none", NUM_SAMPLES)


@needs_chromium
def test_the_board_shows_the_run_in_a_browser(run: Path) -> None:
    with serving(run) as url:
        overview = dom_of(url)
        assert "Where the time of a step goes" in overview
        assert overview.count("<svg") >= 8
        table = dom_of(f"{url}/#samples")
        assert table.count("<tr>") + table.count("<tr ") == 1 + NUM_SAMPLES
        sample = dom_of(f"{url}/#sample/rollout/1/6")
        assert "environment, not trained" in sample
        assert sample.count('data-i="') == read_rows(record_file(run, "rollout", 1))[6]["response_length"]
        assert "reward_model" in sample


@needs_chromium
def test_texts_of_models_and_data_are_never_read_as_html(tmp_path: Path) -> None:
    attack = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script>"
    run = make_run(tmp_path / attack.replace("/", "|"), num_rollouts=1, num_samples=4, extra_text=attack)
    with serving(run) as url:
        for place in ("", "#runs", "#metrics", "#samples", "#samples?by_group=true", "#sample/rollout/0/1", "#run"):
            page = dom_of(f"{url}/{place}")
            assert "<title>taken" not in page
            assert "<img" not in page
            assert page.count("<script") == 2
            assert "&lt;img src=x" in page
