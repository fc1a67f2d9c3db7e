"""The board's answers, against plain Python over the same samples. test_page.py tests the page in a browser."""

from __future__ import annotations

import csv
import json
import math
import os
import socket
import statistics
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.testclient import TestClient

from benchmarks.made_run import make_run
from slime.board import board
from slime.board import runs as runs_module
from slime.board.curves import MetricFile, thin
from slime.board.run_data import RunData, SampleQuery, TokenTexts, without_common
from slime.board.runs import Runs, summary
from slime.board.server import STATIC, make_app
from slime.cli import main
from slime.data.sample import Sample
from slime.observability.metric_table import describe
from slime.observability.sample_record import LIGHT, read_rows, record_file, record_rollout
from slime.utils.errors import DataError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("board") / "run", num_rollouts=4, num_samples=16)


@pytest.fixture(scope="module")
def page(run: Path) -> TestClient:
    return TestClient(make_app(Runs(run)), base_url="http://localhost")


def all_rows(run: Path) -> list[dict[str, Any]]:
    rows = []
    for rollout in range(4):
        rows += [{"rollout": rollout, **row} for row in read_rows(record_file(run, "rollout", rollout))]
    return rows


def label_of(row: dict[str, Any]) -> str:
    return str(json.loads(row["rest"])["label"])


QUERIES: list[tuple[dict[str, Any], Any]] = [
    ({"rollout": 2}, lambda row: row["rollout"] == 2),
    ({"status": "truncated"}, lambda row: row["status"] == "truncated"),
    ({"min_reward": 1}, lambda row: row["reward"] >= 1),
    ({"max_reward": 0.5, "rollout": 1}, lambda row: row["reward"] <= 0.5 and row["rollout"] == 1),
    ({"min_length": 60, "max_length": 100}, lambda row: 60 <= row["response_length"] <= 100),
    ({"group": 101}, lambda row: row["group_index"] == 101),
    ({"text": "(1+"}, lambda row: "(1+" in row["response"]),
    ({"text": "USER\n5"}, lambda row: "user\n5" in json.loads(row["prompt"])),
    ({"text": "142"}, lambda row: any("142" in text for text in (row["prompt"], row["response"], label_of(row)))),
    ({}, lambda row: True),
]


