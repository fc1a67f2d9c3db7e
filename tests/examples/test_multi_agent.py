"""The team of agents: who sees what, how the rewards are shared, and that a team counts as one execution."""

from __future__ import annotations

import asyncio

import pytest

from examples.multi_agent.rollout_with_multi_agents import choice, team_rewards
from examples.multi_agent.run_tiny import SETTINGS, WORDS
from slime.data.sample import Sample, iter_samples
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.errors import DataError
from slime.utils.http_utils import close_http_client
from tests.unit.rollout.fake_engine import FakeEngine, completion, make_args
from tools.make_tiny_task import make_tiny_task

TEAM = "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_task(tmp_path_factory.mktemp("words"), words=WORDS, num_sft=1, num_eval=1).model


def play(model, answer, prompt=None, evaluation=False):
    """Use ``answer(role) -> (text, finish reason)``. Returns the group's samples and the prompts of all requests."""
    prompts: list[str] = []

    def reply(payload, number):
        tokenizer = GenerateState(args).tokenizer
        with engine.lock:
            prompts.append(tokenizer.decode(payload["input_ids"]))
        role = next(role for role in ("solve", "improve", "select") if role in prompts[-1])
        text, reason = answer(role)
        return 200, completion(payload, tokenizer.encode(text, add_special_tokens=False), reason=reason, text=text)

    engine = FakeEngine(reply)
    args = make_args(model, engine.port, custom_generate_function_path=TEAM, rm_type="f1", **SETTINGS)
    message = [{"role": "user", "content": "repeat mint"}]
    sample = Sample(index=7, group_index=3, prompt=prompt or message, label="mint")

    async def once():
        try:
            params = GenerateState(args).sampling_params.copy()
            return await generate_and_rm_group(args, [sample], params, evaluation=evaluation)
        finally:
            await close_http_client()

    try:
        return list(iter_samples(asyncio.run(once()))), prompts
    finally:
        engine.close()


ANSWERS = {"solve": ("pass<|im_end|>", "stop"), "improve": ("mint", "stop"), "select": ("2<|im_end|>", "stop")}


def test_a_prompt_becomes_the_samples_of_the_whole_team(model):
    team, prompts = play(model, ANSWERS.__getitem__)
    assert [agent.metadata["role"] for agent in team] == ["solver"] * 2 + ["rewriter"] * 2 + ["selector"]
    assert {(agent.index, agent.group_index, agent.rollout_id) for agent in team} == {(7, 3, 7)}
    assert [agent.reward for agent in team] == pytest.approx([0, 0, 1.2, 1.2, 1.2])
    assert all(len(agent.rollout_log_probs) == agent.response_length for agent in team)
    assert "1: pass\n2: pass" in prompts[2], "the rewriters read all solutions, without end tokens"
    assert "1: mint\n2: mint" in prompts[4], "the selector reads what was rewritten"


def test_an_evaluation_has_the_teams_answer_only(model):
    (answer,), _ = play(model, ANSWERS.__getitem__, evaluation=True)
    assert (answer.metadata["role"], answer.reward) == ("rewriter", 1.0)


def test_a_prompt_that_is_text_already_is_an_error_with_the_flag(model):
    with pytest.raises(DataError, match="--apply-chat-template"):
        play(model, ANSWERS.__getitem__, prompt="repeat mint")


@pytest.mark.parametrize(
    ("rewards", "picked", "expected"),
    [
        ([0, 1, 1, 0], 0, [0, 1.2, 1.2, 0, 1.2]),
        ([0, 1, 1, 0], 1, [0, 0.8, 0.8, 0, 0]),
        ([0, 1, 1, 0], None, [0, 0.8, 0.8, 0, 0]),
    ],
)
def test_all_agents_earn_more_where_the_team_is_right(rewards, picked, expected):
    assert team_rewards(rewards, 2, picked, (0.8, 1.2)) == pytest.approx(expected)


@pytest.mark.parametrize(("text", "picked"), [("2", 1), ("not 1 but 2.", 1), ("3", None), ("0", None), ("none", None)])
def test_a_choice_is_the_last_number_if_there_is_such_a_candidate(text, picked):
    assert choice(text, 2) == picked
