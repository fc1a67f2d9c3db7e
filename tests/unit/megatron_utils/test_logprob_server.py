"""The log-prob server around a model that is a function: requests, rounds, the queue, statuses and updates."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from slime.backends.megatron_utils.server.arguments import (
    TeacherServerArgs,
    add_megatron_server_arguments,
    configure_megatron_server_args,
    validate_megatron_server_args,
)
from slime.backends.megatron_utils.server.megatron_server import ServedModel, make_app, serving, warm_up
from slime.backends.megatron_utils.server.queue import (
    RoundSettings,
    Score,
    ScoreQueue,
    ScoreRequest,
    Updating,
    parse_request,
    plan_round,
)
from slime.utils.errors import ConfigError, DataError, DeadlineExceeded, ProcessDied, SlimeError
from slime.utils.net import free_port

VOCAB = 50


# ------------------------------------------------------------------------------------------------ requests and rounds


def parsed(body: Any, **settings: Any) -> ScoreRequest:
    return parse_request(body, **({"vocab_size": VOCAB, "temperature": 0.7} | settings))


def test_a_request_in_sglangs_format_is_understood() -> None:
    sampling = {"temperature": 0.7, "max_new_tokens": 0, "skip_special_tokens": False}
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    assert parsed(body) == ScoreRequest([1, 2, 3])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([1, 2], "must be a JSON object"),
        ({"input_ids": "12"}, "input_ids must be a list of at least 2 token ids from 0 to 49"),
        ({"input_ids": [1]}, "at least 2"),
        ({"input_ids": [1, 50]}, "from 0 to 49"),
        ({"input_ids": [1, True]}, "from 0 to 49"),
        ({"input_ids": [1, 2], "sample_n": -1}, "sample_n -1"),
        ({"input_ids": [1, 2], "sample_n": 51}, "sample_n 51"),
        ({"input_ids": [1, 2], "label_token_ids": [[1], [2]]}, "a row for each of the 1 tokens"),
        ({"input_ids": [1, 2, 3], "label_token_ids": [[1], [2, 3]]}, "the same number of ids"),
        ({"input_ids": [1, 2], "label_token_ids": [[50]]}, "ids from 0 to 49"),
        ({"input_ids": [1, 2], "sampling_params": {"temperature": 1.0}}, "started with --rollout-temperature 0.7"),
    ],
)
def test_a_bad_request_is_refused_with_field_and_rule(body: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parsed(body)


def test_draws_are_bounded_for_a_position_and_for_a_request() -> None:
    large = {"vocab_size": 200_000}
    assert parsed({"input_ids": [1, 2], "sample_n": 1024}, **large).sample_n == 1024
    with pytest.raises(DataError, match="sample_n 1025 must be an integer from 0 to 1024: at most 1024 for each"):
        parsed({"input_ids": [1, 2], "sample_n": 1025}, **large)
    long = [1] * (2**14 + 1)
    assert parsed({"input_ids": long, "sample_n": 256}, **large).sample_n == 256
    with pytest.raises(DataError, match="sample_n 257 must be an integer from 0 to 256"):
        parsed({"input_ids": long, "sample_n": 257}, **large)


def test_a_round_takes_from_the_head_what_fits_and_gives_every_rank_as_many_micro_batches() -> None:
    two = RoundSettings(max_tokens=10, data_parallel_size=2, num_micro_batches=2)
    plan = plan_round([6, 4, 5, 5, 9, 8, 7, 1], two)
    assert plan.num_taken == 6, "the 7 fits nowhere, and nobody overtakes it"
    assert plan.ranks == [[[0, 1], [4]], [[2, 3], [5]]]
    assert [len(rank) for rank in plan_round([9, 9, 9], two).ranks] == [2, 2]
    assert plan_round([30], two).ranks == [[[0]], [[]]], "one that is too long for any has one of its own"
    single = RoundSettings(max_tokens=0, num_micro_batches=3)
    assert plan_round([5, 5, 5, 5], single).ranks == [[[0], [1], [2]]], "no limit given: one request each"
    assert plan_round([5], replace(single, multiple=2)).ranks == [[[0], []]]


# ------------------------------------------------------------------------------------------------ queue


class Model:
    """Scores token t with -t / 100. Waits if asked, fails for token 13."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.loaded: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.busy = threading.Event()
        self.death: ProcessDied | None = None
        self.load_error: Exception | None = None

    def score(self, ranks: list[list[list[ScoreRequest]]]) -> list[list[list[Score]]]:
        requests = [request for rank in ranks for part in rank for request in part]
        self.rounds.append(len(requests))
        self.busy.set()
        assert self.go_on.wait(120)
        if self.death is not None:
            raise self.death
        if any(13 in request.input_ids for request in requests):
            raise RuntimeError("thirteen")
        return [[[self._one(request) for request in part] for part in rank] for rank in ranks]

    @staticmethod
    def _one(request: ScoreRequest) -> Score:
        drawn = [[7] * request.sample_n for _ in range(request.num_scored)] if request.sample_n else None
        return Score([-token / 100 for token in request.input_ids[1:]], sampled_token_ids=drawn)

    def load(self, path: str, timeout_s: float) -> None:
        self.busy.set()
        assert self.go_on.wait(120)
        if self.load_error is not None:
            raise self.load_error
        self.loaded.append(path)


