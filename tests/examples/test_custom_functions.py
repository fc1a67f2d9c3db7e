"""Custom rewards and custom generate functions of the examples, called the way the rollout calls users' functions."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from examples.custom_generate.custom_generate import hint
from examples.custom_reward.custom_rm import closeness, keep_mixed_groups
from slime.data.sample import Sample
from slime.hooks import check_hooks, load_function
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.http_utils import close_http_client
from tests.unit.rollout.fake_engine import FakeEngine, completion, make_args

REWARD = "examples/custom_reward/custom_rm.py"
GENERATE = "examples/custom_generate/custom_generate.py"


def samples(*responses: str) -> list[Sample]:
    return [
        Sample(index=i, prompt="12+34=", label="46", response=text, response_length=len(text))
        for i, text in enumerate(responses)
    ]


@pytest.mark.parametrize(
    ("response", "reward"),
    [("46", 1.0), (" 46\n", 1.0), ("36", 0.25), ("4", 0.0), ("12+34", 0.0), ("", 0.0)],
)
def test_closeness_is_one_only_for_the_label(response, reward):
    assert closeness(response, "46") == reward


def test_a_row_without_a_label_is_a_failure_and_no_answer_equals_it():
    with pytest.raises(ValueError, match="the row has no label"):
        closeness("None", None)


def test_the_file_alone_names_the_function_for_one_sample_and_with_group_rm_the_one_for_groups(tiny_task):
    args = make_args(tiny_task.model, 1, custom_rm_path=REWARD)
    assert load_function(REWARD, "reward").__name__ == "reward_func"
    assert load_function(REWARD, "reward", group_rm=True).__name__ == "batched_custom_rm"
    assert asyncio.run(async_rm(args, samples("46")[0])) == 1.0
    args.group_rm = True
    group = samples("46", "00046", "46   ", "36")
    group[2].response_length = 2
    assert asyncio.run(batched_async_rm(args, group)) == pytest.approx([1.0, 0.0, 1.0, 0.25])
    group[2].response_length = 5
    assert asyncio.run(batched_async_rm(args, group)) == pytest.approx([1.0, 0.0, 0.94, 0.25])


def test_a_reward_model_class_scores_a_batch(tiny_task):
    args = make_args(tiny_task.model, 1, custom_rm_path=f"{REWARD}:CustomRewardModel", group_rm=True)
    assert asyncio.run(batched_async_rm(args, samples("46", "36"))) == [1.0, 0.25]


def test_every_form_passes_the_check_at_start_up():
    for path, group_rm in ((REWARD, False), (REWARD, True), (f"{REWARD}:CustomRewardModel", False)):
        args = SimpleNamespace(
            custom_rm_path=path,
            group_rm=group_rm,
            custom_generate_function_path=GENERATE,
            dynamic_sampling_filter_path=f"{REWARD}:keep_mixed_groups",
        )
        assert check_hooks(args) == []


def test_a_group_with_equal_rewards_is_dropped():
    args = SimpleNamespace(reward_key=None)
    group = [Sample(reward=1.0), Sample(reward=0.0)]
    for sample in group:
        sample.get_reward_value(args)
    assert keep_mixed_groups(args, group)
    assert not keep_mixed_groups(args, [Sample(reward=1.0), Sample(reward=1.0)])


def play(model: str, answers: list[tuple[str, str]], path: str = GENERATE, group: list[Sample] | None = None):
    """Generate with an engine that gives ``answers`` (text, reason) in order."""

    def reply(payload, number):
        text, reason = answers[number]
        ids = GenerateState(args).tokenizer.encode(text, add_special_tokens=False)
        return 200, completion(payload, ids, reason=reason, text=text)

    engine = FakeEngine(reply)
    args = make_args(model, engine.port, custom_generate_function_path=path, max_turns=2, rollout_max_response_len=60)
    group = group or samples("")

    async def once():
        try:
            return await generate_and_rm_group(args, group, GenerateState(args).sampling_params.copy())
        finally:
            await close_http_client()

    try:
        return asyncio.run(once()), engine.requests
    finally:
        engine.close()


def test_a_second_turn_continues_the_first_and_its_hint_is_not_trained(tiny_task):
    (sample,), requests = play(tiny_task.model, [("45<|im_end|>", "stop"), ("46<|im_end|>", "stop")])
    assert sample.response == "45<|im_end|>\n<|im_start|>user\nno.<|im_end|>\n<|im_start|>assistant\n46"
    hinted = sample.response_length - 6
    assert sample.loss_mask == [1] * 3 + [0] * hinted + [1] * 3
    assert requests[1]["input_ids"] == sample.tokens[:-3]
    assert (sample.reward, sample.metadata["turns"]) == (0.5, 2)
    assert sample.status is Sample.Status.COMPLETED


def test_the_first_right_answer_ends_the_game_and_is_worth_most(tiny_task):
    (sample,), requests = play(tiny_task.model, [("46<|im_end|>", "stop")])
    assert (sample.reward, len(requests)) == (1.0, 1)


def test_the_metadata_of_the_row_decides_what_the_hint_says():
    sample = Sample(label="46", metadata={"hints": "direction"}, status=Sample.Status.COMPLETED)
    assert "too low." in hint("45", sample)
    assert "too high." in hint("47", sample)
    assert "a number" in hint(None, sample)
    assert not hint("45", sample).startswith("<|im_end|>")
    sample.status = Sample.Status.TRUNCATED
    assert hint("45", sample).startswith("<|im_end|>")


def test_the_samples_of_a_prompt_are_rewarded_by_comparison(tiny_task):
    group = samples("", "", "")
    for sample in group:
        sample.response_length = 0
    found, requests = play(
        tiny_task.model, [("99", "stop"), ("49", "stop"), ("41", "stop")], f"{GENERATE}:best_of_group", group
    )
    assert len(requests) == 3
    assert sorted((sample.response, sample.reward) for sample in found) == [("41", 1.0), ("49", 1.0), ("99", 0.0)]
