from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from types import SimpleNamespace

import pytest

from slime.batch.compile import compile_train_data
from slime.batch.rewards import RewardArgs
from slime.data.sample import Sample, iter_samples
from slime.rollout import collect, custom_generate, evaluate, sglang_rollout
from slime.rollout.arguments import GenerationArgs
from slime.rollout.custom_generate import on_begin
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.eval_config import EvalDatasetConfig, build_eval_dataset_configs, build_eval_datasets
from slime.rollout.sglang_rollout import (
    GenerateState,
    generate,
    generate_and_rm_group,
    generate_rollout,
    get_model_url,
)
from slime.utils import async_utils, http_utils
from slime.utils.async_utils import run
from slime.utils.errors import DataError, DeadlineExceeded, EngineError
from tests.limits import unloaded_time
from tests.unit.rollout.fake_engine import completion, make_args

# --- users' functions, loaded by path


async def reward_is_length(args, sample, **kwargs):
    return float(sample.response_length)


def sync_reward(args, sample):
    return {"score": 0.5, "acc": 1}


def broken_reward(args, sample):
    raise KeyError("no such grader")


def hanging_reward(args, sample):
    time.sleep(60)


async def group_reward(args, samples, **kwargs):
    return [float(i) for i in range(len(samples))]


async def two_rows(args, sample, sampling_params):
    rows = [Sample(prompt=sample.prompt, label=sample.label) for _ in range(2)]
    for number, row in enumerate(rows):
        row.tokens = [1]
        row.append_response_tokens(tokens=[number], log_probs=[-1.0])
    return rows


async def generate_fails_for_one(args, sample, sampling_params):
    sample.append_response_tokens(tokens=[9, 9], log_probs=[-1.0, -1.0])
    sample.tokens = [1, *sample.tokens]
    if sample.index == 1:
        1 / 0  # noqa: B018
    return sample


def reward_fails_for_one(args, sample):
    return float("nan") if sample.index == 2 else float(int(sample.index))


async def group_fails(args, samples):
    raise OSError("no sandbox")


async def text_only(args, sample, sampling_params, evaluation=False):
    sample.response = "12"
    sample.reward = 1.0
    sample.metadata["evaluation"] = evaluation
    return sample


async def whole_group(args, samples, evaluation=False):
    for number, sample in enumerate(samples):
        sample.tokens = [1, 2]
        sample.response_length = 1
        sample.loss_mask += [1]
        sample.metadata["position"] = number
    return samples


def fails_on_the_first_try(args, sample, sampling_params):
    if "failed_attempts" not in sample.metadata:
        sample.tokens = [9, 9, 9]
        raise ConnectionError("tool server is gone")
    sample.tokens = [1, 2]
    sample.response_length = 1
    return sample


def always_fails(args, sample, sampling_params):
    raise ZeroDivisionError("users' bug")


def keep_odd_groups(args, samples, **kwargs):
    return samples[0].group_index % 2 == 1


def keep_nothing(args, samples, **kwargs):
    return False


def mark_first(args, sample, *, rollout_id=None, evaluation=False):
    sample.metadata["hooked"] = (rollout_id, evaluation, sample.reward)


def remove_all(args, groups):
    for sample in iter_samples(groups):
        sample.remove_sample = True


def see_all(args, groups, data_source):
    data_source.update_metadata({"seen": len(groups)})


@pytest.fixture
def setup(engine, tiny_task):
    """``setup(on_generate, **flags) -> (engine, args)``"""

    def make(on_generate=None, **values):
        server = engine(on_generate)
        defaults = {"prompt_data": tiny_task.train, "apply_chat_template": True}
        return server, make_args(tiny_task.model, server.port, **(defaults | values))

    return make


def here(name):
    return f"{__file__}:{name}"


def generate_one(args, sample, **params):
    return run(generate(args, sample, {"max_new_tokens": 8} | params))


# --- one request


def test_tokens_and_log_probs_are_those_the_engine_sampled(setup):
    server, args = setup()
    sample = Sample(index=4, prompt="12+34=")
    params = {"max_new_tokens": 8, "temperature": 0.5}
    run(generate(args, sample, params))
    request = server.requests[0]
    assert sample.tokens == [*request["input_ids"], 5, 6]
    assert sample.rollout_log_probs == [-0.1, -0.2]
    assert sample.response == "7"
    assert sample.status is Sample.Status.COMPLETED
    assert sample.weight_versions == ["3"]
    assert request["return_logprob"] is True
    assert request["sampling_params"] == params == {"max_new_tokens": 8, "temperature": 0.5}


def test_an_aborted_sample_continues_from_its_tokens_with_what_is_left(setup):
    server, args = setup(lambda p, n: (200, completion(p, [5, 6], "abort" if n == 0 else "stop")))
    sample = generate_one(args, Sample(prompt="1+1="))
    assert sample.status is Sample.Status.ABORTED
    prompt_and_part = list(sample.tokens)
    generate_one(args, sample)
    assert server.requests[1]["input_ids"] == prompt_and_part
    assert server.requests[1]["sampling_params"]["max_new_tokens"] == 6
    assert sample.response_length == 4
    assert len(sample.rollout_log_probs) == 4


