"""Every name that plugins, examples and scripts import stays importable, and the newer ones keep their parameters."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

PATHS = """
Dockerfile requirements.txt train.py train_async.py
docs/en/get_started/quick_start.md docs/en/get_started/usage.md docs/en/get_started/customization.md
docs/en/get_started/qa.md
docs/en/examples/qwen3-4B.md docs/en/examples/glm4-9B.md docs/en/examples/glm4.5-355B-A32B.md
examples/search-r1 examples/geo3k_vlm
"""
"""Files and folders that users' commands and links name."""
NAMES = """
slime.agent.adapters: AnthropicAdapter OpenAIAdapter
slime.agent.adapters.anthropic: AnthropicAdapter _fold_mid_list_system_into_user _request_session_id
    _tools_to_chat_tools _translate_messages
slime.agent.adapters.common: BaseAdapter Reply Session TurnRecord call_sglang_generate flatten_content
    manager_finish_reason
slime.agent.adapters.openai: OpenAIAdapter _arguments_as_dict _request_session_id _tools_to_chat_tools
    _translate_messages
slime.agent.aiohttp_threaded: FilteredAccessLogger run_app_in_thread
slime.agent.harness: ClaudeCodeHarness CodexHarness HarnessContext
    ClaudeCodeHarness.install_cli
slime.agent.harness.common: install_npm_cli run_agent
slime.agent.parsing: parse_model_output parse_xml_tool_uses
slime.agent.sandbox: E2BSandbox EXIT_TIME_BUDGET_EXCEEDED Sandbox ensure_agent_user exec_and_wait
slime.agent.trajectory: TrajectoryManager _common_prefix_len
slime.backends.megatron_utils.cp_utils: all_gather_with_cp get_sum_of_sample_mean slice_log_prob_with_cp
slime.backends.megatron_utils.hf_checkpoint_saver: save_hf_model_direct_to_path
slime.backends.megatron_utils.hf_to_megatron: load_hf_weights
slime.backends.megatron_utils.initialize: init
slime.backends.megatron_utils.loss: get_log_probs_and_entropy get_responses get_values policy_loss_function
slime.backends.megatron_utils.megatron_to_hf: convert_to_hf remove_padding
slime.backends.megatron_utils.megatron_to_hf.deepseekv3: convert_deepseekv3_to_hf
slime.backends.megatron_utils.megatron_to_hf.glm4: convert_glm4_to_hf
slime.backends.megatron_utils.megatron_to_hf.glm4moe: convert_glm4moe_to_hf
slime.backends.megatron_utils.megatron_to_hf.mimo: convert_mimo_to_hf
slime.backends.megatron_utils.megatron_to_hf.minimax_m2: convert_minimax_m2_to_hf
slime.backends.megatron_utils.megatron_to_hf.qwen2: convert_qwen2_to_hf
slime.backends.megatron_utils.megatron_to_hf.qwen3_5: convert_qwen3_5_to_hf
slime.backends.megatron_utils.megatron_to_hf.qwen3_next: convert_qwen3_next_to_hf
slime.backends.megatron_utils.megatron_to_hf.qwen3moe: convert_qwen3moe_to_hf
slime.backends.megatron_utils.misc_utils: strip_param_name_prefix
slime.backends.megatron_utils.model_provider: get_model_provider_func
slime.backends.megatron_utils.server.arguments: add_megatron_server_arguments configure_megatron_server_args
    validate_megatron_server_args
slime.backends.sglang_utils.arguments: validate_args
slime.backends.sglang_utils.sglang_config: ModelConfig ServerGroupConfig SglangConfig
    SglangConfig.from_yaml
slime.data: RolloutDataSource RolloutDataSourceWithBuffer Sample
slime.observability:
slime.observability.logging_utils: configure_logger finish_tracking init_tracking
slime.observability.metric_utils: compute_rollout_step
slime.observability.rollout_data_utils: load_debug_rollout_data save_debug_rollout_data
    validate_rollout_routed_experts_for_replay
slime.observability.rollout_metrics: _compute_top_p_kept_vocab_metrics
slime.observability.trace_utils: SGLANG_PD_DECODE_SEGMENTS SGLANG_PD_PREFILL_SEGMENTS SGLANG_PD_SUMMARY_KEYS
    SGLANG_TRACE_META_KEYS TRACE_CHILDREN_KEY build_sglang_meta_trace_attrs trace_function trace_span
slime.observability.train_data_utils: save_debug_train_data
slime.ray.buffer: Buffer
slime.ray.placement_group: create_placement_groups
slime.ray.rollout: RolloutManager _compute_top_p_kept_vocab_metrics compute_metrics_from_samples
    compute_perf_metrics_from_samples
    RolloutManager._post_process_rewards RolloutManager._convert_samples_to_train_data
slime.ray.rollout_data_source: RolloutDataSource
slime.ray.train_actor:
slime.ray.utils: NOSET_VISIBLE_DEVICES_ENV_VARS_LIST
slime.rollout._fanout_test_helpers: compact_generate grpo_normalize_by_group_index
slime.rollout.base_types: RolloutFnEvalOutput RolloutFnTrainOutput call_rollout_fn
slime.rollout.data_source: DataSource RolloutDataSource RolloutDataSourceWithBuffer pop_first
slime.rollout.filter_hub.base_types: DynamicFilterOutput MetricGatherer call_dynamic_filter
    should_drop_dynamic_filter_output
slime.rollout.filter_hub.dynamic_sampling_filters: check_reward_nonzero_std check_reward_nonzero_std_with_fallback
slime.rollout.fully_async_rollout: AsyncRolloutWorker GenerateState _generate_rollout_async _get_global_worker
    generate_and_rm_group generate_rollout_fully_async
slime.rollout.on_policy_distillation: post_process_rewards reward_func
slime.rollout.rm_hub: async_rm batched_async_rm extract_boxed_answer get_deepscaler_rule_based_reward
    grade_answer_verl
slime.rollout.rm_hub.deepscaler: get_deepscaler_rule_based_reward
slime.rollout.rm_hub.f1: f1_score normalize_answer
slime.rollout.rm_hub.gpqa: DEFAULT_VALID_LETTERS _extract_letter_from_response compute_gpqa_reward
slime.rollout.rm_hub.math_dapo_utils: compute_score is_correct_minerva is_correct_strict_box last_boxed_only_string
    normalize_final_answer remove_boxed verify
slime.rollout.rm_hub.math_utils: _strip_string extract_answer extract_boxed_answer grade_answer_mathd
    grade_answer_sympy grade_answer_verl last_boxed_only_string mathd_normalize_answer remove_boxed
slime.rollout.sample_hooks: apply_rollout_sample_hooks set_current_rollout_id
slime.rollout.sft_rollout: generate_rollout
slime.rollout.sglang_rollout: EVAL_PROMPT_DATASET GenerateState _prepare_prompt_ids abort eval_rollout
    eval_rollout_single_dataset generate generate_and_rm generate_and_rm_group generate_rollout generate_rollout_async
    get_model_url load_function
slime.rollout.sglang_streaming_rollout: generate_streaming
slime.rollout.sleep_rollout: sleep
slime.utils.accelerator: Accelerator CUDAAccelerator MUSAAccelerator current_device device device_name
    distributed_device_id empty_cache get_accelerator initialize_accelerator is_musa_available memory_allocated
    process_group_backend register_accelerator reset_accelerator resolve_visible_device_id set_accelerator set_device
    synchronize visible_devices_env_key weight_update_backend CUDAAccelerator.is_available MUSAAccelerator.is_available
slime.utils.arguments: parse_args parse_megatron_role_args
slime.utils.async_utils: run
slime.utils.context_utils: with_defer
slime.utils.data: Dataset _parse_generalized_path filter_long_prompt get_minimum_num_micro_batch_size
    process_rollout_data read_file
slime.utils.distributed_utils: get_gloo_group init_gloo_group init_process_group
slime.utils.dp_schedule: build_dp_schedule
slime.utils.external_utils.command_utils: ExecuteTrainConfig convert_checkpoint create_run_id exec_command execute_train
    get_bool_env_var get_default_wandb_args hf_download_dataset
slime.utils.eval_config: EvalDatasetConfig build_eval_dataset_configs
slime.utils.http_utils: _http_client _wrap_ipv6 find_available_port get get_host_info get_rollout_num_engines
    init_http_client post run_router terminate_process
slime.utils.iter_utils: group_by
slime.utils.logging_utils: configure_logger finish_tracking init_tracking log
slime.utils.mask_utils: MultiTurnLossMaskGenerator get_response_lengths
slime.utils.metric_utils: compute_pass_rate compute_rollout_step compute_statistics dict_add_prefix has_repetition
slime.utils.misc: Box SingletonMeta chunk_named_params_by_size decode_int32_meta_array exec_command
    get_current_node_ip group_by load_function should_run_periodic_action
    SingletonMeta.clear_instances
slime.utils.ppo_utils: calculate_log_probs_and_entropy chunked_discounted_returns chunked_gae compute_approx_kl
    compute_cispo_loss compute_gspo_kl compute_opsm_mask compute_policy_loss get_grpo_returns
    get_reinforce_plus_plus_returns vanilla_gae
slime.utils.processing_utils: build_processor_kwargs encode_image_for_rollout_engine load_processor load_tokenizer
    process_vision_info
slime.utils.profile_utils: TrainProfiler
slime.utils.ray_utils: Box
slime.utils.routing_replay: RoutingReplay get_routing_replay_compute_topk register_routing_replay
slime.utils.seqlen_balancing: expand_bins_by_splitting first_fit_pack get_reverse_idx get_seqlen_balanced_partitions
    greedy_partition karmarkar_karp
slime.utils.tensorboard_utils: _TensorboardAdapter
slime.utils.timer: Timer inverse_timer timer
slime.utils.trace_utils: trace_span
slime.utils.tracking_utils: init_tracking
slime.utils.train_dump_utils: save_debug_train_data
slime.utils.types: GenerateState RolloutBatch Sample SampleStatus
    Sample.Status.ABORTED Sample.Status.COMPLETED Sample.Status.PENDING Sample.Status.TRUNCATED
    Sample.PrefixCacheInfo Sample.SpecInfo Sample.Status Sample.from_dict
"""

