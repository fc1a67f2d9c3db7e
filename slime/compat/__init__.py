"""Aliases of module paths that plugins import, for names that are defined in other modules.

``ALIASES`` is the only list of them. ``slime/__init__.py`` installs the finder, so
``from slime.utils.types import Sample`` works without a file ``slime/utils/types.py``. Each name is imported on first
use. Modules of slime itself never import an alias (``tests/architecture``).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# A line at the margin is a module path. The indented lines below it are ``origin: name`` or ``origin: alias=name``.
# ``path = other.path`` makes both paths the same module object. A path without names is an empty package.
ALIASES = """
slime.utils.arguments
    slime.config.roles: parse_megatron_role_args
    slime.ray.arguments: parse_args
slime.utils.context_utils
    slime.compat.measures: with_defer
slime.utils.data
    slime.batch.balance: get_minimum_num_micro_batch_size=count_micro_batches
    slime.data.prompts: Dataset filter_long_prompt
    slime.data.rows: read_file
    slime.utils.prompt_sources: _parse_generalized_path=parse_path
    slime.ray.shards: process_rollout_data
slime.utils.dp_schedule
    slime.batch.schedule: build_dp_schedule
slime.utils.eval_config
    slime.rollout.eval_config: EvalDatasetConfig build_eval_dataset_configs
slime.utils.flops_utils
    slime.models.cost: calculate_fwd_flops
slime.utils.iter_utils
    slime.utils.misc: group_by
slime.utils.logging_utils
    slime.observability.logging_utils: configure_logger finish_tracking init_tracking log
slime.utils.mask_utils
    slime.data.loss_masks: MultiTurnLossMaskGenerator get_response_lengths
slime.utils.metric_utils
    slime.observability.metric_utils: compression_ratio compute_pass_rate compute_rollout_step compute_statistics
    slime.observability.metric_utils: dict_add_prefix has_repetition
slime.utils.ppo_utils
    slime.algorithms.policy_loss: compute_cispo_loss=cispo_loss
    slime.algorithms.ppo: compute_policy_loss=clipped_surrogate
    slime.algorithms.compat: calculate_log_probs_and_entropy compute_gspo_kl compute_opsm_mask
    slime.algorithms.compat: get_advantages_and_returns_batch get_grpo_returns
    slime.algorithms.compat: get_reinforce_plus_plus_baseline_advantages get_reinforce_plus_plus_returns
    slime.algorithms.ppo: chunked_discounted_returns chunked_gae vanilla_gae
    slime.algorithms.policy_loss: compute_approx_kl=approx_kl
slime.utils.processing_utils
    slime.data.processing: load_tokenizer
    slime.data.processing: DEFAULT_PATCH_SIZE build_processor_kwargs encode_image_for_rollout_engine load_processor
    slime.data.processing: process_vision_info
slime.utils.profile_utils
    slime.observability.profile_utils: TrainProfiler
slime.utils.ray_utils
    slime.ray.shards: Box
slime.utils.routing_replay
    slime.backends.megatron_utils.model.routing_replay: RoutingReplay get_routing_replay_compute_topk
    slime.backends.megatron_utils.model.routing_replay: register_routing_replay
slime.utils.seqlen_balancing
    slime.batch.balance: expand_bins_by_splitting first_fit_pack get_seqlen_balanced_partitions karmarkar_karp
    slime.batch.balance: get_reverse_idx greedy_partition
slime.utils.tensorboard_utils = slime.compat.measures
slime.utils.timer
    slime.compat.measures: Timer inverse_timer timer
slime.utils.trace_utils
    slime.observability.trace_utils: TRACE_CHILDREN_KEY TRACE_VERSION TraceHandle TraceSpanContext bind_trace
    slime.observability.trace_utils: bind_trace_carrier build_sglang_meta_trace_attrs export_trace import_trace
    slime.observability.trace_utils: trace_event trace_function trace_next_attempt trace_span
slime.utils.tracking_utils
    slime.observability.logging_utils: configure_logger finish_tracking init_tracking log
slime.utils.train_dump_utils
    slime.data.dump_file: save_debug_train_data
slime.observability.train_data_utils
    slime.data.dump_file: save_debug_train_data
slime.utils.train_metric_utils
    slime.observability.train_metric_utils: gather_and_reduce_log_dict reduce_train_step_metrics
    slime.observability.train_metric_utils: rollout_log_metric_contribution
slime.utils.types
    slime.data.columns: RolloutBatch=TrainData
    slime.data.processing: MultimodalType MultimodalTypes
    slime.data.sample: Sample SampleGroup SampleStatus iter_samples
    slime.rollout.sglang_rollout: GenerateState
slime.ray.buffer
    slime.rollout.data_source: Buffer=RolloutDataSourceWithBuffer
slime.ray.rollout_data_source
    slime.rollout.data_source: RolloutDataSource RolloutDataSourceWithBuffer
slime.backends.megatron_utils.hf_checkpoint_saver
    slime.backends.megatron_utils.conversion: save_hf_model_direct_to_path
slime.backends.megatron_utils.hf_to_megatron
    slime.backends.megatron_utils.conversion: load_hf_weights
slime.backends.megatron_utils.initialize
    slime.backends.megatron_utils.conversion: init
slime.backends.megatron_utils.megatron_to_hf
    slime.backends.megatron_utils.conversion: convert_to_hf remove_padding
slime.backends.megatron_utils.megatron_to_hf.deepseekv3
    slime.backends.megatron_utils.conversion: convert_deepseekv3_to_hf=convert_tensor_to_hf
slime.backends.megatron_utils.megatron_to_hf.glm4
    slime.backends.megatron_utils.conversion: convert_glm4_to_hf=convert_tensor_to_hf
