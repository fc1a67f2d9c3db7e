"""Names and signatures that plugins import from data, hooks and rollout. A change here breaks other people's code."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest

from slime.utils.misc import SingletonMeta, should_run_periodic_action
from slime.utils.types import Sample

PARAMETERS = {
    "slime.rollout.base_types:call_rollout_fn": "fn, *args, evaluation, **kwargs",
    "slime.rollout.data_source:pop_first": "args, rollout_id, buffer, num_samples",
    "slime.rollout.filter_hub.base_types:call_dynamic_filter": "fn, *args, **kwargs",
    "slime.rollout.filter_hub.base_types:should_drop_dynamic_filter_output": (
        "output, *, remaining_batch_size, target_data_size"
    ),
    "slime.rollout.filter_hub.dynamic_sampling_filters:check_reward_nonzero_std": "args, samples, **kwargs",
    "slime.rollout.filter_hub.dynamic_sampling_filters:check_reward_nonzero_std_with_fallback": (
        "args, samples, **kwargs"
    ),
    "slime.rollout.rm_hub:async_rm": "args, sample, **kwargs",
    "slime.rollout.rm_hub:batched_async_rm": "args, samples, **kwargs",
    "slime.rollout.rm_hub:remote_rm": "args, sample, max_retries=10",
    "slime.rollout.rm_hub:grade_answer_verl": "solution_str, ground_truth",
    "slime.rollout.rm_hub.f1:f1_score": "prediction, ground_truth",
    "slime.rollout.rm_hub.f1:normalize_answer": "s",
    "slime.rollout.rm_hub.math_utils:_strip_string": "string",
    "slime.rollout.rm_hub.math_utils:extract_answer": "passage",
    "slime.rollout.rm_hub.math_utils:extract_boxed_answer": "solution",
    "slime.rollout.rm_hub.math_utils:grade_answer_mathd": "given_answer, ground_truth",
    "slime.rollout.rm_hub.math_utils:grade_answer_sympy": "given_answer, ground_truth",
    "slime.rollout.rm_hub.math_utils:last_boxed_only_string": "string",
    "slime.rollout.rm_hub.math_utils:mathd_normalize_answer": "answer",
    "slime.rollout.rm_hub.math_utils:remove_boxed": "s",
    "slime.rollout.sample_hooks:apply_rollout_sample_hooks": "args, value, **kwargs",
    "slime.rollout.sample_hooks:set_current_rollout_id": "rollout_id",
    "slime.rollout.sft_rollout:generate_rollout": "args, rollout_id, data_buffer, evaluation=False",
    "slime.rollout.sglang_rollout:abort": "args, rollout_id",
    "slime.rollout.sglang_rollout:eval_rollout": "args, rollout_id",
    "slime.rollout.sglang_rollout:generate": "args, sample, sampling_params",
    "slime.rollout.sglang_rollout:generate_and_rm": "args, sample, sampling_params, evaluation=False",
    "slime.rollout.sglang_rollout:generate_and_rm_group": "args, group, sampling_params, evaluation=False",
    "slime.rollout.sglang_rollout:generate_rollout": "args, rollout_id, data_source, evaluation=False",
    "slime.rollout.sglang_rollout:generate_rollout_async": "args, rollout_id, data_source_get_samples",
    "slime.rollout.sglang_rollout:get_model_url": "args, model_name, endpoint='/generate'",
    "slime.rollout.sglang_rollout:_prepare_prompt_ids": "sample, tokenizer, processor=None",
    "slime.rollout.sleep_rollout:sleep": "args, rollout_id, data_source, evaluation=False",
    "slime.utils.async_utils:run": "coro, stall_s=600.0",
    "slime.utils.http_utils:get_rollout_num_engines": "args",
    "slime.utils.http_utils:init_http_client": "args",
    "slime.utils.http_utils:post": "url, payload, max_retries=60, headers=None, *, timeout_s=None",
    "slime.utils.mask_utils:MultiTurnLossMaskGenerator": "tokenizer, tokenizer_type='qwen'",
    "slime.utils.misc:decode_int32_meta_array": "meta_info, keys",
    "slime.utils.misc:exec_command": "cmd, capture_output=False",
    "slime.utils.misc:load_function": "path, role=None, *, group_rm=False",
}

SAMPLE_FIELDS = """
    group_index index rollout_id prompt tokens multimodal_inputs multimodal_train_inputs multimodal_train_input_id 
    apply_chat_template_kwargs response response_length label reward loss_mask weight_versions rollout_log_probs 
    rollout_top_p_token_ids rollout_top_p_token_offsets rollout_routed_experts remove_sample teacher_log_probs status 
    metadata generate_function_path custom_rm_path train_metadata session_id non_generation_time spec_info 
    prefix_cache_info