def with_queue(model: Model, story: Callable[[ScoreQueue], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def run() -> None:
        queue = ScoreQueue(model.score, model.load, RoundSettings(**({"max_tokens": 100} | settings)), "/start")
        worker = asyncio.create_task(queue.work())
        try:
            await asyncio.wait_for(story(queue), 30)
        finally:
            model.go_on.set()
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)

    asyncio.run(run())


def test_requests_that_come_while_the_model_works_share_the_next_round() -> None:
    model = Model()
    model.go_on.clear()

    async def story(queue: ScoreQueue) -> None:
        first = asyncio.create_task(queue.ask(ScoreRequest([1, 2])))
        await asyncio.to_thread(model.busy.wait, 20)
        others = [asyncio.create_task(queue.ask(ScoreRequest([1, n]))) for n in range(20, 25)]
        given_up = asyncio.create_task(queue.ask(ScoreRequest([1, 13])))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        loads = queue.loads()
        assert (loads["queue_size"], loads["inflight_size"], loads["running_tokens"]) == (5, 6, 2)
        assert (loads["pending_tokens"], loads["pending_response_tokens"]) == (10, 5)
        model.go_on.set()
        assert (await first).log_probs == [-0.02]
        assert [(await other).log_probs for other in others] == [[-n / 100] for n in range(20, 25)]
        assert queue.loads()["total_finished_reqs"] == 6

    with_queue(model, story)
    assert model.rounds == [1, 5], "who gave up is not scored"


def test_a_round_that_fails_is_an_error_of_its_requests_only() -> None:
    async def story(queue: ScoreQueue) -> None:
        with pytest.raises(RuntimeError, match="thirteen"):
            await queue.ask(ScoreRequest([1, 13]))
        assert (await queue.ask(ScoreRequest([1, 4]))).log_probs == [-0.04]

    with_queue(Model(), story)


def test_when_a_rank_dies_everybody_who_waits_learns_it_and_the_work_ends() -> None:
    model = Model()
    model.death = ProcessDied("rank 1 died")

    async def run() -> None:
        queue = ScoreQueue(model.score, model.load, RoundSettings(max_tokens=0), "/start")
        asked = [asyncio.create_task(queue.ask(ScoreRequest([1, n]))) for n in (2, 3, 4, 5)]
        await asyncio.sleep(0)
        with pytest.raises(ProcessDied):
            await asyncio.wait_for(queue.work(), 20)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(answer, ProcessDied) for answer in answers)

    asyncio.run(run())


def test_a_rank_that_dies_while_weights_are_loaded_ends_the_work_too() -> None:
    model = Model()
    model.load_error = ProcessDied("rank 1 died")

    async def run() -> None:
        queue = ScoreQueue(model.score, model.load, RoundSettings(max_tokens=0), "/start")
        work = asyncio.create_task(queue.work())
        with pytest.raises(ProcessDied):
            await asyncio.wait_for(queue.update("/new", 20.0), 20)
        with pytest.raises(ProcessDied, match="rank 1"):
            await asyncio.wait_for(work, 20)

    asyncio.run(run())