@pytest.mark.parametrize(("query", "keeps"), QUERIES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_filters_keep_what_they_say(run: Path, page: TestClient, query: dict[str, Any], keeps: Any) -> None:
    answer = page.get("/api/samples", params={"limit": 500, **query}).json()
    expected = [row for row in all_rows(run) if keeps(row)]
    assert answer["total"] == len(expected)
    places = [(row["rollout"], row["position"]) for row in answer["rows"]]
    assert sorted(places) == [(row["rollout"], row["position"]) for row in expected]


@pytest.mark.parametrize("descending", [True, False])
def test_rows_come_in_the_order_asked_for_and_page_by_page(run: Path, page: TestClient, descending: bool) -> None:
    key = "response_length"
    answers = [
        page.get("/api/samples", params={"order": key, "descending": str(descending).lower(), "limit": 20, "offset": o})
        for o in (0, 20, 40, 60)
    ]
    found = [row for answer in answers for row in answer.json()["rows"]]
    sign = -1 if descending else 1
    expected = sorted(all_rows(run), key=lambda row: (sign * row[key], row["rollout"], row["position"]))
    columns = ("rollout", *LIGHT)
    assert [[row[name] for name in columns] for row in found] == [[row[name] for name in columns] for row in expected]
    assert [row["label"] for row in found] == [label_of(row) for row in expected]
    # Without the words of the template, which are the same in every prompt.
    assert [row["prompt"] for row in found] == [json.loads(row["prompt"])[17:-33] for row in expected]


def test_a_sample_shows_what_both_sides_say_about_its_tokens(run: Path, page: TestClient) -> None:
    sample = page.get("/api/sample", params={"kind": "rollout", "rollout": 2, "position": 9}).json()
    assert sample["num_prompt"] + sample["response_length"] == len(sample["ids"]) == len(sample["texts"])
    size = sample["response_length"]
    assert {name: len(values) for name, values in sample["columns"].items()} == {
        "rollout_log_probs": size,
        "log_probs": size,
        "advantages": size,
    }
    assert sample["train_reward"] == sample["reward"] - 0.5
    first_observed = sample["loss_mask"].index(0)
    assert set(sample["versions"][:first_observed]) == {"1"}
    assert sample["versions"][first_observed] is None
    assert sample["versions"][-1] == "2"
    assert [span["name"] for span in sample["spans"]] == ["generate_and_rm", "sglang_generate", "sglang_generate"]
    assert [span["depth"] for span in sample["spans"]] == [0, 1, 1]
    assert [mate["position"] for mate in sample["group"]] == list(range(8, 16))


def test_versions_that_cannot_be_told_apart_are_not_guessed(run: Path) -> None:
    from slime.board.run_data import _version_per_token

    assert _version_per_token([1, 1, 0, 1], ["3", "4"]) == ["3", "3", None, "4"]
    assert _version_per_token([1, 1, 1], ["3", "4"]) == [None, None, None]
    assert _version_per_token([1, 0], ["3", "3"]) == ["3", None]
    assert _version_per_token([1, 0], []) == [None, None]


def test_what_is_not_there_is_an_answer_with_a_reason(page: TestClient) -> None:
    for path in (
        "/api/sample?kind=rollout&rollout=99&position=0",
        "/api/sample?kind=rollout&rollout=1&position=99",
        "/api/sample?kind=../x&rollout=1&position=0",
        "/api/sample?kind=rollout&rollout=../../etc&position=0",
        "/api/samples?order=prompt",
        "/api/samples?rollout=x",
        "/api/samples?min_reward=x",
        f"/api/samples?group={10**30}",
        f"/api/sample?kind=rollout&rollout=1&position={10**30}",
    ):
        answer = page.get(path)
        assert answer.status_code == 404, path
        assert answer.json()["error"]
    assert page.get("/api/samples", params={"rollout": 99}).json()["total"] == 0
    assert page.get("/static/../run_data.py").status_code == 404


def test_other_sites_cannot_ask_and_other_scripts_cannot_run(run: Path, page: TestClient) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "", "[::1", "a:b:c"):
        assert page.get("/api/run", headers={"Host": host}).status_code == 400
    for host in ("LOCALHOST:1", "10.1.2.3:9265", "[::1]:9265"):
        assert page.get("/api/run", headers={"Host": host}).status_code == 200
    named = TestClient(make_app(Runs(run), "Node7"), base_url="http://node7:9265")
    assert named.get("/api/run").status_code == 200
    policy = page.get("/").headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    scripts = "".join(path.read_text(encoding="utf-8") for path in STATIC.glob("*.js"))
    for dangerous in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert dangerous not in scripts
    assert "http" not in scripts.replace("http://www.w3.org/2000/svg", "")
    assert "secret" not in page.get("/api/run").text


def test_a_file_of_samples_that_is_damaged_hides_no_others(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_rollouts=2, num_samples=8)
    record_file(run, "rollout", 1).write_bytes(b"PAR1 the rest was not copied")
    page = TestClient(make_app(Runs(run)), base_url="http://localhost")
    assert page.get("/api/samples").json()["total"] == 8
    assert page.get("/api/samples", params={"rollout": 1}).json()["rows"] == []
    answer = page.get("/api/sample", params={"rollout": 1, "position": 0})
    assert (answer.status_code, "cannot be read" in answer.json()["error"]) == (404, True)


def test_tokens_are_texts_wherever_the_board_was_started(tmp_path: Path, tiny_task, monkeypatch) -> None:
    run = make_run(tmp_path / "run", num_rollouts=1, num_samples=8)
    info = json.loads((run / "run.json").read_text())
    model = Path(tiny_task.model)
    (run / "run.json").write_text(json.dumps(info | {"cwd": str(model.parent), "hf_checkpoint": model.name}))
    monkeypatch.chdir(tmp_path)
    sample = RunData(run).sample("rollout", 0, 0)
    assert not "".join(sample["texts"]).replace(" ", "").isdigit()


def test_curves_follow_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricFile(path, 0.0)
    file.refresh()
    assert file.series() == {}
    first = json.dumps({"time": 1, "step_key": "train/step", "train/step": 0, "train/loss": 0.5, "train/note": "x"})
    path.write_text(first + '\n{"step_key": "train/step", "train/st')
    file.refresh()
    entry = describe("train/loss")
    assert entry is not None
    loss = {"unit": entry.unit, "meaning": entry.meaning}
    assert file.series("step") == {"train/loss": loss | {"x": [0.0], "y": [0.5]}}
    again = [{"step_key": "train/step", "train/step": s, "train/loss": v} for s, v in ((0, 0.75), (1, None), (2, 0.1))]
    path.write_text(first + "\nnot json\n" + "".join(json.dumps(record) + "\n" for record in again))
    file.refresh()
    assert file.series("step")["train/loss"] == loss | {"x": [0.0, 2.0], "y": [0.75, 0.1]}
    path.write_text(json.dumps({"step_key": "train/step", "train/step": 7, "train/loss": 1.0}) + "\n")
    file.refresh()
    assert file.series("step")["train/loss"]["x"] == [7.0]


