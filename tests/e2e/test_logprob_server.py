"""A teacher in the log-prob server, end to end: distillation from it, with requests from every node, and --ci-test.

The temperature makes the random model as sure of itself as --ci-test expects of a trained one.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest

from slime.utils.async_utils import Deadline, wait_until
from slime.utils.net import claim_ports
from tests.doc_commands import commands_of_page, shown_flags
from tests.e2e.running import MARK, ROOT, Finished, metrics, run_train, values

ENTRY = "slime.backends.megatron_utils.server.megatron_server"
TEMPERATURE = ("--rollout-temperature", "0.02")


class LogProbServer:
    """The command, and its answers."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.claim, self.mark = claim_ports("127.0.0.1"), uuid.uuid4().hex
        self.port = self.claim.first
        self.log = directory / "server.log"
        ports = ("--teacher-port", self.port, "--teacher-warmup-port", self.port)
        command = [sys.executable, "-m", ENTRY, *map(str, (*ports, *flags))]
        env = os.environ | {MARK: self.mark, "PYTHONPATH": str(ROOT)}
        with self.log.open("w") as sink:
            self.process = subprocess.Popen(command, cwd=directory, env=env, stdout=sink, stderr=subprocess.STDOUT)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, path: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=600) as response:
            return json.load(response)

    def wait_ready(self) -> None:
        wait_until(self._answers, Deadline(600, "the log-prob server"))

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            return bool(self.call("/healthz")["ok"])
        except OSError:
            return False


@pytest.fixture
def server(tiny_task, tmp_path):
    server = LogProbServer(
        *(
            tmp_path,
            *shown_flags("docs/logprob_server.md", "megatron_server"),
            "--hf-checkpoint",
            tiny_task.model,
            "--fp32",
            *TEMPERATURE,
        ),
        *("--actor-num-gpus-per-node", "1", "--tensor-model-parallel-size", "1", "--max-tokens-per-gpu", "2048"),
    )
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def test_a_student_learns_from_a_teacher_behind_the_server(server, tiny_task, tmp_path):
    flags = [
        *("--hf-checkpoint", tiny_task.model, "--prompt-data", tiny_task.train, "--label-key", "label"),
        *("--apply-chat-template", "--rollout-batch-size", 8, "--n-samples-per-prompt", 2, "--num-rollout", 3),
        *("--rollout-max-response-len", 8, *TEMPERATURE, "--fp32", "--actor-num-gpus-per-node", 1),
        *("--rollout-num-gpus", 1, "--sglang-context-length", 128, "--sglang-max-total-tokens", 8192),
        *("--lr", "1e-4", *shown_flags("docs/logprob_server.md", "--use-opd"), "--rm-url", f"{server.url}/generate"),
        *("--use-kl-loss", "--kl-loss-coef", "0.0", "--use-rollout-entropy", "--use-distributed-post"),
        *(*shown_flags("docs/reproducibility.md", "--ci-test"), "--use-fault-tolerance"),
        *("--ci-save-grad-norm", tmp_path / "norm_{rollout_id}_{step_id}"),
        *("--save-hf", tmp_path / "hf_{rollout_id}", "--save", tmp_path / "saved", "--save-interval", 3),
        *("--output-dir", tmp_path, "--experiment-name", "run"),
    ]
    server.wait_ready()
    done = run_train(flags, tmp_path)
    assert done.status == 0, done.output[-4000:]
    kl = values(metrics(tmp_path / "run"), "train/opd_reverse_kl")
    assert len(kl) == 3
    assert abs(kl[0]) < 1e-4, "the student starts as its teacher"
    assert max(map(abs, kl)) > 1e-4, "and leaves it, because the loss is only noise then"
    assert "2 HTTP workers send the requests to engines" in done.output
    assert "--ci-test: the first engine is stopped now" in done.output
    norms = [float((tmp_path / f"norm_{i}_0").read_text()) for i in range(3)]
    assert norms == pytest.approx(values(metrics(tmp_path / "run"), "train/grad_norm"))
    assert done.survivors() == []

    page = commands_of_page(ROOT / "docs" / "logprob_server.md")
    [curl] = [command.text for command in page if command.text.startswith("curl")]
    answer = server.call("/generate", json.loads(shlex.split(curl)[-1]))
    assert len(answer["label_token_log_probs"]) == 2, "one list per token after the first, as the page says"
    asked = {"input_ids": [5, 6, 7, 8], "sample_n": 2, "label_token_ids": [[1], [2], [3]]}
    before = server.call("/generate", asked)
    assert len(before["log_probs"]) == len(before["label_token_log_probs"]) == len(before["sampled_log_probs"]) == 3
    assert server.call("/get_loads")["total_finished_reqs"] >= 3 * 16
    assert server.call("/update_weights_from_disk", {"model_path": str(tmp_path / "hf_2")})["ok"]
    assert server.call("/generate", asked)["log_probs"] != before["log_probs"]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait() == 0, server.log.read_text()[-4000:]
    assert Finished(0, "", server.mark).survivors() == []