@pytest.mark.parametrize(
    ("tokens", "text", "params", "expected"),
    [
        ([5, "end"], "7<|im_end|>", {}, ("completed", "7", 2)),
        ([5, "end"], "7<|im_end|>", {"ignore_eos": True}, ("aborted", "7<|im_end|>", 2)),
        ([5, 6], "7", {"stop_token_ids": [6]}, ("completed", "7", 2)),
        ([5, 6], "7\n\n", {"stop": ["\n\n"]}, ("completed", "7\n\n", 2)),
        ([5, 6], "7", {"stop": "\n\n"}, ("aborted", "7", 2)),
        ([5, "end", 6], "7<|im_end|>8", {}, ("aborted", "", 0)),  # a step of speculative decoding
    ],
)
def test_a_response_that_is_complete_when_it_is_aborted_is_not_continued(setup, tokens, text, params, expected):
    server, args = setup()
    end = GenerateState(args).tokenizer.eos_token_id
    ids = [end if token == "end" else token for token in tokens]
    server.on_generate = lambda p, n: (200, completion(p, ids, "abort", text=text))
    sample = Sample(prompt="1+1=")
    run(generate(args, sample, {"max_new_tokens": 8} | params))
    assert (sample.status.value, sample.response, sample.response_length) == expected


def test_the_context_length_caps_the_response_and_no_room_means_truncated(setup):
    server, args = setup(rollout_max_context_len=7)
    generate_one(args, Sample(prompt="1+1="))
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 3
    full = generate_one(args, Sample(prompt="111+111="))
    assert full.status is Sample.Status.TRUNCATED
    assert len(server.requests) == 1


def test_ids_beyond_the_vocabulary_are_never_sent(setup):
    server, args = setup()
    with pytest.raises(DataError, match="sample 3 holds token id 100000"):
        generate_one(args, Sample(index=3, tokens=[1, 100000]))
    assert server.requests == []


def test_message_lists_need_a_template_and_finished_samples_nothing(setup):
    _, args = setup()
    with pytest.raises(DataError, match="--apply-chat-template"):
        generate_one(args, Sample(prompt=[{"role": "user", "content": "1"}]))
    with pytest.raises(ValueError, match="completed"):
        generate_one(args, Sample(prompt="1", status=Sample.Status.COMPLETED))


def test_a_refused_request_is_not_repeated_and_its_text_is_shown(setup):
    server, args = setup(lambda p, n: (400, {"error": "prompt is too long"}))
    with pytest.raises(EngineError, match=r"status 400.*prompt is too long"):
        generate_one(args, Sample(prompt="1"))
    assert len(server.requests) == 1


def test_server_errors_are_repeated_under_a_new_request_id(setup):
    server, args = setup(lambda p, n: (503, "busy") if n < 2 else (200, completion(p, [5])))
    assert generate_one(args, Sample(prompt="1")).response_length == 1
    assert len({request["rid"] for request in server.requests}) == 3


def test_the_copy_that_runs_is_aborted_and_the_request_repeated_under_a_new_id(setup):
    def refuse_once(payload, number):
        if number == 0:
            return 400, {"error": {"message": f"Duplicate request ID detected: {payload['rid']}"}}
        return 200, completion(payload, [5])

    server, args = setup(refuse_once)
    assert generate_one(args, Sample(prompt="1")).tokens[-1] == 5
    first, second = (request["rid"] for request in server.requests)
    assert server.aborts == [{"rid": first}]
    assert first != second


def test_an_engine_that_refuses_every_id_is_not_asked_for_ever(setup):
    server, args = setup(lambda p, n: (400, f"Duplicate request ID detected: {p['rid']}"))
    with pytest.raises(EngineError, match="Duplicate request ID"):
        generate_one(args, Sample(prompt="1"))
    assert len(server.requests) == len(server.aborts) + 1 == 9


def test_a_silent_engine_is_given_up_at_the_deadline(setup):
    server, args = setup(
        lambda p, n: (server.aborted.wait(120) and (200, "")) or (500, ""), rollout_request_timeout=0.5
    )
    started = unloaded_time()
    with pytest.raises(DeadlineExceeded, match="/generate"):
        generate_one(args, Sample(prompt="1"))
    assert unloaded_time() - started < 3


def test_a_request_over_its_limit_is_one_failed_sample_and_the_rollout_goes_on(setup, caplog):
    server, args = setup(
        lambda p, n: (server.aborted.wait(120) and (200, "")) if n == 0 else (200, completion(p, [5])),
        rollout_request_timeout=4.0,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        max_failed_share=0.25,
    )
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    samples = [sample for group in output.samples for sample in group]
    (failed,) = [sample for sample in samples if sample.status is Sample.Status.FAILED]
    assert failed.remove_sample
    assert failed.metadata["failure"]["type"] == "RequestExpired"
    assert failed.metadata["failed_attempts"] == 1  # a second attempt would take as long
    assert "--rollout-request-timeout sets this limit" in caplog.text
    assert output.metrics["rollout/failed_samples"] == 1
    assert len(server.requests) == 4