def write_metrics(run: Path, *records: dict[str, Any]) -> None:
    """Append records; the time of each one is its number of seconds after 1000."""
    run.mkdir(exist_ok=True)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record | {"time": 1000 + record["time"]}) + "\n")


def rollout_records(rollout: int, time: float, *, steps: int = 2, tokens: int = 100) -> list[dict[str, Any]]:
    """Records as a run writes them: its steps, then its report."""
    trained = [
        {"time": time, "step_key": "train/step", "train/step": rollout * steps + i, "train/loss": rollout + i}
        for i in range(steps)
    ]
    report = {"rollout/step": rollout, "rollout/raw_reward": rollout / 10, "rollout/response_tokens": tokens}
    return [*trained, {"time": time + 1, "step_key": "rollout/step", **report}]


def test_every_curve_has_the_same_x_axis(tmp_path: Path) -> None:
    evaluation = {"time": 5, "step_key": "eval/step", "eval/step": 0, "eval/math": 0.5}
    write_metrics(tmp_path, evaluation, *rollout_records(0, 10), *rollout_records(1, 20))
    write_metrics(tmp_path, evaluation | {"time": 25, "eval/step": 2}, *rollout_records(2, 30)[:2])
    file = MetricFile(tmp_path / "metrics.jsonl", started=1000.0)
    file.refresh()

    def points(axis: Any, name: str) -> list[tuple[float, float]]:
        found = file.series(axis)[name]
        return list(zip(found["x"], found["y"], strict=True))

    # A point of a rollout is the mean of its steps. The last rollout is not reported yet.
    assert points("rollout", "train/loss") == [(0, 0.5), (1, 1.5), (2, 2.5)]
    assert points("rollout", "rollout/raw_reward") == [(0, 0.0), (1, 0.1)]
    assert points("rollout", "eval/math") == [(0, 0.5), (2, 0.5)]
    assert points("step", "train/loss") == [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)]
    assert points("step", "rollout/raw_reward") == [(1, 0.0), (3, 0.1)]
    assert points("time", "train/loss") == [(11, 0.5), (21, 1.5), (30, 2.5)]
    assert points("time", "eval/math") == [(5, 0.5), (25, 0.5)]
    assert points("tokens", "rollout/raw_reward") == [(100, 0.0), (200, 0.1)]
    assert points("tokens", "train/loss") == [(100, 0.5), (200, 2.0)]


def test_a_resumed_run_replaces_its_curves_from_where_it_resumes(tmp_path: Path) -> None:
    for rollout in range(4):
        write_metrics(tmp_path, *rollout_records(rollout, 10 * rollout, tokens=100))
    write_metrics(tmp_path, *rollout_records(1, 90, tokens=7))
    file = MetricFile(tmp_path / "metrics.jsonl", started=1080.0)
    file.refresh()
    assert file.series("rollout")["rollout/raw_reward"]["x"] == [0, 1]
    assert file.series("tokens")["rollout/raw_reward"]["x"] == [100, 107]
    assert file.series("time")["rollout/raw_reward"]["x"] == [1, 91]
    assert file.series("step")["train/loss"]["x"] == [0, 1, 2, 3]


def test_a_csv_file_has_every_point_of_the_chosen_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_metrics(tmp_path / name, *rollout_records(0, 10), *rollout_records(1, 20))
        write_info(tmp_path / name, started=1000.0)
    page = TestClient(make_app(Runs(tmp_path)), base_url="http://localhost")
    answer = page.get("/api/metrics.csv", params={"run": ["a", "b"], "name": ["train/loss"]})
    rows = list(csv.DictReader(answer.text.splitlines()))
    assert [(row["run"], row["step"], row["value"]) for row in rows] == [
        (name, f"{step}.0", f"{step // 2 + step % 2}.0") for name in ("a", "b") for step in range(4)
    ]
    assert list(rows[0]) == ["run", "metric", "rollout", "step", "time", "tokens", "value"]
    whole = page.get("/api/metrics.csv", params={"run": "a"}).text.splitlines()
    assert len(whole) == 1 + 2 * (2 + 2)
    assert page.get("/api/metrics.csv", params={"run": "../a"}).status_code == 404


