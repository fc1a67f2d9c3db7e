"""The small parts of the rollout room: filters, hooks on samples, evaluation sets, supervised batches, HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest

from slime.config.groups import groups_in
from slime.data.sample import Sample
from slime.rollout import sft_rollout
from slime.rollout.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    call_dynamic_filter,
    call_rollout_fn,
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
    complete_args,
    should_drop_dynamic_filter_output,
)
from slime.rollout.custom_generate import apply_rollout_sample_hooks, set_current_rollout_id, set_evaluated_rollout_id
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.eval_config import EvalDatasetConfig, build_eval_dataset_configs, build_eval_datasets
from slime.rollout.failures import fresh_copy
from slime.rollout.sglang_rollout import GenerateState
from slime.utils import http_utils
from slime.utils.errors import ConfigError, DataError, DeadlineExceeded, EngineError
from tests.limits import unloaded_time
from tests.unit.rollout.fake_engine import FakeEngine, make_args

NO_KEY = SimpleNamespace(reward_key=None)


def group(*rewards):
    return [Sample(index=i, reward=reward) for i, reward in enumerate(rewards)]


# --- filters


def test_equal_rewards_are_dropped_also_inside_fan_out_lists():
    assert check_reward_nonzero_std(NO_KEY, group(0.0, 1.0)).keep is True
    output = check_reward_nonzero_std(NO_KEY, [group(1.0, 1.0), *group(1.0)])
    assert (output.keep, output.reason) == (False, "zero_std_1.0")
    assert check_reward_nonzero_std(NO_KEY, group(1.0)).keep, "a group of one has no spread to ask for"
    keyed = [Sample(reward={"acc": i}) for i in range(2)]
    assert check_reward_nonzero_std(SimpleNamespace(reward_key="acc"), keyed).keep


def test_a_fallback_group_is_taken_only_when_nothing_better_is_coming():
    output = check_reward_nonzero_std_with_fallback(NO_KEY, group(1.0, 1.0))
    assert should_drop_dynamic_filter_output(output, remaining_batch_size=5, target_data_size=4)
    assert not should_drop_dynamic_filter_output(output, remaining_batch_size=4, target_data_size=4)


def test_filters_may_return_a_bool_and_drops_are_counted_by_reason():
    assert call_dynamic_filter(None, 1).keep
    assert call_dynamic_filter(lambda x: x > 1, 1) == DynamicFilterOutput(keep=False)
    gatherer = MetricGatherer()
    for reason in ("a", "a", None, ""):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_a": 2}


def test_ranks_are_drawn_without_the_generator_of_users():
    state, drawn = random.getstate(), set()
    for _ in range(50):
        with GenerateState.dp_rank_context(SimpleNamespace(dp_counts=[0, 1, 0])) as rank:
            drawn.add(rank)
    assert drawn == {0, 2}
    assert random.getstate() == state


# --- hooks on samples


@pytest.fixture
def hook_file(tmp_path):
    path = tmp_path / "hooks.py"
    path.write_text(
        "from slime.data.sample import Sample\n"
        "def first(args, sample, *, rollout_id):\n    sample.metadata['by'] = [rollout_id]\n"
        "async def second(args, sample, **kwargs):\n"
        "    new = Sample(metadata=dict(sample.metadata))\n"
        "    new.metadata['by'].append(kwargs['evaluation'])\n    return new\n"
        "def wrong(args, sample):\n    return 3\n"
    )
    return path


def hooked(args, value, **kwargs):
    return asyncio.run(apply_rollout_sample_hooks(args, value, **kwargs))


def test_sample_hooks_apply_in_order_and_keep_the_nesting(hook_file):
    args = SimpleNamespace(rollout_sample_hook_path=[f"{hook_file}:first", f"{hook_file}:second"])
    set_current_rollout_id(5)
    set_evaluated_rollout_id(None)  # other tests evaluate in this process
    result = hooked(args, [Sample(), [Sample()]], evaluation=True)
    assert result[0].metadata["by"] == result[1][0].metadata["by"] == [5, True]
    set_current_rollout_id(None)


def test_without_hooks_the_very_object_comes_back_and_wrong_results_are_named(hook_file):
    value = object()
    assert hooked(SimpleNamespace(), value) is value
    with pytest.raises(TypeError, match="wrong: expected Sample or None, got int"):
        hooked(SimpleNamespace(rollout_sample_hook_path=[f"{hook_file}:wrong"]), Sample())
    with pytest.raises(TypeError, match="got str"):
        hooked(SimpleNamespace(rollout_sample_hook_path=[f"{hook_file}:first"]), ["x"])


# --- what rollout functions return


def test_plain_results_are_wrapped_and_nothing_is_an_error():
    samples = [[Sample()]]
    assert call_rollout_fn(lambda evaluation: samples, evaluation=False).samples is samples
    assert call_rollout_fn(lambda evaluation: {"a": {}}, evaluation=True) == RolloutFnEvalOutput(data={"a": {}})
    output = RolloutFnTrainOutput(samples=[])
    assert call_rollout_fn(lambda evaluation: output, evaluation=True) is output
    batch = RolloutFnTrainOutput(samples=samples)  # reads like its samples
    assert (list(batch), len(batch), batch[0], batch[-1:]) == (samples, 1, samples[0], samples)
    with pytest.raises(DataError, match="--rollout-function-path"):
        call_rollout_fn(lambda evaluation: None, evaluation=False)


# --- evaluation sets


def test_pairs_become_sets_with_the_flags_of_evaluation_then_of_training():
    args = SimpleNamespace(
        eval_prompt_data=["a", "a.jsonl", "b", "b.jsonl"], rollout_temperature=1.0, eval_temperature=0.0,
        n_samples_per_eval_prompt=None, n_samples_per_prompt=4, input_key="q", rollout_max_response_len=9,
    )  # fmt: skip
    first, second = build_eval_datasets(args)
    assert (first.name, first.path, second.name) == ("a", "a.jsonl", "b")
    assert (first.temperature, first.n_samples_per_eval_prompt, first.input_key) == (0.0, 4, "q")
    assert (first.max_response_len, first.top_p) == (9, None)
    assert first.cache_key != second.cache_key


@pytest.mark.parametrize(
    ("values", "message"), [(["a", "x", "b"], "pairs NAME FILE"), (["a", "x", "a", "y"], "a more than once")]
)
def test_odd_and_repeated_sets_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        build_eval_datasets(SimpleNamespace(eval_prompt_data=values))


def test_a_lone_file_keeps_its_old_name_and_no_flag_means_no_set():
    (only,) = build_eval_datasets(SimpleNamespace(eval_prompt_data=["x.jsonl"]))
    assert only.name == "aime"
    assert build_eval_datasets(SimpleNamespace(eval_prompt_data=None)) == []


def test_entries_win_over_defaults_and_unknown_keys_are_named():
    entries = [{"name": "a", "path": "x", "top_p": 0.5}]
    (config,) = build_eval_dataset_configs(SimpleNamespace(top_k=1), entries, {"top_p": 0.9, "temperature": 0.3})
    assert (config.top_p, config.temperature) == (0.5, 0.3)
    with pytest.raises(ValueError, match="temprature"):
        build_eval_dataset_configs(SimpleNamespace(), [], {"temprature": 1})


def test_metadata_of_a_set_is_added_to_a_copy():
    config = EvalDatasetConfig("a", "x", rm_type="f1", metadata_overrides={"k": 1})
    original = {"z": 0}
    assert config.inject_metadata(original) == {"z": 0, "rm_type": "f1", "k": 1}
    assert original == {"z": 0}
    with pytest.raises(ValueError, match="set a: min_eval_samples 0 must be at least 1"):
        EvalDatasetConfig("a", "x", min_eval_samples=0)
    args = SimpleNamespace(eval_prompt_data=["a", "x"], eval_custom_rm_path="pkg.eval_rm", custom_rm_path="pkg.rm")
    assert build_eval_datasets(args)[0].custom_rm_path == "pkg.eval_rm"
    with pytest.raises(TypeError, match="metadata_overrides"):
        EvalDatasetConfig("a", "x", metadata_overrides=[1])


# --- supervised batches


def test_supervised_batches_train_on_the_answers_and_skip_rows_without_one(tmp_path, tiny_task):
    rows = [
        [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
        [{"role": "user", "content": "2+2="}],
    ]
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    args = make_args(tiny_task.model, 0, prompt_data=str(path), n_samples_per_prompt=1)
    output = sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert output.metrics == {"rollout/skipped_rows": 1}
    for (sample,) in output.samples:
        assert len(sample.loss_mask) == sample.response_length < len(sample.tokens)
        assert (sample.reward, sample.status, sum(sample.loss_mask)) == (0.0, Sample.Status.COMPLETED, 3)
    args.n_samples_per_prompt = 2
    with pytest.raises(ConfigError, match="--n-samples-per-prompt 1"):
        sft_rollout.generate_rollout(args, 0, None)


def test_supervised_batches_of_rows_that_cannot_be_trained_are_an_error(tmp_path, tiny_task):
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "2+2="}]}))
    args = make_args(tiny_task.model, 0, prompt_data=str(path), n_samples_per_prompt=1)
    with pytest.raises(DataError, match="rows without an assistant message"):
        sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    path.write_text(json.dumps({"prompt": "text"}))
    with pytest.raises(DataError, match="message lists"):
        sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


# --- settings and copies


def test_settings_left_out_of_a_hand_made_namespace_have_their_declared_default():
    args = SimpleNamespace(rm_timeout=1)
    assert complete_args(args) is args
    assert (args.rm_timeout, args.max_sample_retries) == (1, 2)
    assert complete_args(SimpleNamespace()).rollout_sample_hook_path is not args.rollout_sample_hook_path
    with pytest.raises(AttributeError):
        _ = args.no_such_flag


def test_a_fresh_copy_shares_no_list_and_keeps_plugin_attributes():
    sample = Sample(tokens=[1], metadata={"a": [1]}, multimodal_inputs={"images": []})
    sample.notes = [1]
    twin = fresh_copy(sample)
    twin.tokens.append(2)
    twin.metadata["a"].append(2)
    twin.notes.append(2)
    twin.spec_info.spec_verify_ct = 1
    assert (sample.tokens, sample.metadata, sample.notes) == ([1], {"a": [1]}, [1])
    assert sample.spec_info.spec_verify_ct == 0
    assert twin.multimodal_inputs is sample.multimodal_inputs


def test_every_flag_has_a_help_text_and_the_module_imports_no_torch():
    import slime.rollout.arguments as module

    for group in groups_in(module):
        assert all(item.metadata["help"] for item in dataclasses.fields(group))
    code = (
        "import slime.rollout.arguments, slime.data.arguments, slime.rollout.eval_config, slime.hooks, sys;"
        "assert not {'torch', 'ray', 'transformers', 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- HTTP


def test_every_event_loop_gets_a_working_client_and_replies_may_be_text(engine):
    server = engine(lambda payload, number: (200, {"got": payload}))
    for _ in range(2):
        assert asyncio.run(http_utils.post(f"{server.url}/x", {"a": 1})) == {"got": {"a": 1}}
    assert asyncio.run(http_utils.get(f"{server.url}/workers")) == {"workers": [{"url": server.url}]}
    assert asyncio.run(http_utils.post(f"{server.url}/x", None)) == {"got": {}}


def test_a_closed_port_is_tried_as_often_as_asked_and_named():
    server = FakeEngine()
    server.close()
    started = unloaded_time()
    with pytest.raises(EngineError, match=rf"{server.url}/x failed 3 times.*ConnectError"):
        asyncio.run(http_utils.post(f"{server.url}/x", {}, max_retries=2))
    assert unloaded_time() - started < 3


def test_a_client_that_users_code_installed_is_used(monkeypatch):
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="plain"))
    monkeypatch.setattr(http_utils, "_http_client", httpx.AsyncClient(transport=transport))
    assert asyncio.run(http_utils.post("http://nowhere/x", {})) == "plain"


@pytest.mark.parametrize("status", [408, 429])
def test_a_server_that_wants_to_be_asked_later_is(monkeypatch, status):
    statuses = [status, 200]
    transport = httpx.MockTransport(lambda request: httpx.Response(statuses.pop(0), text="later"))
    monkeypatch.setattr(http_utils, "_http_client", httpx.AsyncClient(transport=transport))
    assert asyncio.run(http_utils.post("http://x/y", {}, max_retries=1)) == "later"
    assert statuses == []


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_reply_that_was_damaged_on_the_way_is_asked_for_again(monkeypatch, is_stream):
    replies = [
        httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip at all")),
        httpx.Response(200, stream=httpx.ByteStream(b'data: {"text": "7"}\n\n' if is_stream else b'{"text": "7"}')),
    ]
    transport = httpx.MockTransport(lambda request: replies.pop(0))
    monkeypatch.setattr(http_utils, "_http_client", httpx.AsyncClient(transport=transport))
    if is_stream:
        events = []
        asyncio.run(http_utils.receive_stream("http://x/y", {}, lambda event: not events.append(event), max_retries=1))
        assert events == [{"text": "7"}]
    else:
        assert asyncio.run(http_utils.post("http://x/y", {}, max_retries=1)) == {"text": "7"}
    assert replies == []


@pytest.mark.parametrize(("gpus", "per_engine", "engines"), [(None, 1, 0), (0, 1, 0), (4, 2, 2), (1, 2, 1)])
def test_the_number_of_engines_follows_from_the_devices(gpus, per_engine, engines):
    args = SimpleNamespace(rollout_num_gpus=gpus, rollout_num_gpus_per_engine=per_engine)
    assert http_utils.get_rollout_num_engines(args) == engines
    args.rollout_num_engines = 7
    assert http_utils.get_rollout_num_engines(args) == 7


def test_a_connection_whose_host_vanishes_fails_although_the_request_has_no_limit(engine):
    async def options_of_connection() -> list[int]:
        response = await http_utils._clients.next().post(engine().url, json={})
        connection = response.extensions["network_stream"].get_extra_info("socket")
        values = [connection.getsockopt(*option[:2]) for option in http_utils._KEEPALIVE]
        await http_utils.close_http_client()
        return values

    assert asyncio.run(options_of_connection()) == [1, 60, 10, 6]


def test_no_time_at_all_for_a_request_is_a_deadline_and_not_the_default():
    with pytest.raises(DeadlineExceeded, match="gave up after 0"):
        asyncio.run(http_utils.post("http://127.0.0.1:9", {}, timeout_s=0))