def test_too_many_requests_over_the_limit_end_the_rollout_with_the_flag_and_the_bias(setup):
    server, args = setup(
        lambda p, n: (server.aborted.wait(120) and (200, "")) or (500, ""),
        rollout_request_timeout=0.3,
        max_failed_share=0.0,
    )
    with pytest.raises(DataError, match=r"prefers short ones: leave the flag out.*--max-failed-share 0 allows 0"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_a_request_has_no_limit_by_default(setup):
    _, args = setup(lambda p, n: (time.sleep(0.2), (200, completion(p, [5])))[1], rollout_request_timeout=None)
    assert GenerationArgs().rollout_request_timeout is None
    http_utils.init_http_client(args)
    assert http_utils._clients.timeout_s == math.inf
    assert generate_one(args, Sample(prompt="1")).response_length == 1


def test_model_urls_come_from_the_named_router_or_else_the_default_one_with_a_warning(caplog):
    args = SimpleNamespace(sglang_router_ip="a", sglang_router_port=1, sglang_model_routers={"judge": ("b", 2)})
    assert get_model_url(args, "judge", "/x") == "http://b:2/x"
    assert get_model_url(args, "default") == "http://a:1/generate"
    assert not caplog.text
    for _ in range(2):  # told once
        assert get_model_url(args, "jugde") == "http://a:1/generate"
    assert caplog.text.count("the run serves no model 'jugde' but judge") == 1


# --- whole rollouts


def test_a_rollout_returns_full_scored_groups_in_order(setup):
    _, args = setup(custom_rm_path=here("reward_is_length"), rollout_batch_size=4, n_samples_per_prompt=3)
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 0, source)
    assert [[s.index for s in group] for group in output.samples] == [[3 * g + i for i in range(3)] for g in range(4)]
    assert {s.reward for s in iter_samples(output.samples)} == {2.0}
    assert output.metrics.keys() == {"perf/tail_time"}
    args.over_sampling_batch_size = 2
    second = generate_rollout(args, 1, source)
    assert next(iter_samples(second.samples)).index == 12


def test_no_more_samples_run_at_once_than_there_are_slots(setup):
    def slow(payload, number):
        time.sleep(0.02)
        return 200, completion(payload, [5])

    server, args = setup(slow, sglang_server_concurrency=3, rollout_batch_size=8, n_samples_per_prompt=2)
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert len(server.requests) == 16
    assert 2 <= server.most_running <= 3


def test_what_over_sampling_leaves_running_is_aborted_and_its_prompts_come_back(setup):
    answered, lock = [], threading.Lock()

    def two_prompts_get_answers(payload, number):
        prompt = payload["input_ids"]
        with lock:
            if prompt not in answered and len(answered) < 2:
                answered.append(prompt)
        if prompt in answered:
            return 200, completion(payload, [5])
        server.aborted.wait(120)
        return 200, completion(payload, [5], "abort")

    server, args = setup(two_prompts_get_answers, over_sampling_batch_size=5)
    source = RolloutDataSourceWithBuffer(args)
    started = unloaded_time()
    output = generate_rollout(args, 0, source)
    assert unloaded_time() - started < 5
    assert server.aborted.is_set()
    used = {group[0].group_index for group in output.samples}
    back = [group[0].group_index for group in source.buffer]
    assert len(used) == 2
    assert back == sorted(set(range(5)) - used)
    assert all(s.tokens == [] and s.status is Sample.Status.PENDING for s in iter_samples(source.buffer))
    assert output.metrics["rollout/left_over_groups"] == 3
    assert not GenerateState(args).aborted


def an_engine_that_answers_two_prompts_and_is_aborted_in_the_others(get_server):
    """Four groups of two are under way before the first is answered. Later requests are answered at once."""
    answered, lock, all_here = [], threading.Lock(), threading.Barrier(8)

    def on_generate(payload, number):
        prompt = payload["input_ids"]
        if number >= 8:
            return 200, completion(payload, [5])
        all_here.wait(120)
        with lock:
            if prompt not in answered and len(answered) < 2:
                answered.append(prompt)
        if prompt in answered:
            return 200, completion(payload, [5])
        get_server().aborted.wait(120)
        return 200, completion(payload, [8, 9], "abort", text="8 9")

    return on_generate


def test_a_partial_rollout_keeps_what_was_generated_and_the_next_one_continues_it(setup):
    server, args = setup(
        an_engine_that_answers_two_prompts_and_is_aborted_in_the_others(lambda: server),
        over_sampling_batch_size=4,
        partial_rollout=True,
    )
    source = RolloutDataSourceWithBuffer(args)
    first = generate_rollout(args, 0, source)
    begun = {group[0].group_index for group in source.buffer}
    assert len(begun) == 2
    for sample in iter_samples(source.buffer):
        assert (sample.status, sample.tokens[-2:], sample.response_length) == (Sample.Status.ABORTED, [8, 9], 2)
        assert sample.metadata["start_rollout_id"] == 0
    assert first.metrics["rollout/left_over_tokens"] == 8
    args.over_sampling_batch_size = 2
    second = generate_rollout(args, 1, source)
    assert {group[0].group_index for group in second.samples} == begun  # before any new prompt
    for sample in iter_samples(second.samples):
        assert (sample.tokens[-3:], sample.response_length, sample.loss_mask) == ([8, 9, 5], 3, [1, 1, 1])
        assert len(sample.weight_versions) == 2
    continued = [request for request in server.requests if request["input_ids"][-2:] == [8, 9]]
    assert [request["sampling_params"]["max_new_tokens"] for request in continued] == [6] * 4


