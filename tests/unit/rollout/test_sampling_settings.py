"""Sampling settings of requests follow from the flags, of training and of evaluation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.rollout.base_types import complete_args
from slime.rollout.engine_request import build_request, eval_sampling_params, response_room, train_sampling_params
from slime.rollout.eval_config import EvalDatasetConfig
from slime.rollout.evaluate import evaluate
from slime.rollout.sft_rollout import _fill
from slime.rollout.sglang_rollout import seeded
from tests.unit.rollout.fake_engine import make_args


def test_training_requests_keep_the_text_of_their_stop_tokens() -> None:
    args = make_args("/model", 0, rollout_temperature=0.7, rollout_stop=["###"], rollout_stop_token_ids=[2])
    assert train_sampling_params(args) == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 8,
        "stop": ["###"],
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def test_an_evaluation_set_has_settings_of_its_own() -> None:
    config = EvalDatasetConfig("a", "x", temperature=0.0, top_p=0.9, top_k=5, max_response_len=3, min_new_tokens=2)
    args = make_args("/model", 0, rollout_stop=["###"], rollout_stop_token_ids=[2], rollout_skip_special_tokens=True)
    params = eval_sampling_params(config, train_sampling_params(args))
    assert (params["stop"], params["stop_token_ids"], params["skip_special_tokens"]) == (["###"], [2], True)
    own = EvalDatasetConfig("a", "x", stop=[], stop_token_ids=[3], skip_special_tokens=False)
    params_of_own = eval_sampling_params(own, train_sampling_params(args))
    assert [params_of_own[name] for name in ("stop", "stop_token_ids", "skip_special_tokens")] == [[], [3], False]
    assert [params[name] for name in ("temperature", "top_p", "top_k", "max_new_tokens")] == [0.0, 0.9, 5, 3]
    assert (params["min_new_tokens"], params["no_stop_trim"]) == (2, True)
    assert "repetition_penalty" not in params


def test_evaluation_has_its_own_context_length(tiny_task: Any) -> None:
    args = make_args(tiny_task.model, 0, rollout_max_context_len=16, eval_max_context_len=12)
    rooms = []

    async def generate(args: Any, group: list[Sample], *_: Any, **__: Any) -> list[Sample]:
        rooms.append(response_room(args.rollout_max_context_len, group[0], 10, 8))
        return [replace(group[0], reward=1.0, status=Sample.Status.COMPLETED)]

    asyncio.run(evaluate(args, [EvalDatasetConfig("a", f"{tiny_task.eval}@[:1]")], generate))
    assert rooms == [2]
    assert response_room(args.rollout_max_context_len, Sample(), 10, 8) == 6


def test_a_conversation_that_is_trained_from_its_first_token_keeps_it_as_the_prompt() -> None:
    generator = SimpleNamespace(get_loss_mask=lambda messages, tools: ([5, 6, 7], [1, 1, 1]))
    sample = Sample(prompt=[{"role": "assistant", "content": "hello"}])
    assert _fill(sample, generator)  # type: ignore[arg-type]
    assert (sample.tokens, sample.response_length, sample.loss_mask) == ([5, 6, 7], 2, [1, 1])


@pytest.mark.parametrize(("policy", "headers"), [("consistent_hashing", {"X-SMG-Routing-Key": "s1"}), (None, None)])
def test_the_requests_of_a_session_name_it_to_a_router_that_keeps_sessions_together(
    policy: str | None, headers: dict[str, str] | None
) -> None:
    args = complete_args(make_args("/model", 0, router_policy=policy))
    request = build_request(args, Sample(prompt="1+1=", session_id="s1"), {"max_new_tokens": 4}, [5, 6])
    assert request is not None
    assert request.headers == headers


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ({}, {}),
        ({"lora_rank": 8}, {"lora_path": "policy"}),
        ({"lora_rank": 8, "lora_merge": True}, {}),
        ({"lora_rank": 8, "debug_rollout_only": True}, {}),
    ],
)
@pytest.mark.parametrize("is_trained", [True, False])
def test_every_request_names_the_adapter_that_engines_serve(
    flags: dict[str, Any], fields: dict[str, str], is_trained: bool
) -> None:
    args = complete_args(make_args("/model", 0, **flags))
    request = build_request(args, Sample(prompt="1+1="), {"max_new_tokens": 4}, [5, 6], is_trained=is_trained)
    assert request is not None
    assert {name: value for name, value in request.new_attempt().items() if name == "lora_path"} == fields


def test_deterministic_engines_get_another_seed_for_every_member_of_a_group() -> None:
    state = SimpleNamespace(group_sampling_seeds=[7, 8], args=SimpleNamespace(rollout_seed=7))
    params = {"temperature": 1.0}
    assert [seeded(state, params, position)["sampling_seed"] for position in (0, 1)] == [7, 8]  # type: ignore[arg-type]
    assert params == {"temperature": 1.0}
    state.group_sampling_seeds = None
    assert seeded(state, params, 1) == params  # type: ignore[arg-type]