PARAMETERS = {
    "slime.agent.adapters.common:call_sglang_generate": "prompt_ids, session, body, *, adapter, session_id=None",
    "slime.agent.adapters.openai:_translate_messages": "messages",
    "slime.agent.adapters.openai:_request_session_id": "request, body",
    "slime.agent.adapters.anthropic:_translate_messages": "msgs, system",
    "slime.agent.adapters.anthropic:_tools_to_chat_tools": "anth_tools",
    "slime.agent.adapters.anthropic:_fold_mid_list_system_into_user": "body_obj",
    "slime.agent.adapters.anthropic:_request_session_id": "request",
    "slime.agent.aiohttp_threaded:run_app_in_thread": (
        "app, *, host='127.0.0.1', port=0, thread_name='aiohttp-app', start_timeout_sec=15.0, runner_kwargs=None"
    ),
    "slime.agent.harness.common:run_agent": "sb, *, workdir, start_cmd, env, time_budget_sec",
    "slime.agent.harness.common:install_npm_cli": "sb, *, node_runtime, npm_package, check_cmd",
    "slime.agent.parsing:parse_model_output": ("raw_output, *, tools_schema, tool_parser_name, reasoning_parser_name"),
    "slime.agent.parsing:parse_xml_tool_uses": "body_text, tools_schema",
    "slime.agent.sandbox:E2BSandbox": ("image, *, timeout=None, image_metadata_key=None, rpc_retries=None, size=None"),
    "slime.agent.sandbox:ensure_agent_user": "sb, workdir",
    "slime.agent.sandbox:exec_and_wait": (
        "sb, *, cmd, time_budget_sec, tag, user='root', env=None, workdir=None, out_file=None, want_output=False"
    ),
    "slime.agent.trajectory:_common_prefix_len": "a, b, chunk=4096",
    "slime.backends.megatron_utils.cp_utils:all_gather_with_cp": "tensor, total_length, response_length",
    "slime.backends.megatron_utils.cp_utils:get_sum_of_sample_mean": (
        "total_lengths, response_lengths, loss_masks, sample_denoms=None, calculate_per_token_loss=False"
    ),
    "slime.backends.megatron_utils.cp_utils:slice_log_prob_with_cp": "log_prob, total_length, response_length",
    "slime.backends.megatron_utils.hf_checkpoint_saver:save_hf_model_direct_to_path": (
        "args, output_dir, model, *, model_name=None, quantization_config=None, progress_desc='Save HF checkpoint'"
    ),
    "slime.backends.megatron_utils.hf_to_megatron:load_hf_weights": "args, model, path",
    "slime.backends.megatron_utils.initialize:init": "args",
    "slime.backends.megatron_utils.megatron_to_hf:convert_to_hf": (
        "args, model_name, name, param, quantization_config=None, transform_ue8m0=True"
    ),
    "slime.backends.megatron_utils.megatron_to_hf:remove_padding": "name, param, vocab_size",
    "slime.backends.megatron_utils.megatron_to_hf.qwen2:convert_qwen2_to_hf": "args, name, param",
    "slime.backends.megatron_utils.misc_utils:strip_param_name_prefix": "name",
    "slime.backends.megatron_utils.model_provider:get_model_provider_func": "args, role='actor'",
    "slime.backends.sglang_utils.arguments:validate_args": "args",
    "slime.rollout._fanout_test_helpers:compact_generate": "args, sample, sampling_params",
    "slime.rollout._fanout_test_helpers:grpo_normalize_by_group_index": "args, samples",
    "slime.rollout.sglang_rollout:eval_rollout_single_dataset": "args, rollout_id, dataset_cfg",
    "slime.utils.accelerator:register_accelerator": (
        "name, factory, is_available=None, priority=0, communication_backends=()"
    ),
    "slime.utils.accelerator:process_group_backend": "default='nccl'",
    "slime.utils.accelerator:weight_update_backend": "default='nccl'",
    "slime.utils.accelerator:device": "index=None",
    "slime.utils.accelerator:memory_allocated": "device_arg=None",
    "slime.utils.accelerator:resolve_visible_device_id": "physical_device_id",
    "slime.utils.arguments:parse_megatron_role_args": "base_args, megatron_config_path, role",
    "slime.utils.data:process_rollout_data": "args, rollout_data_ref, dp_rank, dp_size",
    "slime.utils.distributed_utils:init_process_group": (
        "backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, group_name=None, "
        "pg_options=None"
    ),
    "slime.utils.data:_parse_generalized_path": "text",
    "slime.utils.data:filter_long_prompt": "origin_samples, tokenizer, processor, max_length",
    "slime.utils.data:get_minimum_num_micro_batch_size": "total_lengths, max_tokens_per_gpu",
    "slime.utils.data:read_file": "path",
    "slime.utils.misc:chunk_named_params_by_size": "named_params, chunk_size",
    "slime.utils.misc:get_free_port": "start_port=10000, consecutive=1",
    "slime.utils.misc:group_by": "iterable, key=None",
    "slime.utils.http_utils:run_router": "args",
    "slime.utils.routing_replay:get_routing_replay_compute_topk": "old_compute_topk",
    "slime.utils.routing_replay:register_routing_replay": "module",
    "slime.utils.timer:inverse_timer": "name",
}