def test_tokens_of_older_weights_can_be_masked_in_a_partial_rollout(setup):
    server, args = setup(
        an_engine_that_answers_two_prompts_and_is_aborted_in_the_others(lambda: server),
        over_sampling_batch_size=4,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
    )
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout(args, 0, source)
    args.over_sampling_batch_size = 2
    continued = generate_rollout(args, 1, source)
    assert all(sample.loss_mask == [0, 0, 1] for sample in iter_samples(continued.samples))


def test_a_finished_group_too_many_is_trained_in_the_next_partial_rollout(setup):
    gate = threading.Barrier(3 * 2)  # three groups of two end at once, the batch needs two

    def together(payload, number):
        if number < 6:
            gate.wait(120)
        return 200, completion(payload, [5])

    server, args = setup(together, over_sampling_batch_size=3, partial_rollout=True)
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout(args, 0, source)
    (spare,) = source.buffer
    requests = len(server.requests)
    args.over_sampling_batch_size = 2
    output = generate_rollout(args, 1, source)
    assert spare[0].group_index in {group[0].group_index for group in output.samples}
    finished = sum(sample.status is Sample.Status.COMPLETED for sample in spare)
    assert finished < 2 or not [r for r in server.requests[requests:] if r["input_ids"] == spare[0].tokens[:-1]]


def test_a_source_without_buffer_only_costs_a_warning(setup, caplog):
    _, args = setup(over_sampling_batch_size=4)
    generate_rollout(args, 0, RolloutDataSource(args))
    assert "prompts that were fetched but not used are lost" in caplog.text


def test_dropped_groups_are_replaced_and_counted(setup):
    _, args = setup(dynamic_sampling_filter_path=here("keep_odd_groups"), rollout_batch_size=3)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert all(group[0].group_index % 2 for group in output.samples)
    assert output.metrics["rollout/dropped_groups"] >= 2


def test_a_filter_that_drops_everything_ends_with_an_error(setup):
    _, args = setup(dynamic_sampling_filter_path=here("keep_nothing"), rollout_batch_size=1, n_samples_per_prompt=1)
    with pytest.raises(DataError, match="dropped 101 groups"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_hooks_run_in_their_order_and_see_what_they_should(setup):
    _, args = setup(
        rollout_sample_hook_path=[here("mark_first")],
        rollout_sample_filter_path=here("remove_all"),
        rollout_all_samples_process_path=here("see_all"),
        custom_rm_path=here("reward_is_length"),
    )
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 7, source)
    samples = list(iter_samples(output.samples))
    assert all(s.metadata["hooked"][1:] == (False, None) for s in samples), "hooks come before the reward"
    assert all(s.remove_sample for s in samples)
    assert source.get_metadata() == {"seen": 2}


