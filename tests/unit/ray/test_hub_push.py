"""Exports that are pushed to a Hub: the client of huggingface_hub against a server of this process."""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from slime.observability.run_info import write_run_info
from slime.ray import rules
from slime.ray.run import loop
from slime.ray.run.hub_push import HubPushes, model_card
from tests.unit.config.tiny_command import TinyCommand, make_model
from tests.unit.ray.runs import make_run

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


class Hub(ThreadingHTTPServer):
    """The calls of ``hf upload``. Every file is a regular one, which is in the request of its commit.

    Attributes:
        repositories: payloads of their creation.
        commits: (message, files) in order.
        status: of the answer to a commit.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: list[dict[str, Any]] = []
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self.tokens: set[str | None] = set()
        self.status = 200
        self.hangs = threading.Event()
        self.released = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.hangs.is_set():
            self.server.released.wait(60)
        path, url = self.path.partition("?")[0], f"http://127.0.0.1:{self.server.server_port}/me/model"
        if path == "/api/repos/create":
            self.server.repositories.append(json.loads(body))
            self._answer(200, {"url": url})
        elif path == "/api/models/me/model/preupload/main":
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif path == "/api/models/me/model/commit/main":
            header, *rest = (json.loads(line) for line in body.splitlines())
            files = {one["value"]["path"]: base64.b64decode(one["value"]["content"]) for one in rest}
            if self.server.status == 200:
                self.server.commits.append((header["value"]["summary"], files))
            self._answer(self.server.status, {"commitUrl": f"{url}/commit/1", "commitOid": "1" * 40})
        else:
            self._answer(200 if path == "/api/validate-yaml" else 404, {})

    def log_message(self, *args: Any) -> None: ...

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for name, value in {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
        }.items():
            monkeypatch.setenv(name, value)
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def export(tmp_path: Path) -> str:
    folder = tmp_path / "export"
    folder.mkdir()
    files = {"model.safetensors": b"\0weights", "config.json": b"{}", "README.md": b"of the base model"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return str(folder)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "sums"
    folder.mkdir()
    words = ["train.py", "--hf-checkpoint", "models/tiny", "--wandb-key", "secret", "--lr", "1e-5"]
    args = Namespace(
        hf_checkpoint="models/tiny", prompt_data="a|b.jsonl", advantage_estimator="grpo", wandb_key="secret"
    )
    write_run_info(folder, vars(args), words)
    rewards = [{"rollout/raw_reward": i / 100, "rollout/step": i, "step_key": "rollout/step"} for i in range(50)]
    evals = {"eval/sums": 0.25, "eval/sums-truncated_ratio": 0.5, "eval/weight_version": 10, "eval/step": 10}
    steps = {"train/loss": 9.0, "train/step": 1, "step_key": "train/step"}
    lines = [json.dumps(row) for row in (*rewards, evals | {"step_key": "eval/step"}, steps)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"rollout/raw_rew']))
    return folder


def test_an_export_and_then_its_card_are_pushed_to_a_private_repository(
    hub: Hub, export: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pushes = HubPushes("me/model")
    pushes.begin(export, 49, run)
    pushes.close(stops=False)
    assert [record.levelname for record in caplog.records] == ["INFO"] * len(caplog.records), caplog.text
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in caplog.text
    first = hub.repositories[0]
    assert (first["name"], first["organization"]) == ("model", "me")
    assert first.get("private") is True or first.get("visibility") == "private"
    (message, files), (_, card) = hub.commits
    assert message == "rollout 49"
    assert files == {"model.safetensors": b"\0weights", "config.json": b"{}"}
    assert card == {"README.md": model_card(run, export, 49).encode()}
    assert (Path(export) / "README.md").read_bytes() == b"of the base model"


def test_the_card_has_the_command_and_the_rewards_of_the_run(export: str, run: Path) -> None:
    card = model_card(run, export, 49)
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- reinforcement-learning\n- slime\n---\n\n# sums\n")
    assert "| base model | tiny |" in card
    assert "| rollouts trained | 50 |" in card
    assert "| prompts | a\\|b.jsonl |" in card
    assert "python train.py --hf-checkpoint models/tiny \\\n    --wandb-key" in card
    assert "secret" not in card
    table = card[card.index("## Rewards") :].splitlines()
    assert table[2] == "| rollout | rollout/raw_reward | eval/sums |"
    assert table[-1] == "| 49 | 0.490 |  |"
    assert "| 10 | 0.100 | 0.250 |" in table
    assert len(table) == 4 + 17
    (Path(export) / "adapter_config.json").write_text("{}")
    (run / "metrics.jsonl").unlink()
    card = model_card(run, export, 0)
    assert "library_name: peft" in card
    assert "## Rewards" not in card


def test_a_push_that_fails_is_a_warning_with_the_commands(
    hub: Hub, export: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.status = 403
    pushes = HubPushes("me/model")
    pushes.begin(export, 3, run)
    pushes.close(stops=False)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    text = record.getMessage()
    assert f"{export} was not pushed to me/model: hf upload ended with 1: " in text
    assert "403" in text
    assert (
        f"hf upload me/model {export} . --private --exclude README.md --commit-message 'rollout 3' && hf upload" in text
    )
    assert hub.commits == []


def test_a_defect_of_the_push_is_a_warning_with_its_traceback(
    hub: Hub, export: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "metrics.jsonl").write_text('{"step_key": "eval/step", "eval/step": [3]}')
    pushes = HubPushes("me/model")
    pushes.begin(export, 3, run)
    pushes.close(stops=False)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.getMessage().startswith(f"{export} was not pushed: TypeError(")
    assert record.exc_info is not None, "a defect needs its traceback"


def test_a_hub_that_does_not_answer_and_the_end_of_a_run_end_the_push(
    hub: Hub, export: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.hangs.set()
    stalled = HubPushes("me/model", stall_s=1.0)
    stalled.begin(export, 3, run)
    stalled.wait_for("another")
    stalled.wait_for(export)
    assert "hf upload has read and written nothing for 1 s" in caplog.text
    caplog.clear()
    stopped = HubPushes("me/model")
    stopped.begin(export, 3, run)
    stopped.begin("next", 4, run)
    while not hub.tokens:
        time.sleep(0.05)
    stopped.close(stops=True)
    assert [record.getMessage().split(". To")[0] for record in caplog.records] == [
        f"{path} was not pushed to me/model: the run ended before" for path in (export, "next")
    ]
    stalled.close(stops=False)


def test_a_run_pushes_each_export_and_waits_before_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    diary: list[Any] = []

    class Pushes:
        def __init__(self, repo: str | None) -> None:
            diary.append(repo)

        def wait_for(self, path: str) -> None:
            diary.append(("wait", path))

        def begin(self, path: str, rollout_id: int, run: Path) -> None:
            diary.append(("push", path, rollout_id, run))

        def close(self, *, stops: bool) -> None:
            diary.append(("close", stops))

    monkeypatch.setattr(loop, "HubPushes", Pushes)
    monkeypatch.setattr(loop.RunHandles, "dispose", lambda handles: diary.append("dispose"))
    trainer = SimpleNamespace(ranks=[], save_hf=lambda path: diary.append(("export", path)))
    tracker = SimpleNamespace(directory=Path("run"))
    run = make_run(trainer=trainer, tracker=tracker, args={"save_hf": "hf_{rollout_id}", "push_to_hub": "me/model"})
    run.save(7)
    run.__exit__(None, None, None)
    path = "hf_7"
    story = [("wait", path), ("export", path), ("push", path, 7, Path("run")), "dispose", ("close", False)]
    assert diary == ["me/model", *story]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--push-to-hub", "model", "--save-hf", "h"), "--push-to-hub model must name a repository with its owner"),
        (("--push-to-hub", "me/model"), "uploads the exports of --save-hf: give --save-hf DIR as well"),
        (("--push-to-hub", "me/model", "--save-hf", "h"), ""),
    ],
)
def test_the_flag_needs_an_owner_and_an_export(tmp_path: Path, flags: tuple[str, ...], problem: str) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1 = ", "label": "2"}\n' * 8)
    command = TinyCommand(tmp_path, make_model(tmp_path / "model"), str(tmp_path / "prompts.jsonl"))
    _, problems = command.run(*flags)
    assert problem in problems if problem else not problems


def test_a_machine_without_token_is_named_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(repo: str | None) -> list[str]:
        return list(rules._hub(Namespace(push_to_hub=repo)))

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert find(None) == []
    (problem,) = find("me/model")
    assert "--push-to-hub me/model needs a token that may write: set HF_TOKEN" in problem
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: TOKEN)
    assert find("me/model") == []
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    (problem,) = find("me/model")
    assert "HF_HUB_OFFLINE is set" in problem