def test_an_update_waits_for_those_under_way_and_lets_nobody_in_meanwhile() -> None:
    model = Model()
    model.go_on.clear()

    async def story(queue: ScoreQueue) -> None:
        asked = asyncio.create_task(queue.ask(ScoreRequest([1, 2])))
        await asyncio.to_thread(model.busy.wait, 20)
        update = asyncio.create_task(queue.update("/new", 20.0))
        await asyncio.sleep(0)
        same = asyncio.create_task(queue.update("/new", 20.0))
        with pytest.raises(Updating):
            await queue.ask(ScoreRequest([1, 3]))
        with pytest.raises(SlimeError, match="those of /other must wait"):
            await queue.update("/other", 20.0)
        assert model.loaded == []
        model.go_on.set()
        assert (await asked).log_probs == [-0.02]
        done = await update
        assert (done["ok"], done["model_path"], done["before_loads"]["inflight_size"]) == (True, "/new", 1)
        assert done["after_loads"]["total_finished_reqs"] == 1
        assert (await same)["coalesced"]
        assert (await queue.update("/new", 20.0))["skipped"]
        assert (await queue.ask(ScoreRequest([1, 5]))).log_probs == [-0.05]

    with_queue(model, story)
    assert model.loaded == ["/new"]


def test_an_update_that_is_not_let_in_leaves_the_old_weights_serving() -> None:
    model = Model()
    model.go_on.clear()

    async def story(queue: ScoreQueue) -> None:
        asked = asyncio.create_task(queue.ask(ScoreRequest([1, 2])))
        await asyncio.to_thread(model.busy.wait, 20)
        with pytest.raises(DeadlineExceeded, match="1 requests to be answered"):
            await queue.update("/new", 0.05)
        model.go_on.set()
        await asked
        model.load_error = ConfigError("model_path /new holds no checkpoint")
        with pytest.raises(ConfigError):
            await queue.update("/new", 20.0)
        assert (await queue.ask(ScoreRequest([1, 6]))).log_probs == [-0.06]
        assert queue.path == "/start"

    with_queue(model, story)


def test_after_an_update_that_failed_half_way_nothing_is_scored_until_another_one_succeeds() -> None:
    model = Model()
    model.load_error = RuntimeError("the disk broke")

    async def story(queue: ScoreQueue) -> None:
        with pytest.raises(RuntimeError):
            await queue.update("/new", 20.0)
        with pytest.raises(SlimeError, match="the disk broke"):
            await queue.ask(ScoreRequest([1, 6]))
        model.load_error = None
        assert "skipped" not in await queue.update("/start", 20.0), "the weights are not those any more"
        assert (await queue.ask(ScoreRequest([1, 6]))).log_probs == [-0.06]

    with_queue(model, story)


# ------------------------------------------------------------------------------------------------ HTTP

SERVED = ServedModel(VOCAB, 1.0, {"hf_checkpoint": "m"})


def test_every_route_answers_with_its_statuses() -> None:
    model, port = Model(), free_port()
    settings = TeacherServerArgs(megatron_server_max_length=5)

    async def story(queue: ScoreQueue) -> None:
        async with serving(make_app(queue, SERVED, settings), "127.0.0.1", port), aiohttp.ClientSession() as session:

            async def call(path: str, body: Any = None, data: bytes | None = None) -> tuple[int, dict[str, Any]]:
                method = "GET" if body is None and data is None else "POST"
                url = f"http://127.0.0.1:{port}{path}"
                async with session.request(method, url, json=body, data=data) as response:
                    return response.status, await response.json()

            assert await call("/detect") == (200, {"server_type": "megatron_server"})
            assert await call("/healthz") == (200, {"ok": True})
            assert await call("/info") == (200, {"args": {"hf_checkpoint": "m"}})
            status, reply = await call("/generate", {"input_ids": [1, 2, 3], "sample_n": 2})
            assert (status, reply["log_probs"], reply["sampled_token_ids"]) == (200, [-0.02, -0.03], [[7, 7]] * 2)
            assert reply["request_id"]
            assert "label_token_log_probs" not in reply
            assert (await call("/get_loads"))[1]["total_finished_tokens"] == 3
            status, reply = await call("/generate", {"input_ids": [1] * 6})
            assert (status, reply["input_length"], reply["max_length"]) == (413, 6, 5)
            assert (await call("/generate", {"input_ids": []}))[0] == 400
            assert (await call("/generate", data=b"{"))[0] == 400
            assert (await call("/generate", data=b'{"a": "\xff"}'))[0] == 400
            assert (await call("/generate", {"input_ids": [1, 13]}))[0] == 500
            assert (await call("/nothing"))[0] == 404
            assert (await call("/update_weights_from_disk", {}))[0] == 400
            assert (await call("/update_weights_from_disk", {"path": "/new", "timeout_s": "soon"}))[0] == 400
            assert (await call("/update_weights_from_disk", {"load": "/new"}))[1]["ok"]
            model.load_error = ConfigError("no checkpoint there")
            assert await call("/update_weights_from_disk", {"model_path": "/x"}) == (
                400,
                {"error": "no checkpoint there"},
            )
            model.load_error = OSError("half way")
            assert (await call("/update_weights_from_disk", {"model_path": "/x"}))[0] == 500
            assert (await call("/healthz"))[0] == 500

    with_queue(model, story)