slime.backends.megatron_utils.megatron_to_hf.glm4moe
    slime.backends.megatron_utils.conversion: convert_glm4moe_to_hf=convert_tensor_to_hf
slime.backends.megatron_utils.megatron_to_hf.mimo
    slime.backends.megatron_utils.conversion: convert_mimo_to_hf=convert_tensor_to_hf
slime.backends.megatron_utils.megatron_to_hf.minimax_m2
    slime.backends.megatron_utils.conversion: convert_minimax_m2_to_hf=convert_tensor_to_hf
slime.backends.megatron_utils.megatron_to_hf.qwen2
    slime.backends.megatron_utils.conversion: convert_qwen2_to_hf=convert_tensor_to_hf
slime.backends.megatron_utils.megatron_to_hf.qwen3_5
    slime.backends.megatron_utils.conversion: convert_qwen3_5_to_hf=convert_tensor_to_hf
slime.backends.megatron_utils.megatron_to_hf.qwen3_next
    slime.backends.megatron_utils.conversion: convert_qwen3_next_to_hf=convert_tensor_to_hf
slime.backends.megatron_utils.megatron_to_hf.qwen3moe
    slime.backends.megatron_utils.conversion: convert_qwen3moe_to_hf=convert_tensor_to_hf
slime.backends.megatron_utils.misc_utils
    slime.backends.megatron_utils.conversion: strip_param_name_prefix
slime.backends.megatron_utils.model_provider
    slime.backends.megatron_utils.conversion: get_model_provider_func
slime.backends.megatron_utils.alignment
slime.backends.megatron_utils.alignment.deepgemm_forward = slime.backends.megatron_utils.precision
slime.backends.megatron_utils.alignment.deepgemm_moe_forward
    slime.backends.megatron_utils.precision: enable_deepgemm_moe_forward=enable_deepgemm_all_forward
slime.backends.sglang_utils.arguments
    slime.backends.sglang_utils.namespace: EngineArgs
    slime.ray.arguments: validate_args=validate_sglang_args
slime.observability.rollout_data_utils
    slime.data.dump_file: load_debug_rollout_data save_debug_rollout_data
    slime.data.engine_meta: validate_rollout_routed_experts_for_replay
slime.ray.utils
    slime.ray.run.cluster: NOSET_VISIBLE_DEVICES_ENV_VARS_LIST
slime.rollout.filter_hub
slime.rollout.filter_hub.base_types = slime.rollout.base_types
slime.rollout.filter_hub.dynamic_sampling_filters = slime.rollout.base_types
slime.rollout.sleep_rollout = slime.rollout.forge_load
slime.rollout.rm_hub.deepscaler = slime.rollout.rm_hub.rules
slime.rollout.rm_hub.f1 = slime.rollout.rm_hub.rules
slime.rollout.rm_hub.gpqa = slime.rollout.rm_hub.rules
slime.rollout.sample_hooks = slime.rollout.custom_generate
slime.rollout.rm_hub.math_dapo_utils = slime.rollout.rm_hub.rules
slime.rollout._fanout_test_helpers = slime.testing.fakes
slime.agent.aiohttp_threaded = slime.agent.service
slime.agent.harness.common = slime.agent.harness
slime.utils.external_utils
slime.utils.external_utils.command_utils = slime.compat.command_utils
slime.observability.tensorboard_utils = slime.compat.measures
slime.observability.train_metric_utils = slime.compat.measures
slime.observability.timer = slime.compat.measures
"""


class _AliasModule(ModuleType):
    """A module whose attributes are imported from their origins on first use."""

    def __getattr__(self, name: str) -> Any:
        # .get: the import system reads attributes such as __path__ before exec_module has set _origins
        origin = self.__dict__.get("_origins", {}).get(name)
        if origin is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = pkgutil.resolve_name(origin)
        setattr(self, name, value)  # the next access does not reach __getattr__
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__dict__["_origins"]})


class AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and creates the modules of ``ALIASES``.

    Attributes:
        names: module path -> {name: "origin:attribute"}.
        same: module path -> path of the module object that it aliases.
    """

    def __init__(self, table: str) -> None:
        self.names: dict[str, dict[str, str]] = {}
        self.same: dict[str, str] = {}
        origins: dict[str, str] = {}
        for line in filter(None, table.splitlines()):
            if line.startswith(" "):
                origin, _, names = line.strip().partition(": ")
                for alias, _, name in (word.partition("=") for word in names.split()):
                    origins[alias] = f"{origin}:{name or alias}"
            elif " = " in line:
                path, _, other = line.partition(" = ")
                self.same[path] = other
            else:
                origins = self.names.setdefault(line, {})

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.names and fullname not in self.same:
            return None
        # Without the package flag the import of a submodule fails: "... is not a package".
        is_package = any(other.startswith(f"{fullname}.") for other in (*self.names, *self.same))
        return importlib.util.spec_from_loader(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name in self.same:
            module = importlib.import_module(self.same[spec.name])
            spec.loader_state = module.__spec__  # for exec_module
            return module
        return _AliasModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if not isinstance(module, _AliasModule):
            # The import system has put the alias's spec on the shared module object: restore its real one.
            assert module.__spec__ is not None
            module.__spec__ = module.__spec__.loader_state
            return
        origins = self.names[module.__name__]
        module.__dict__.update(_origins=origins, __all__=sorted(origins))


def install() -> None:
    """Put the finder first on ``sys.meta_path``, once per process."""
    if not any(type(finder).__name__ == AliasFinder.__name__ for finder in sys.meta_path):
        # First: an updated checkout keeps the folder of a removed package, with its __pycache__, which the finder of
        # files would take for a namespace package. Compared by name above, because a reload creates a new class.
        sys.meta_path.insert(0, AliasFinder(ALIASES))
