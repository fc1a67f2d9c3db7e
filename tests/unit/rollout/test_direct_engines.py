"""Requests for the engine's choices of experts go past the router, which would drop the question."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from slime.data.sample import Sample
from slime.rollout import direct_engines
from slime.rollout.direct_engines import DirectEngines
from slime.rollout.sglang_rollout import generate
from slime.rollout.sglang_streaming_rollout import generate_streaming
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.errors import EngineError
from slime.utils.http_utils import post
from tests.limits import unloaded_time
from tests.unit.rollout.fake_engine import FakeEngine, Reply, completion, make_args

_LAYERS, _TOPK = 3, 2
Respond = Callable[[dict[str, Any], int], Reply]


@pytest.fixture
def cluster(engine: Callable[..., FakeEngine]) -> Callable[..., tuple[FakeEngine, list[FakeEngine]]]:
    """``cluster(number of engines, on_generate) -> router, engines``"""

    def start(number: int, on_generate: Respond | None = None) -> tuple[FakeEngine, list[FakeEngine]]:
        router, *engines = [engine(on_generate or _with_experts) for _ in range(number + 1)]
        router.workers = [{"url": one.url, "is_healthy": True, "worker_type": "regular"} for one in engines]
        return router, engines

    return start


def _with_experts(
    payload: dict[str, Any], number: int, *, ids: tuple[int, ...] = (5, 6), reason: str = "stop"
) -> Reply:
    """Entry [row, layer, k] is 10 * row + 2 * layer + k."""
    reply = completion(payload, list(ids), reason)
    rows = len(payload["input_ids"]) + len(ids) - 1
    flat = [10 * row + entry for row in range(rows) for entry in range(_LAYERS * _TOPK)]
    encoded = base64.b64encode(torch.tensor(flat, dtype=torch.int32).numpy().tobytes()).decode()
    reply["meta_info"]["routed_experts"] = encoded
    return 200, reply


def _args(task: Any, router: FakeEngine, **values: Any) -> SimpleNamespace:
    model = {"num_layers": _LAYERS, "moe_router_topk": _TOPK, "use_rollout_routing_replay": True}
    return make_args(task.model, router.port, **(model | values))


def _generate(args: SimpleNamespace, sample: Sample, function: Any = generate) -> Sample:
    return run(function(args, sample, {"max_new_tokens": 8}))


def test_engines_are_asked_for_their_experts_in_turn_and_keep_their_sessions(cluster: Any, tiny_task: Any) -> None:
    router, engines = cluster(2)
    args = _args(tiny_task, router)
    samples = [Sample(index=i, prompt="1+1=", session_id=f"session {i}") for i in range(4)]
    for sample in samples:
        _generate(args, sample)
        assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, _LAYERS, _TOPK)
        assert sample.rollout_routed_experts[2, 1].tolist() == [22, 23]
    assert [len(engine.requests) for engine in engines] == [2, 2]
    assert router.requests == []
    for sample in samples:  # a second turn
        sample.append_response_tokens(args, tokens=[9], trainable=False)
        sample.status = Sample.Status.PENDING
        _generate(args, sample)
        assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1
    for engine in engines:
        first, second, *again = [request["input_ids"] for request in engine.requests]
        assert [ids[: len(first)] for ids in again] == [first, second]
        assert all(request["return_routed_experts"] for request in engine.requests)


def test_without_the_flag_requests_go_through_the_router_and_do_not_ask(cluster: Any, tiny_task: Any) -> None:
    router, engines = cluster(1)
    sample = _generate(_args(tiny_task, router, use_rollout_routing_replay=False), Sample(prompt="1+1="))
    assert len(router.requests) == 1
    assert "return_routed_experts" not in router.requests[0]
    assert engines[0].requests == []
    assert sample.status is Sample.Status.COMPLETED


def test_a_dead_engine_is_left_after_one_attempt_and_avoided_by_others(cluster: Any, tiny_task: Any) -> None:
    router, (dead, living) = cluster(2)
    dead.close()
    args = _args(tiny_task, router)
    began = unloaded_time()
    for index in range(8):
        sample = _generate(args, Sample(index=index, prompt="1+1=", session_id=f"session {index}"))
        assert sample.status is Sample.Status.COMPLETED
    assert len(living.requests) == 8
    assert unloaded_time() - began < 2.0, "a pause for the first that met it, none for the others"


def test_a_session_moves_when_its_engine_fails(cluster: Any, tiny_task: Any) -> None:
    def fails_on_the_second(payload: dict[str, Any], number: int) -> Reply:
        return _with_experts(payload, number) if number != 1 else (500, "out of memory")

    router, engines = cluster(2, fails_on_the_second)
    args = _args(tiny_task, router)
    for _ in range(3):
        _generate(args, Sample(prompt="1+1=", session_id="one"))
    assert [len(engine.requests) for engine in engines] == [3, 2], "ok, 500 | ok | 500 | ok: always to the other"


def test_a_response_that_was_cut_off_gets_the_experts_of_all_its_tokens(cluster: Any, tiny_task: Any) -> None:
    def cut_off(payload: dict[str, Any], number: int) -> Reply:
        if number:
            return _with_experts(payload, number, ids=(7, 8, 9))
        reply = completion(payload, [5, 6], "abort")  # without experts
        return 200, reply

    router, (engine,) = cluster(1, cut_off)
    args = _args(tiny_task, router)
    sample = _generate(args, Sample(prompt="1+1=", session_id="one"))
    assert sample.status is Sample.Status.ABORTED
    assert sample.rollout_routed_experts is None
    _generate(args, sample)
    assert sample.status is Sample.Status.COMPLETED
    assert engine.requests[1]["input_ids"][-2:] == [5, 6]
    assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1


def test_streams_go_to_engines_too(cluster: Any, tiny_task: Any) -> None:
    def stream(payload: dict[str, Any], number: int) -> Reply:
        return 200, iter([_with_experts(payload, number)[1]])

    router, (engine,) = cluster(1, stream)
    sample = _generate(_args(tiny_task, router), Sample(prompt="1+1="), generate_streaming)
    assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1
    assert engine.requests[0]["stream"]
    assert router.requests == []


def test_a_request_waits_for_an_engine_to_come_up(cluster: Any) -> None:
    router, (engine,) = cluster(1)
    workers, router.workers = router.workers, []
    engines = DirectEngines(router.url)
    choice = engines.choose()

    def payload() -> dict[str, Any]:
        return {"input_ids": [1], "rid": "1"}

    with pytest.raises(EngineError, match=r"failed 2 times .*has no healthy engine \(0 in all\)"):
        run(post(choice, payload, max_retries=1))
    router.workers = workers
    assert run(post(choice, payload, max_retries=1))["text"] == "7"
    assert len(engine.requests) == 1


def test_engines_that_only_prefill_or_decode_are_refused(cluster: Any) -> None:
    router, _ = cluster(2)
    for worker, kind in zip(router.workers, ("prefill", "decode"), strict=True):
        worker["worker_type"] = kind
    with pytest.raises(EngineError, match="has prefill and decode engines, which only work together"):
        run(DirectEngines(router.url).next_url(None))


@pytest.mark.parametrize("function", [generate, generate_streaming])
def test_tokens_of_a_request_aborted_in_the_queue_are_dropped_as_they_come_without_their_sets(
    cluster: Any, tiny_task: Any, function: Any
) -> None:
    """The fake answers like SGLang 0.5.23 for a request that it had put back into its queue."""

    def aborted(request: dict[str, Any], count: int) -> Reply:
        assert request["return_sampling_mask"]
        meta = {
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "output_token_logprobs": [[-0.5, 5, None], [-0.5, 6, None]],
            "completion_tokens": 2,
        }
        reply = {"text": "56", "output_ids": [5, 6], "meta_info": meta}
        return 200, iter([reply]) if request.get("stream") else reply

    router, _ = cluster(1, aborted)
    args = _args(tiny_task, router, use_rollout_routing_replay=False, rollout_top_p=0.9)
    sample = _generate(args, Sample(prompt="1+1="), function)
    assert (sample.status, sample.response, sample.response_length) == (Sample.Status.ABORTED, "", 0)


def test_an_engine_in_the_place_of_a_router_is_the_only_choice_and_other_errors_stay_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = [404, 503]
    transport = httpx.MockTransport(lambda request: httpx.Response(status.pop(0), text="no such route"))
    monkeypatch.setattr(http_utils, "_http_client", httpx.AsyncClient(transport=transport))
    assert run(DirectEngines("http://engine:1").choose()()) == "http://engine:1/generate"
    with pytest.raises(EngineError, match="503"):
        run(DirectEngines("http://engine:1").choose()())


def test_requests_that_come_together_ask_the_router_once_and_share_its_answer_or_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Any] = [EngineError("no router"), {"workers": [{"url": "http://one"}, {"url": "http://two"}]}]

    async def ask(url: str, **_: Any) -> Any:
        await asyncio.sleep(0)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(direct_engines, "get", ask)

    async def choose() -> None:
        engines = DirectEngines("http://router")
        failed = await asyncio.gather(*(engines.next_url(None) for _ in range(50)), return_exceptions=True)
        assert {str(error) for error in failed} == {"no router"}
        first, *others = [asyncio.create_task(engines.next_url(None)) for _ in range(50)]
        await asyncio.sleep(0)
        first.cancel()
        urls = await asyncio.gather(*others)
        assert Counter(urls) == {"http://one": 25, "http://two": 24}

    asyncio.run(choose())
    assert answers == []