def test_long_curves_are_thinned_and_keep_their_peaks() -> None:
    x = [float(i) for i in range(10_000)]
    y = [math.sin(i / 100) for i in range(10_000)]
    y[4321], y[8765] = 50.0, -50.0
    few_x, few_y = thin(x, y)
    assert len(few_x) <= 600
    assert few_x == sorted(few_x)
    assert {(4321.0, 50.0), (8765.0, -50.0)} <= set(zip(few_x, few_y, strict=True))
    assert thin(x[:600], y[:600]) == (x[:600], y[:600])


def write_info(run: Path, **facts: Any) -> None:
    run.mkdir(exist_ok=True)
    info = {"driver": "train.py", "argv": [], "cwd": "/", "started": 0.0}
    (run / "run.json").write_text(json.dumps(info | facts))


def test_a_run_without_samples_or_metrics_is_shown_as_it_is(tmp_path: Path) -> None:
    write_info(tmp_path)
    data = RunData(tmp_path)
    assert data.overview()["rollout"] == []
    assert data.metrics("rollout") == {}
    assert data.samples(SampleQuery())["total"] == 0
    assert data.samples(SampleQuery(by_group=True))["total"] == 0
    assert (summary(data)["state"], summary(data)["done"]) == ("ended", 0)
    with pytest.raises(DataError, match=r"run\.json"):
        RunData(tmp_path / "elsewhere")