def modules() -> dict[str, list[str]]:
    """Module -> names. An indented line continues the line before it."""
    lines = NAMES.strip().replace("\n    ", " ").splitlines()
    return {module: names.split() for module, _, names in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("module", modules())
def test_public_names_can_be_imported(module):
    from slime.backends.megatron_utils.patches import install

    install()  # the module of a model's router imports megatron.core, as the trainer does after this call
    loaded = importlib.import_module(module)
    missing = []
    for name in modules()[module]:
        target = loaded
        for part in name.split("."):
            target = getattr(target, part, missing)
        if target is missing:
            missing.append(name)
    assert missing == []


@pytest.mark.parametrize("path", PARAMETERS)
def test_parameters_are_as_promised(path):
    module, _, name = path.partition(":")
    parameters, saw_keyword_only = [], False
    for p in inspect.signature(getattr(importlib.import_module(module), name)).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not saw_keyword_only:
            parameters.append("*")
            saw_keyword_only = True
        parameters.append(p.name + ("" if p.default is p.empty else f"={p.default!r}"))
    assert ", ".join(parameters) == PARAMETERS[path]


def test_agents_import_without_the_engines_and_without_transformers():
    heavy = ("transformers", "sglang", "ray", "megatron", "wandb", "e2b")
    code = "import sys, slime.agent.adapters, slime.agent.harness, slime.utils.types\n"
    code += f"print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_script_imports_the_functions_of_a_conversion_before_it_calls_init():
    paths = {path: names for path, names in modules().items() if path.startswith("slime.backends.megatron_utils.")}
    code = "\n".join(f"from {path} import {', '.join(names)}" for path, names in paths.items())
    code += "\nimport sys\nprint('megatron.core' in sys.modules)"  # init has to patch it before
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_timer_of_plugins_adds_up_and_can_leave_a_part_out():
    from slime.utils.context_utils import with_defer
    from slime.utils.timer import Timer, inverse_timer, timer

    Timer().reset()
    ended = []

    @with_defer(lambda: ended.append(True))
    @timer
    def work() -> int:
        return 1

    with timer("outer"):
        assert work() == 1
        with inverse_timer("outer"):
            assert Timer()._started == {}
    assert set(Timer().log_dict()) == {"outer", "work"}
    assert ended == [True]
    with pytest.raises(AssertionError, match="not running"):
        Timer().end("outer")
    Timer().reset()


def test_named_parameters_are_cut_into_chunks_of_a_size_and_items_into_groups():
    import torch

    from slime.utils.misc import chunk_named_params_by_size, group_by

    tensors = [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in (3, 3, 9, 1, 1)]
    chunks = [[tensor.numel() for _, tensor in chunk] for chunk in chunk_named_params_by_size(iter(tensors), 6)]
    assert chunks == [[3, 3], [9], [1, 1]]
    assert group_by([1, 2, 3, 1], key=lambda value: value % 2) == {1: [1, 3, 1], 0: [2]}
    assert group_by("aba") == {"a": ["a", "a"], "b": ["b"]}


def test_this_hosts_address_can_be_given_and_ports_are_free(monkeypatch):
    import socket

    from slime.utils.http_utils import _wrap_ipv6, find_available_port, get_host_info, is_port_available
    from slime.utils.misc import get_free_port

    monkeypatch.setenv("SLIME_HOST_IP", "10.1.2.3")
    assert get_host_info() == (socket.gethostname(), "10.1.2.3")
    monkeypatch.delenv("SLIME_HOST_IP")
    assert socket.getaddrinfo(get_host_info()[1], None)
    assert (_wrap_ipv6("::1"), _wrap_ipv6("10.0.0.1")) == ("[::1]", "10.0.0.1")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not is_port_available(port)
        assert get_free_port(port) > port
    assert is_port_available(find_available_port(20000))
    assert 64000 <= get_free_port(64000, consecutive=3) <= 65533


def test_fan_out_rewards_are_relative_to_their_group():
    from types import SimpleNamespace

    from slime.data.sample import Sample
    from slime.rollout._fanout_test_helpers import grpo_normalize_by_group_index

    samples = [Sample(group_index=g, reward=r) for g, r in ((0, 1.0), (0, 0.0), (1, 5.0), (1, 5.0), (1, 5.0))]
    raw, centered = grpo_normalize_by_group_index(
        SimpleNamespace(grpo_std_normalization=False, reward_key=None), samples
    )
    assert raw == [1.0, 0.0, 5.0, 5.0, 5.0]
    assert centered == [0.5, -0.5, 0.0, 0.0, 0.0]


def test_the_files_and_folders_that_users_name_exist():
    root = Path(__file__).resolve().parents[2]
    assert [path for path in PATHS.split() if not (root / path).exists()] == []
    assert len(list((root / "examples").glob("*/run_tiny.py"))) >= 14