def test_a_raising_reward_names_itself_and_the_sample(setup):
    _, args = setup(custom_rm_path=here("broken_reward"))
    with pytest.raises(DataError, match=r"broken_reward on sample \d+ raised KeyError: 'no such grader'"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert not GenerateState(args).pendings


def test_a_hanging_reward_ends_the_rollout_at_its_deadline(setup):
    _, args = setup(custom_rm_path=here("hanging_reward"), rm_timeout=0.3)
    started = unloaded_time()
    with pytest.raises(DataError, match=r"hanging_reward on sample \d+ did not return within 0.3 s.*--rm-timeout"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert unloaded_time() - started < 5


def test_a_failing_engine_ends_the_rollout_and_the_next_one_works(setup):
    broken = threading.Event()
    broken.set()
    _, args = setup(lambda p, n: (400, "bad") if broken.is_set() else (200, completion(p, [5])))
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(DataError, match=r'400: "bad".* of 4 samples failed, and --max-failed-share 0.1 allows 0'):
        generate_rollout(args, 0, source)
    broken.clear()
    assert len(generate_rollout(args, 1, source).samples) == 2


@pytest.mark.parametrize("path", [None, "slime.rollout.sglang_streaming_rollout.generate_streaming"])
def test_tokens_of_a_request_that_an_engine_aborts_because_it_leaves_are_continued(setup, path):
    def reply(payload, number):
        ids = [[5, 6], [], [7]][number]
        whole = completion(payload, ids, "abort" if number < 2 else "stop", text="567"[sum((0, 2, 0)[: number + 1]) :])
        return 200, iter([whole]) if payload.get("stream") else whole

    server, args = setup(reply, custom_generate_function_path=path)
    args.rollout_batch_size = args.n_samples_per_prompt = 1
    (group,) = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
    first, second, third = (request["input_ids"] for request in server.requests)
    assert second == third == [*first, 5, 6]
    assert group[0].tokens == [*third, 7]
    assert group[0].status is Sample.Status.COMPLETED
    assert group[0].response_length == 3
    assert group[0].weight_versions == ["3", "3"], "the request that only waited depends on the load"
    assert "failed_attempts" not in group[0].metadata


def test_a_request_that_every_engine_aborts_without_a_token_fails(setup, monkeypatch):
    monkeypatch.setattr(custom_generate, "_FRUITLESS_PAUSE_S", 0.0)
    server, args = setup(lambda p, n: (200, completion(p, [], "abort")), max_sample_retries=0, max_failed_share=1.0)
    args.rollout_batch_size = args.n_samples_per_prompt = 1
    (group,) = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
    assert group[0].status is Sample.Status.FAILED
    assert len(server.requests) == 9


def test_a_data_source_without_prompts_is_an_error(setup):
    _, args = setup()
    with pytest.raises(DataError, match="no prompts"):
        generate_rollout(args, 0, SimpleNamespace(get_samples=lambda n: []))


def test_flat_samples_of_a_users_data_source_become_groups(setup):
    _, args = setup()
    source = SimpleNamespace(get_samples=lambda n: [Sample(prompt="1+1=") for _ in range(n)])
    output = generate_rollout(args, 0, source)
    assert [len(group) for group in output.samples] == [2, 2]


def test_rewards_of_a_whole_group_come_from_one_call(setup):
    _, args = setup(custom_rm_path=here("group_reward"), group_rm=True, n_samples_per_prompt=3)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [[s.reward for s in group] for group in output.samples] == [[0.0, 1.0, 2.0]] * 2


# --- custom generate functions


def test_rows_of_one_execution_share_its_rollout_id_and_are_scored(setup):
    server, args = setup(custom_generate_function_path=here("two_rows"), custom_rm_path=here("reward_is_length"))
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    for group in output.samples:
        assert [len(rows) for rows in group] == [2, 2]
        for rows in group:
            assert len({row.rollout_id for row in rows}) == 1
            assert {row.group_index for row in rows} == {group[0][0].group_index}
    assert len({row.rollout_id for row in iter_samples(output.samples)}) == 4
    assert {row.reward for row in iter_samples(output.samples)} == {1.0}
    assert server.requests == []


def test_a_function_that_only_sets_text_gets_tokens_and_keeps_its_reward(setup):
    _, args = setup(custom_generate_function_path=here("text_only"), custom_rm_path=here("broken_reward"))
    for sample in iter_samples(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples):
        assert sample.response_length == 2
        assert len(sample.tokens) > 2
        assert (sample.status, sample.reward) == (Sample.Status.COMPLETED, 1.0)
        assert (sample.loss_mask, sample.metadata["evaluation"]) == (None, False)


def test_a_function_with_a_parameter_samples_receives_the_group(setup):
    _, args = setup(custom_generate_function_path=here("whole_group"), sglang_server_concurrency=1)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [[s.metadata["position"] for s in group] for group in output.samples] == [[0, 1]] * 2
    assert all(s.loss_mask == [1] and s.reward in (0, 1) for s in iter_samples(output.samples))


def test_a_failed_generation_starts_again_from_its_prompt_and_is_counted(setup):
    _, args = setup(custom_generate_function_path=here("fails_on_the_first_try"))
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert all(s.tokens == [1, 2] for s in iter_samples(output.samples))
    assert output.metrics.items() >= {"rollout/failed_generations": 4}.items()


def test_a_generation_that_never_works_ends_the_rollout_with_its_cause(setup):
    _, args = setup(custom_generate_function_path=here("always_fails"))
    with pytest.raises(
        DataError, match=r"always_fails raised on sample \d+ in 3 attempts.*ZeroDivisionError: users' bug"
    ):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


@pytest.mark.parametrize(
    ("hook", "boundary", "kind", "response"),
    [
        ("custom_generate_function_path", "generate", "ZeroDivisionError", [0]),
        ("custom_rm_path", "reward", "ScoringError", [5, 6]),
    ],
)
def test_a_sample_that_fails_for_good_keeps_its_place_but_is_not_trained_on(setup, hook, boundary, kind, response):
    _, args = setup(**{hook: here(f"{boundary}_fails_for_one"), "max_failed_share": 0.25})
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    (failed,) = [s for s in iter_samples(output.samples) if s.status is Sample.Status.FAILED]
    assert (failed.metadata["failure"]["boundary"], failed.metadata["failure"]["type"]) == (boundary, kind)
    assert failed.tokens[-len(response) :] == response
    assert output.metrics["rollout/failed_samples"] == 1
    data = compile_train_data(output.samples, rewards=RewardArgs(n_samples_per_prompt=2))
    row = data["sample_indices"].index(failed.index)
    assert sum(data["loss_masks"][row]) == 0
    assert data["rewards"][row] == data["rewards"][row ^ 1] == 0.0  # alone in its group, the other teaches nothing
    assert len(data["tokens"]) == 4


@pytest.mark.parametrize(
    ("reason", "status"), [("eos_token", Sample.Status.COMPLETED), ("stop", Sample.Status.COMPLETED)]
)
def test_an_unknown_finish_reason_ends_a_sample(setup, reason, status):
    _, args = setup(lambda p, n: (200, completion(p, [5], reason=reason)))
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert {sample.status for sample in iter_samples(output.samples)} == {status}


@pytest.mark.parametrize(("reason", "is_told"), [("length", True), ("stop", False)])
def test_a_batch_of_cut_responses_is_told(setup, caplog, reason, is_told):
    _, args = setup(lambda p, n: (200, completion(p, [5], reason=reason)))
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert ("4 of 4 responses were cut at --rollout-max-response-len" in caplog.text) is is_told


def test_a_group_whose_generation_fails_for_good_is_given_up_as_a_whole(setup):
    _, args = setup(custom_generate_function_path=here("group_fails"), max_failed_share=1.0)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert all(s.metadata["failure"]["type"] == "OSError" for s in iter_samples(output.samples))
    assert output.metrics["rollout/failed_samples"] == 4


def test_a_failed_sample_counts_as_wrong_in_an_evaluation(setup, tiny_task):
    _, args = setup(
        custom_generate_function_path=here("generate_fails_for_one"),
        eval_prompt_data=["a", f"{tiny_task.eval}@[:2]"],
        n_samples_per_eval_prompt=4,
        max_failed_share=0.5,
        custom_rm_path=here("sync_reward"),
        reward_key="score",
    )
    args.eval_datasets = build_eval_datasets(args)
    rewards = generate_rollout(args, 0, None, evaluation=True).data["a"]["rewards"]
    assert sorted(rewards) == [0.0] + [0.5] * 7


# --- evaluation


def test_evaluation_scores_every_prompt_n_times_with_its_own_settings(setup, tiny_task):
    server, args = setup(
        custom_rm_path=here("sync_reward"),
        eval_prompt_data=["a", f"{tiny_task.eval}@[:3]", "b", f"{tiny_task.eval}@[:2]"],
        n_samples_per_eval_prompt=2,
        eval_temperature=0.0,
        eval_max_response_len=3,
        reward_key="score",
        eval_reward_key="acc",
    )
    args.eval_datasets = build_eval_datasets(args)
    output = generate_rollout(args, 0, None, evaluation=True)
    assert {name: len(result["rewards"]) for name, result in output.data.items()} == {"a": 6, "b": 4}
    for result in output.data.values():
        assert set(result["rewards"]) == {1}
        assert result["truncated"] == [False] * len(result["samples"])
        assert [s.index for s in result["samples"]] == list(range(len(result["samples"])))
    assert {r["sampling_params"]["temperature"] for r in server.requests} == {0.0}
    assert {r["sampling_params"]["max_new_tokens"] for r in server.requests} == {3}


def test_a_failure_during_evaluation_ends_it(setup, tiny_task):
    _, args = setup(lambda p, n: (400, "bad"), eval_prompt_data=["a", f"{tiny_task.eval}@[:3]"])
    args.eval_datasets = build_eval_datasets(args)
    with pytest.raises(DataError, match='400: "bad"'):
        generate_rollout(args, 0, None, evaluation=True)


def test_a_coroutine_that_blocks_the_loop_is_named_with_its_place(monkeypatch):
    monkeypatch.setattr(async_utils, "_HEARTBEAT_S", 0.05)
    may_end = threading.Event()

    async def blocks():
        may_end.wait(120)

    with pytest.raises(DeadlineExceeded, match="in blocks"):
        async_utils.AsyncLoopThread().run(blocks(), stall_s=0.3)  # not the process's loop, which others need
    may_end.set()


def test_groups_that_take_long_are_named(setup, monkeypatch, caplog):
    may_answer = threading.Event()

    class Answers(logging.Handler):
        def emit(self, record):
            if "no group has finished" in record.getMessage():
                may_answer.set()

    def answer(payload, number):
        assert may_answer.wait(120)
        return 200, completion(payload, [5])

    monkeypatch.setattr(collect, "_SILENCE_S", 0.05)
    handler = Answers()
    logging.getLogger(collect.__name__).addHandler(handler)
    try:
        _, args = setup(answer)
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    finally:
        logging.getLogger(collect.__name__).removeHandler(handler)
    assert "2 are under way, those of the samples [0, 2]" in caplog.text


def test_running_on_the_loop_itself_is_an_error_and_not_a_deadlock():
    async def inner():
        return run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="use await"):
        run(inner())


async def slow_for_two(args, sample, sampling_params):
    sample.append_response_tokens(tokens=[9], log_probs=[-1.0])
    await asyncio.sleep(30 if sample.index < 2 else 0)
    return sample


def one_set(tiny_task, args, **fields):
    entry = {"name": "a", "path": f"{tiny_task.eval}@[:6]"} | fields
    args.eval_datasets = build_eval_dataset_configs(args, [entry], {})
    return generate_rollout(args, 0, None, evaluation=True).data["a"]


def test_an_evaluation_set_may_end_without_its_last_samples(setup, tiny_task):
    _, args = setup(custom_generate_function_path=here("slow_for_two"))
    stop = {"eval_early_stop_remaining": 2, "eval_early_stop_idle_timeout": 0.2}
    started = unloaded_time()
    result = one_set(tiny_task, args, **stop, min_eval_samples=4)
    assert [sample.index for sample in result["samples"]] == [2, 3, 4, 5]
    with pytest.raises(DataError, match="set a has 4 finished samples, fewer than min_eval_samples 5"):
        one_set(tiny_task, args, **stop, min_eval_samples=5)
    assert unloaded_time() - started < 10


def test_a_prompt_of_an_evaluation_that_takes_too_long_counts_as_failed(setup, tiny_task):
    _, args = setup(custom_generate_function_path=here("slow_for_two"), custom_rm_path=here("reward_is_length"))
    args.max_failed_share = 0.5
    result = one_set(tiny_task, args, eval_task_timeout=3)
    assert result["rewards"] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert "eval_task_timeout 3 s" in result["samples"][0].metadata["failure"]["message"]


# --- the stop token at the end of a response


EXACT = "def reward_func(args, sample, **kwargs):\n    return float(sample.response.strip() == sample.label)\n"


async def two_turns(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    assert sample.response == "46", "what a function sees between its turns has no stop token either"
    sample.append_response_tokens(args, tokens=[9], text="\nagain: ", trainable=False)
    sample.status = Sample.Status.PENDING
    return await generate(args, sample, sampling_params)


async def by_hand(args, sample, sampling_params):
    end = GenerateState(args).tokenizer.eos_token_id
    sample.tokens = [1, 5, end]
    sample.response, sample.response_length, sample.loss_mask = "46<|im_end|>", 2, [1, 1]
    return sample


async def group_by_hand(args, samples, sampling_params):
    return [await by_hand(args, sample, sampling_params) for sample in samples]


@pytest.fixture
def answers_46(setup, tiny_task, tmp_path):
    """``answers_46(**flags) -> (server, args)``: every request is answered with "46<|im_end|>"."""
    from slime.data.processing import load_tokenizer

    end = load_tokenizer(tiny_task.model, trust_remote_code=True).eos_token_id
    reward = tmp_path / "reward.py"
    reward.write_text(EXACT)

    def make(reason="stop", **flags):
        def answer(payload, number):
            return 200, completion(payload, [5, end], reason, text="46<|im_end|>")

        return setup(answer, custom_rm_path=str(reward), **flags)

    return make


def rewarded(args, sample=None):
    (done,) = run(generate_and_rm_group(args, [sample or Sample(prompt="12+34=", label="46")], {"max_new_tokens": 8}))
    return done


@pytest.mark.parametrize("function", [None, "two_turns", "by_hand", "group_by_hand"])
def test_the_reward_of_the_users_guide_pays_for_a_right_answer_of_a_chat_model(answers_46, function):
    _, args = answers_46(custom_generate_function_path=None if function is None else here(function))
    done = rewarded(args)
    if function == "two_turns":
        assert done.response == "46<|im_end|>\nagain: 46", "the end of an earlier turn is text between two turns"
    else:
        assert (done.response, done.reward) == ("46", 1.0)
    end = GenerateState(args).tokenizer.eos_token_id
    assert done.tokens[-1] == end
    assert done.response_length == len(done.loss_mask)
    if "hand" not in (function or ""):
        assert len(done.rollout_log_probs) == done.response_length


def test_upstreams_text_with_the_stop_token_can_be_had(answers_46):
    _, args = answers_46(keep_stop_token_text=True)
    done = rewarded(args)
    assert (done.response, done.reward) == ("46<|im_end|>", 0.0)


def test_only_the_token_that_ended_the_response_leaves_its_text(setup, answers_46):
    _, args = answers_46("length")
    assert rewarded(args).response == "46<|im_end|>", "a response that was cut has not ended"
    GenerateState.clear_instances()

    def stops_at_a_string(payload, number):
        reply = completion(payload, [5, 6], text="46</answer>")
        reply["meta_info"]["finish_reason"]["matched"] = "</answer>"
        return 200, reply

    _, args = setup(stops_at_a_string)
    assert rewarded(args).response == "46</answer>"
    GenerateState.clear_instances()

    def stops_at_a_token_of_the_engine(payload, number):
        state = GenerateState(args)
        ids = state.tokenizer.encode("46", add_special_tokens=False)
        reply = completion(payload, ids, text=state.tokenizer.decode(ids))
        reply["meta_info"]["finish_reason"]["matched"] = ids[-1]
        return 200, reply

    _, args = setup(stops_at_a_token_of_the_engine)
    done = rewarded(args)
    assert done.response == "4"
    assert done.response_length == 2


async def one_turn(args, sample, sampling_params):
    return await generate(args, sample, sampling_params)


def test_only_one_stop_token_leaves_the_text_though_the_token_before_it_ends_in_the_same_way(setup):
    def ends_with_line_breaks(payload, number):
        (line_break,) = GenerateState(args).tokenizer.encode("\n", add_special_tokens=False)
        reply = completion(payload, [5, line_break, line_break], text="4\n\n")
        reply["meta_info"]["finish_reason"]["matched"] = line_break
        return 200, reply

    stops = {"rollout_stop_token_ids": None, "custom_generate_function_path": here("one_turn")}
    _, args = setup(ends_with_line_breaks, **stops)
    (line_break,) = GenerateState(args).tokenizer.encode("\n", add_special_tokens=False)
    params = {"max_new_tokens": 8, "stop_token_ids": [line_break]}
    (done,) = run(generate_and_rm_group(args, [Sample(prompt="1", label="4")], params))
    assert done.response == "4\n"


def test_a_function_that_appends_text_by_itself_gets_no_stop_token_in_a_wrong_place():
    sample = Sample(tokens=[1, 2], response="46 and 47", response_length=1, loss_mask=[1])
    sample.stop_text = [2, "<|im_end|>"]
    sample.append_response_tokens(tokens=[3], trainable=False, text="!")
    assert sample.response == "46 and 47!"
    assert "stop_text" not in sample.to_dict()


# --- fakes of users' tests


def test_a_state_and_a_loader_made_by_hand_are_enough(monkeypatch, setup):
    _, args = setup()

    async def custom(args, sample, sampling_params):
        sample.tokens, sample.response, sample.response_length = [1, 2], "7", 1
        sample.reward = 1.0
        return sample

    state = SimpleNamespace(tokenizer=None, processor=None, semaphore=asyncio.Semaphore(2), aborted=False)
    monkeypatch.setattr(sglang_rollout, "GenerateState", lambda args: state)
    monkeypatch.setattr(sglang_rollout, "load_function", lambda path: custom)
    args.custom_generate_function_path = "pkg.custom"
    assert rewarded(args).reward == 1.0
    state.aborted = True
    (untouched,) = run(sglang_rollout.generate_and_rm_group(args, [Sample(prompt="1")], {}))
    assert untouched.status is Sample.Status.PENDING
    state.aborted = False
    state.tokenizer = SimpleNamespace(encode=lambda text, **kwargs: [1, 2])
    assert run(generate(args, Sample(prompt="12"), {"max_new_tokens": 8})).response == "7"


async def counts_calls(args, sample, sampling_params):
    args.calls.append(len(args.begun))
    await asyncio.sleep(0)
    sample.append_response_tokens(tokens=[9], log_probs=[-1.0])
    return sample


async def counts_calls_of_groups(args, samples, sampling_params):
    return [await counts_calls(args, sample, sampling_params) for sample in samples]


@pytest.mark.parametrize("name", ["counts_calls", "counts_calls_of_groups"])
def test_the_time_of_an_evaluations_prompt_begins_with_its_slot(setup, tiny_task, monkeypatch, name):
    def note(begin):
        on_begin.set(lambda: (args.begun.append(1), begin()))

    monkeypatch.setattr(evaluate, "on_begin", SimpleNamespace(set=note))
    _, args = setup(custom_generate_function_path=here(name), custom_rm_path=here("reward_is_length"))
    args.sglang_server_concurrency, args.calls, args.begun = 1, [], []
    assert one_set(tiny_task, args, eval_task_timeout=600)["rewards"] == [1.0] * 6
    assert args.calls == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("hangs", [False, True])
def test_the_wait_for_a_slot_is_not_part_of_the_time_of_an_evaluations_prompt(hangs):
    async def generate(group, params, *, evaluation):
        await asyncio.sleep(0.2)  # the wait for a slot
        on_begin.get()()
        if hangs:
            await asyncio.sleep(1000)
        return group

    config = EvalDatasetConfig(name="a", path="b", eval_task_timeout=0.1)
    (sample,) = run(evaluate._generate(config, [Sample(index=0, reward=1.0)], {}, generate, [""]))
    assert (sample.reward == 1.0) is not hangs


@pytest.mark.parametrize("group_rm", [False, True])
def test_an_evaluation_set_may_go_without_the_function_of_training(setup, tiny_task, group_rm):
    _, args = setup(custom_rm_path=here("reward_is_length"), rm_type="math", group_rm=group_rm)
    assert one_set(tiny_task, args, custom_rm_path=None)["rewards"] == [0.0] * 6  # no response has a box


@pytest.mark.parametrize("key", ["routed_experts", "output_token_sampling_mask"])
def test_dropped_tokens_of_an_abort_take_their_arrays_along(setup, key):
    server, args = setup()
    args.num_layers = args.moe_router_topk = 1
    end = GenerateState(args).tokenizer.eos_token_id

    def answer(payload, number):
        reply = completion(payload, [5, end, 6], "abort", text="7<|im_end|>8")
        arrays = {"routed_experts": [0] * (len(payload["input_ids"]) + 2)}
        arrays["output_token_sampling_mask"] = [[5], [end], [6]]
        reply["meta_info"] |= {key: arrays[key]}
        if key != "routed_experts":
            reply["meta_info"]["output_token_sampling_logprobs"] = [-0.5] * 3
        return 200, reply

    server.on_generate = answer
    sample = Sample(prompt="1+1=")
    run(generate(args, sample, {"max_new_tokens": 8}))
    assert (sample.status.value, sample.response_length) == ("aborted", 0)
