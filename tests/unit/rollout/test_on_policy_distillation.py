"""On-policy distillation: the teacher scores the student's tokens, and only usable replies pass."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from slime.data.sample import Sample
from slime.rollout.failures import give_up
from slime.rollout.on_policy_distillation import post_process_rewards, reward_func
from slime.utils.errors import ConfigError, DataError
from slime.utils.http_utils import close_http_client


class Teacher:
    """An SGLang server's /generate for prompts only: token t has log-prob -t / 100."""

    def __init__(self, reply=None) -> None:
        self.requests: list[dict[str, Any]] = []
        teacher = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                teacher.requests.append(body)
                ids = body["input_ids"]
                rows = [[None, ids[0], None]] + [[-token / 100, token, None] for token in ids[1:]]
                data = json.dumps(reply or {"text": "", "meta_info": {"input_token_logprobs": rows}}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/generate"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def teacher():
    started = []

    def start(reply=None):
        started.append(Teacher(reply))
        return started[-1]

    yield start
    for item in started:
        item.server.shutdown()
        item.server.server_close()


def ask(args: Any, sample: Sample) -> Any:
    async def once() -> Any:
        try:
            return await reward_func(args, sample)
        finally:
            await close_http_client()

    return asyncio.run(once())


def test_the_teachers_log_probs_of_the_response_tokens_end_in_the_sample(teacher):
    server = teacher()
    args = SimpleNamespace(rm_url=server.url, rollout_temperature=0.7, rm_timeout=100.0)
    sample = Sample(index=3, tokens=[10, 11, 12, 13], response_length=2)
    sample.reward = ask(args, sample)
    (request,) = server.requests
    assert (request["input_ids"], request["sampling_params"]["max_new_tokens"]) == ([10, 11, 12, 13], 0)
    assert request["sampling_params"]["temperature"] == 0.7
    assert post_process_rewards(args, [sample]) == ([0.0], [0.0])
    assert sample.teacher_log_probs.tolist() == pytest.approx([-0.12, -0.13])


def test_the_teacher_sees_the_images_of_the_sample(teacher, monkeypatch):
    image_token = SimpleNamespace(image_token_id=7, video_token_id=None)
    monkeypatch.setattr("slime.rollout.engine_request.load_processor", lambda *_, **__: image_token)
    rows = [[None, 10, None], *([-token / 100, token, None] for token in (7, 7, 12))]
    server = teacher({"text": "", "meta_info": {"input_token_logprobs": rows}})
    args = SimpleNamespace(rm_url=server.url, rollout_temperature=1.0, rm_timeout=100.0)
    media = {"images": [Image.new("RGB", (4, 4))]}
    sample = Sample(index=3, tokens=[10, 7, 7, 12], response_length=1, multimodal_inputs=media)
    sample.reward = ask(args, sample)
    (request,) = server.requests
    assert request["input_ids"] == [10, 7, 12], "the server repeats the placeholder of an image itself"
    assert [data[:22] for data in request["image_data"]] == ["data:image/png;base64,"]
    post_process_rewards(args, [sample])
    assert sample.teacher_log_probs.tolist() == pytest.approx([-0.12])


def test_the_log_prob_server_is_understood_as_well(teacher):
    args = SimpleNamespace(
        rm_url=teacher({"log_probs": [-0.1, -0.2, -0.3]}).url, rollout_temperature=1.0, rm_timeout=100.0
    )
    sample = Sample(index=3, tokens=[10, 11, 12, 13], response_length=2)
    sample.reward = ask(args, sample)
    post_process_rewards(args, [sample])
    assert sample.teacher_log_probs.tolist() == pytest.approx([-0.2, -0.3])


def test_a_reply_that_cannot_be_used_names_the_sample_and_the_flag(teacher):
    sample = Sample(index=3, tokens=[10, 11, 12], response_length=2)
    for reply, message in (
        ({"answer": 1}, "has neither meta_info"),
        ({"meta_info": {"input_token_logprobs": [[0, 1]]}}, "1 token"),
        ({"log_probs": [-0.1]}, "2 tokens"),
        ({"log_probs": [-0.1, None]}, "no log-prob for some response tokens"),
    ):
        args = SimpleNamespace(rm_url=teacher(reply).url, rollout_temperature=1.0, rm_timeout=100.0)
        with pytest.raises(DataError, match=f"--rm-url.*({message}.*sample 3|sample 3.*{message})"):
            ask(args, sample)


def test_without_the_teachers_address_nothing_is_asked():
    with pytest.raises(ConfigError, match="--rm-url"):
        ask(SimpleNamespace(rm_url=None), Sample(tokens=[1, 2], response_length=1))


def test_a_sample_that_was_given_up_needs_no_teacher():
    failed = Sample(tokens=[1, 2], response_length=1)
    give_up(failed, "reward", ValueError(), "the teacher refused it")
    failed.reward = 0.0
    scored = Sample(tokens=[1, 2], response_length=1, reward={"log_probs": [-0.5]})
    assert post_process_rewards(None, [failed, scored]) == ([0.0, 0.0], [0.0, 0.0])
    assert scored.teacher_log_probs.tolist() == [-0.5]
    assert failed.teacher_log_probs is None