"""


def find(path):
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", PARAMETERS)
def test_parameters_of_public_functions_are_as_promised(path):
    parameters = []
    saw_keyword_only = False
    for p in inspect.signature(find(path)).parameters.values():
        prefix = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        saw_keyword_only |= p.kind is p.VAR_POSITIONAL
        if p.kind is p.KEYWORD_ONLY and not saw_keyword_only:
            parameters.append("*")
            saw_keyword_only = True
        parameters.append(prefix + p.name + ("" if p.default is p.empty else f"={p.default!r}"))
    assert ", ".join(parameters) == PARAMETERS[path]


def test_the_fields_of_a_sample_keep_their_order_and_have_defaults():
    assert [item.name for item in dataclasses.fields(Sample)] == SAMPLE_FIELDS.split()
    assert {status.name: status.value for status in Sample.Status} == {
        name.upper(): name for name in ("pending", "completed", "truncated", "aborted", "failed")
    }
    fresh = Sample()
    assert (fresh.prompt, fresh.tokens, fresh.loss_mask, fresh.reward) == ("", [], None, None)
    assert (fresh.status, fresh.metadata, fresh.non_generation_time) == (Sample.Status.PENDING, {}, 0.0)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("slime.rollout.base_types:RolloutFnTrainOutput", "samples metrics"),
        ("slime.rollout.base_types:RolloutFnEvalOutput", "data metrics"),
        ("slime.rollout.filter_hub.base_types:DynamicFilterOutput", "keep reason keep_when_insufficient"),
    ],
)
def test_public_records_keep_their_fields(path, fields):
    assert [item.name for item in dataclasses.fields(find(path))] == fields.split()


def test_the_short_import_paths_give_the_same_objects():
    import slime.data
    from slime.hooks import load_function
    from slime.rollout import rm_hub, sglang_rollout
    from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
    from slime.utils import misc

    assert slime.data.Sample is Sample
    assert slime.data.RolloutDataSource is RolloutDataSource
    assert slime.data.RolloutDataSourceWithBuffer is RolloutDataSourceWithBuffer
    assert misc.load_function is sglang_rollout.load_function is load_function
    assert rm_hub.extract_boxed_answer(r"\boxed{1}") == "1"
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = slime.data.nothing_here


def test_data_sources_have_the_members_that_plugins_use():
    from slime.rollout.data_source import DataSource, RolloutDataSourceWithBuffer

    for name in ("get_samples", "add_samples", "save", "load", "__len__"):
        assert callable(getattr(DataSource, name))
    for name in ("get_metadata", "update_metadata", "get_buffer_length"):
        assert callable(getattr(RolloutDataSourceWithBuffer, name))


def test_a_singleton_forgets_its_instance_on_request_only():
    class One(metaclass=SingletonMeta):
        def __init__(self, value):
            self.value = value

    class Other(One):
        pass

    assert One(1) is One(2)
    assert Other(3).value == 3
    One.clear_instances()
    assert One(4).value == 4
    assert Other(5).value == 3


@pytest.mark.parametrize(
    ("arguments", "is_due"),
    [((0, None), False), ((1, 2), True), ((2, 2), False), ((2, 2, 3), True), ((2, 9, None, 3), True)],
)
def test_periodic_actions_are_due_at_intervals_epochs_and_the_end(arguments, is_due):
    assert should_run_periodic_action(*arguments) is is_due
