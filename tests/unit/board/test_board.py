"""The board's answers, against plain Python over the same samples. tests/e2e tests the page in a browser."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from benchmarks.made_run import make_run
from slime.board.command import _chosen_run, board
from slime.board.run_data import MetricFile, RunData, SampleQuery, TokenTexts, thin
from slime.board.server import make_app
from slime.observability.metric_table import describe
from slime.observability.sample_record import LIGHT, read_rows, record_file
from slime.utils.errors import DataError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("board") / "run", num_rollouts=4, num_samples=16)


@pytest.fixture(scope="module")
def page(run: Path) -> TestClient:
    return TestClient(make_app(RunData(run)), base_url="http://localhost")


def all_rows(run: Path) -> list[dict[str, Any]]:
    rows = []
    for rollout in range(4):
        rows += [{"rollout": rollout, **row} for row in read_rows(record_file(run, "rollout", rollout), LIGHT)]
    return rows


QUERIES: list[tuple[dict[str, Any], Any]] = [
    ({"rollout": 2}, lambda row: row["rollout"] == 2),
    ({"status": "truncated"}, lambda row: row["status"] == "truncated"),
    ({"min_reward": 1}, lambda row: row["reward"] >= 1),
    ({"max_reward": 0.5, "rollout": 1}, lambda row: row["reward"] <= 0.5 and row["rollout"] == 1),
    ({"min_length": 60, "max_length": 100}, lambda row: 60 <= row["response_length"] <= 100),
    ({"group": 101}, lambda row: row["group_index"] == 101),
    ({"text": "(1+"}, lambda row: "(1+" in row["snippet"]),
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
    assert found == expected


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
    named = TestClient(make_app(RunData(run), "Node7"), base_url="http://node7:9265")
    assert named.get("/api/run").status_code == 200
    policy = page.get("/").headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    static = Path(__file__).parents[3] / "slime" / "board" / "static"
    scripts = "".join(path.read_text(encoding="utf-8") for path in static.glob("*.js"))
    for dangerous in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert dangerous not in scripts
    assert "http" not in scripts.replace("http://www.w3.org/2000/svg", "")
    assert "secret" not in page.get("/api/run").text


def test_a_file_of_samples_that_is_damaged_hides_no_others(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_rollouts=2, num_samples=8)
    record_file(run, "rollout", 1).write_bytes(b"PAR1 the rest was not copied")
    page = TestClient(make_app(RunData(run)), base_url="http://localhost")
    assert page.get("/api/samples").json()["total"] == 8
    assert page.get("/api/samples", params={"rollout": 1}).json()["rows"] == []
    answer = page.get("/api/sample", params={"rollout": 1, "position": 0})
    assert (answer.status_code, "cannot be read" in answer.json()["error"]) == (404, True)


def test_a_run_is_live_before_its_curves_were_asked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_rollouts=1, num_samples=8)
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {"started": 0.0}))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "step_key": "train/step", "train/step": 9}) + "\n")
    assert RunData(run).overview()["is_live"]


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
    file = MetricFile(path)
    file.refresh()
    assert file.series() == {}
    first = json.dumps({"time": 1, "step_key": "train/step", "train/step": 0, "train/loss": 0.5, "train/note": "x"})
    path.write_text(first + '\n{"step_key": "train/step", "train/st')
    file.refresh()
    entry = describe("train/loss")
    assert entry is not None
    loss = {"axis": "train/step", "unit": entry.unit, "meaning": entry.meaning}
    assert file.series() == {"train/loss": loss | {"x": [0.0], "y": [0.5]}}
    again = [{"step_key": "train/step", "train/step": s, "train/loss": v} for s, v in ((0, 0.75), (1, None), (2, 0.1))]
    path.write_text(first + "\nnot json\n" + "".join(json.dumps(record) + "\n" for record in again))
    file.refresh()
    assert file.series()["train/loss"] == loss | {"x": [0.0, 2.0], "y": [0.75, 0.1]}
    path.write_text(json.dumps({"step_key": "train/step", "train/step": 7, "train/loss": 1.0}) + "\n")
    file.refresh()
    assert file.series()["train/loss"]["x"] == [7.0]


def test_long_curves_are_thinned_and_keep_their_peaks() -> None:
    x = [float(i) for i in range(10_000)]
    y = [math.sin(i / 100) for i in range(10_000)]
    y[4321], y[8765] = 50.0, -50.0
    few_x, few_y = thin(x, y)
    assert len(few_x) <= 600
    assert few_x == sorted(few_x)
    assert {(4321.0, 50.0), (8765.0, -50.0)} <= set(zip(few_x, few_y, strict=True))
    assert thin(x[:600], y[:600]) == (x[:600], y[:600])


def test_a_run_without_samples_or_metrics_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"driver": "train.py", "argv": [], "cwd": "/", "started": 0}')
    data = RunData(tmp_path)
    assert data.overview()["rollouts"] == []
    assert data.metrics() == {}
    assert data.samples(SampleQuery())["total"] == 0
    with pytest.raises(DataError, match=r"run\.json"):
        RunData(tmp_path / "elsewhere")


def test_of_a_folder_of_runs_the_newest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for age, name in enumerate(("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
        os.utime(tmp_path / name / "run.json", (age, age))
    assert _chosen_run(tmp_path) == tmp_path / "a"
    assert _chosen_run(tmp_path / "b") == tmp_path / "b"
    assert board([str(tmp_path / "nothing")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_a_port_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for port in ("0", "65536"):
        with pytest.raises(SystemExit):
            board([str(tmp_path), "--port", port])
        assert f"{port}: must be a port from 1 to 65535" in capsys.readouterr().err


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