def test_a_client_that_leaves_takes_its_request_out_of_the_queue() -> None:
    model, port = Model(), free_port()
    model.go_on.clear()
    url = f"http://127.0.0.1:{port}/generate"

    async def story(queue: ScoreQueue) -> None:
        app = make_app(queue, SERVED, TeacherServerArgs())
        async with serving(app, "127.0.0.1", port), aiohttp.ClientSession() as session:
            first = asyncio.create_task(session.post(url, json={"input_ids": [1, 2]}))
            await asyncio.to_thread(model.busy.wait, 20)
            leaves = asyncio.create_task(session.post(url, json={"input_ids": [1, 3]}))
            while not queue.loads()["queue_size"]:
                await asyncio.sleep(0.01)
            leaves.cancel()
            while queue.loads()["queue_size"]:
                await asyncio.sleep(0.01)
            model.go_on.set()
            assert (await first).status == 200

    with_queue(model, story)
    assert model.rounds == [1]


def test_the_warm_up_scores_four_tokens_on_its_own_port_and_says_what_failed() -> None:
    model = Model()
    settings = TeacherServerArgs(teacher_warmup_port=free_port())

    async def story(queue: ScoreQueue) -> None:
        await warm_up(make_app(queue, SERVED, settings), VOCAB, settings)
        assert queue.loads()["total_finished_tokens"] == 4
        model.go_on.clear()
        quick = replace(settings, teacher_warmup_timeout_s=0.05)  # type: ignore[arg-type]
        with pytest.raises(DeadlineExceeded, match="--teacher-warmup-timeout-s"):
            await warm_up(make_app(queue, SERVED, quick), VOCAB, quick)
        model.go_on.set()
        queue.damage = "no weights"
        with pytest.raises(SlimeError, match="no weights"):
            await warm_up(make_app(queue, SERVED, settings), VOCAB, settings)
        async with serving(make_app(queue, SERVED, settings), "127.0.0.1", settings.teacher_warmup_port):
            with pytest.raises(ConfigError, match="cannot listen on"):
                await warm_up(make_app(queue, SERVED, settings), VOCAB, settings)

    with_queue(model, story)


# ------------------------------------------------------------------------------------------------ flags


def server_args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    return configure_megatron_server_args(add_megatron_server_arguments(parser).parse_args(words))


def test_flags_are_added_to_a_parser_of_users_and_force_what_a_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    args = server_args("--teacher-port", "81", "--no-megatron-server-warmup")
    assert (args.teacher_port, args.megatron_server_warmup, args.debug_train_only, args.use_opd) == (
        81,
        False,
        True,
        False,
    )
    validate_megatron_server_args(args)
    args.use_opd, args.teacher_sample_reduction_chunk_size = True, 0
    with pytest.raises(ValueError, match="teacher_sample_reduction_chunk_size") as caught:
        validate_megatron_server_args(args)
    assert "use_opd is True; in the log-prob server it must stay False" in str(caught.value)


def test_a_plain_namespace_without_the_servers_flags_is_valid() -> None:
    validate_megatron_server_args(argparse.Namespace(teacher_port=8000))
    with pytest.raises(ValueError, match="--teacher-port 0 must be above 0"):
        validate_megatron_server_args(argparse.Namespace(teacher_port=0))


def test_the_environment_gives_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_PORT", "82")
    monkeypatch.setenv("MEGATRON_SERVER_WARMUP", "false")
    args = server_args()
    assert (args.teacher_port, args.megatron_server_warmup) == (82, False)
    monkeypatch.setenv("MEGATRON_SERVER_MAX_LENGTH", "long")
    with pytest.raises(
        ConfigError, match="MEGATRON_SERVER_MAX_LENGTH=long in the environment is not a value of --megatron"
    ):
        server_args()