def test_a_folder_of_runs_is_a_list_with_the_newest_run_first(tmp_path: Path, capsys) -> None:
    for started, name in enumerate(("b", "group/a", "b/earlier_1", "group/deep/er")):
        (tmp_path / name).mkdir(parents=True)
        write_info(tmp_path / name, started=float(started))
    page = TestClient(make_app(Runs(tmp_path)), base_url="http://localhost")
    assert [run["name"] for run in page.get("/api/runs").json()["runs"]] == ["b/earlier_1", "group/a", "b"]
    assert page.get("/api/run").json()["folder"] == str(tmp_path / "b" / "earlier_1")
    assert page.get("/api/run", params={"run": "b"}).json()["started"] == 0.0
    for name in ("..", "../b", "group/deep/er", str(tmp_path / "b")):
        assert page.get("/api/run", params={"run": name}).status_code == 404, name
    alone = Runs(tmp_path / "b").summaries()
    assert [run["name"] for run in alone] == ["b/earlier_1", "b"]
    assert main(["board", str(tmp_path / "nothing")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_runs_that_start_later_or_again_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.board.runs._SEARCH_EVERY_S", 0.0)
    write_info(tmp_path / "a")
    runs = Runs(tmp_path)
    first = runs.get("a")
    assert runs.get("a") is first
    write_info(tmp_path / "b")
    write_info(tmp_path / "a", argv=["--again"])
    os.utime(tmp_path / "a" / "run.json", (1, 1))
    assert {run["name"] for run in runs.summaries()} == {"a", "b"}
    assert runs.get("a").info.argv == ["--again"]


def test_the_state_of_a_run_is_that_of_its_process(tmp_path: Path) -> None:
    process = psutil.Process()
    alive = {"pid": process.pid, "pid_since": process.create_time()}
    write_metrics(tmp_path, *rollout_records(0, 10), *rollout_records(1, 30), *rollout_records(2, 40))
    write_metrics(tmp_path, *rollout_records(3, 60))

    def state(host: str = "", **progress: Any) -> dict[str, Any]:
        write_info(tmp_path, host=host, started=1000.0)
        (tmp_path / "progress.json").write_text(json.dumps({"num_rollout": 10} | progress))
        return summary(RunData(tmp_path))

    here = socket.gethostname()
    running = state(here, state="running", trainer={"phase": "train", "rollout_id": 4, "since": 1070.0}, **alive)
    assert (running["state"], running["phase"], running["done"], running["num_rollout"]) == ("running", "train", 4, 10)
    assert running["left_s"] == 6 * 20
    assert (running["reward"], running["changed"]) == (0.3, 1070.0)
    # A process of another machine cannot be looked up, and another process may have the number of a dead one.
    assert state("elsewhere", state="running", pid=process.pid, pid_since=0.0)["state"] == "running"
    assert state(here, state="running", pid=process.pid, pid_since=0.0)["state"] == "killed"
    for name in ("finished", "failed", "interrupted"):
        ended = state(here, state=name, pid=process.pid, pid_since=0.0)
        assert (ended["state"], ended["left_s"]) == (name, None)


def test_the_list_reads_only_the_end_of_long_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.board.runs._TAIL_BYTES", 1000)
    write_info(tmp_path)
    for rollout in range(50):
        write_metrics(tmp_path, *rollout_records(rollout, 10 * rollout))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"time": 5000, "step_key": "rollo')
    found = summary(RunData(tmp_path))
    assert (found["done"], found["reward"]) == (50, 4.9)
    assert len(runs_module._tail(tmp_path / "metrics.jsonl", (tmp_path / "metrics.jsonl").stat().st_size)) < 12


def test_groups_have_the_rewards_of_their_samples_in_order(run: Path, page: TestClient) -> None:
    answer = page.get("/api/samples", params={"rollout": 2, "by_group": "true", "order": "group_index"}).json()
    rows = [row for row in all_rows(run) if row["rollout"] == 2]
    groups = sorted({row["group_index"] for row in rows})
    assert [row["group_index"] for row in answer["rows"]] == groups
    for found in answer["rows"]:
        members = [row for row in rows if row["group_index"] == found["group_index"]]
        rewards = [row["reward"] for row in members]
        assert (found["positions"], found["rewards"]) == ([row["position"] for row in members], rewards)
        assert found["reward"] == pytest.approx(statistics.fmean(rewards))
        assert found["spread"] == pytest.approx(statistics.pstdev(rewards))
        assert found["label"] == label_of(members[0])
    assert page.get("/api/samples", params={"by_group": "true", "order": "spread"}).status_code == 200
    assert page.get("/api/samples", params={"order": "spread"}).status_code == 404


def test_prompts_of_a_table_begin_where_they_differ() -> None:
    shared = "<|user|>Answer this: {}<|end|><|model|>"
    assert without_common([shared.format(text) for text in ("12+34=", "17+20=")]) == ["12+34=", "17+20="]
    assert without_common(["a b", "a b"]) == ["a b", "a b"]
    assert without_common(["a b", "a"]) == ["a b", "a"]
    assert without_common(["so x", "so y z", "so y z"]) == ["x", "y z", "y z"]


def test_text_is_found_in_any_language_and_in_messages(tmp_path: Path) -> None:
    write_info(tmp_path)
    messages = [{"role": "user", "content": 'say "naïve"'}]
    samples = [
        Sample(index=0, group_index=0, prompt=messages, response="x" * 500 + " end", label="你好", reward=0.0),
        Sample(index=1, group_index=0, prompt="plain", response="y", label=None, reward=None, metadata={"k": "hidden"}),
    ]
    record_rollout(tmp_path, samples, rollout_id=0, limit=9, reward_key=None)
    data = RunData(tmp_path)

    def found(text: str) -> list[int]:
        return [row["index"] for row in data.samples(SampleQuery(text=text))["rows"]]

    for text in ('SAY "naïve"', "你好", " END"):
        assert found(text) == [0], text
    assert found("plain") == [1]
    # Neither names of fields nor metadata are texts of a sample.
    assert found("label") == found("hidden") == found("none") == []
    rows = data.samples(SampleQuery())["rows"]
    assert [row["prompt"] for row in rows] == ['say "naïve"', "plain"]


def test_a_port_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for port in ("0", "65536"):
        with pytest.raises(SystemExit):
            board([str(tmp_path), "--port", port])
        assert f"{port}: must be a port from 1 to 65535" in capsys.readouterr().err


def test_a_port_in_use_is_an_error_before_an_address_is_printed(tmp_path: Path, capsys) -> None:
    write_info(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["board", str(tmp_path), "--port", str(port)]) == 2
    captured = capsys.readouterr()
    assert f"--port {port}: cannot listen on 127.0.0.1" in captured.err
    assert "http" not in captured.out


def test_tokens_are_texts_that_make_the_whole_again(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    byte_level = Tokenizer(models.BPE({chr(c): i for i, c in enumerate(_byte_alphabet())}, []))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.save(str(tmp_path / "tokenizer.json"))
    text = "naïve 你\n x"
    ids = byte_level.encode(text).ids
    texts = TokenTexts(str(tmp_path)).of(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text
    assert "你" in texts
    assert TokenTexts(str(tmp_path / "nothing")).of([5, 6]) == ["5 ", "6 "]


def _byte_alphabet() -> list[int]:
    from tokenizers import pre_tokenizers

    return sorted(ord(character) for character in pre_tokenizers.ByteLevel.alphabet())
