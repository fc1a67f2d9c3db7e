"""The extension points: one Protocol each, and the table of the flags that name functions for them.

A flag's value is a path for :func:`slime.hooks.load_function`. The signatures are checked at start-up
(:func:`slime.hooks.check_hooks`) and tested against the snippets of ``docs/en/get_started/customization.md``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from slime.data.sample import Sample, SampleGroup

Reward: TypeAlias = "float | dict[str, Any]"
Role: TypeAlias = Literal["generate", "reward", "rollout", "filter", "data_source", "other"]


class RolloutFunction(Protocol):
    """Makes one batch of training data, or evaluates. Replaces everything between Data Buffer and trainer."""

    def __call__(self, args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any: ...


class CustomGenerate(Protocol):
    """Generates one sample: fills tokens, response, response_length, log-probs, status, perhaps the reward.

    A list of samples is allowed: several training rows made by one execution, with the same ``rollout_id``.
    A parameter ``evaluation`` is passed when the function has one. With a second parameter that is called ``samples``
    or annotated with a list, it generates all samples of a prompt in one call.
    """

    def __call__(
        self, args: Namespace, sample: Sample, sampling_params: dict[str, Any]
    ) -> Awaitable[Sample | list[Sample]] | Sample | list[Sample]: ...


class CustomReward(Protocol):
    """Scores one sample. With a parameter ``samples``, or under ``--group-rm``, it scores a list of them.

    Also accepted: a class with ``compute_reward(prompts, responses[, labels])``.
    """

    def __call__(self, args: Namespace, sample: Any, **kwargs: Any) -> Awaitable[Any] | Any: ...


class DynamicFilter(Protocol):
    """Keeps or drops a finished group: a bool or a ``DynamicFilterOutput``."""

    def __call__(self, args: Namespace, samples: SampleGroup, **kwargs: Any) -> Any: ...


class BufferFilter(Protocol):
    """Chooses which buffered groups are drawn next, and removes them from ``buffer``."""

    def __call__(
        self, args: Namespace, rollout_id: int | None, buffer: list[SampleGroup], num_samples: int
    ) -> list[SampleGroup]: ...


class DataSourceLike(Protocol):
    """Hands out prompts, one group per prompt, and takes groups back.

    Made with ``(args)``, with ``(dataset, args)``, or with nothing and given an attribute ``args``.
    """

    def get_samples(self, num_samples: int) -> list[SampleGroup]: ...
    def add_samples(self, samples: list[SampleGroup]) -> None: ...
    def save(self, rollout_id: int) -> None: ...
    def load(self, rollout_id: int | None = None) -> None: ...
    def __len__(self) -> int: ...


class SampleHook(Protocol):
    """Sees every sample between generation and reward. May change it in place or return another one."""

    def __call__(
        self, args: Namespace, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False
    ) -> Awaitable[Sample | None] | Sample | None: ...


class SampleFilter(Protocol):
    """Marks samples of the accepted groups with ``remove_sample``, in place."""

    def __call__(self, args: Namespace, groups: list[SampleGroup]) -> None: ...


class ProcessAllSamples(Protocol):
    """Sees every finished group, dropped ones too."""

    def __call__(self, args: Namespace, all_groups: list[SampleGroup], data_source: Any) -> None: ...


class RewardPostProcess(Protocol):
    """Replaces reward normalization: ``(raw rewards, rewards)``, one entry per sample."""

    def __call__(self, args: Namespace, samples: list[Sample]) -> tuple[Sequence[float], Sequence[float]]: ...


class ConvertSamples(Protocol):
    """Replaces the conversion of samples to training columns."""

    def __call__(self, args: Namespace, samples: list[Sample]) -> dict[str, Any]: ...


class LogRollout(Protocol):
    """Sees the finished samples of a rollout, in the process of the rollout manager. A true result: no other metrics.

    Log with ``slime.observability.logging_utils.log(args, metrics, step_key="rollout/step")``.
    """

    def __call__(
        self,
        rollout_id: int,
        args: Namespace,
        samples: list[Sample],
        rollout_extra_metrics: dict[str, Any] | None,
        rollout_time: float,
    ) -> bool | None: ...


class LogEvalRollout(Protocol):
    """The same for an evaluation: ``data`` maps a data set to its rewards, truncated flags and samples."""

    def __call__(
        self, rollout_id: int, args: Namespace, data: dict[str, Any], extra_metrics: dict[str, Any] | None
    ) -> bool | None: ...


class MegatronInit(Protocol):
    """Called on every trainer rank once the process groups exist, before the model is built."""

    def __call__(self, args: Namespace) -> None: ...


class ModelProvider(Protocol):
    """Builds a rank's part of the model. A parameter that the function does not have is not passed.

    ``config`` is Megatron's ``TransformerConfig``, ``vp_stage`` the virtual pipeline stage or None.
    """

    def __call__(
        self, *, pre_process: bool, post_process: bool, vp_stage: int | None, config: Any, args: Namespace
    ) -> Any: ...


class BeforeLogProb(Protocol):
    """Called before every pass that computes log-probs or values.

    ``model`` is the list of model chunks. ``store_prefix`` is ``""``, ``"ref_"`` or ``"teacher_"``.
    """

    def __call__(self, args: Namespace, model: list[Any], store_prefix: str) -> None: ...


class BeforeTrainStep(Protocol):
    """Called before every optimizer step, when its gradients are zero."""

    def __call__(
        self, args: Namespace, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, scheduler: Any
    ) -> None: ...


class CustomLoss(Protocol):
    """The objective of ``--loss-type custom_loss``: (scalar loss, metrics).

    ``batch`` holds one micro-batch: packed ``tokens`` ``[1, T]``, and lists with one entry per sample (``loss_masks``,
    ``log_probs``, ``advantages``, ...), or None. ``logits`` are fp32 ``[1, T, V / tensor ranks]``.
    ``sum_of_sample_mean`` turns the response tokens' values ``[N]`` into the sum over rollouts of their means. Under
    context parallelism tokens, logits and per-token values are this rank's part; lengths, masks and
    ``unconcat_tokens`` are whole. The function returns this rank's part of the loss and metrics: both are summed.
    """

    def __call__(
        self, args: Namespace, batch: dict[str, Any], logits: Any, sum_of_sample_mean: Any
    ) -> tuple[Any, dict[str, Any]]: ...


class CustomAdvantage(Protocol):
    """Sets ``rollout_data["advantages"]`` and ``["returns"]``: one tensor per sample with a value per response token.

    ``rollout_data`` is the rank's batch with every log-prob that is known. Distillation and normalization follow.
    """

    def __call__(self, args: Namespace, rollout_data: dict[str, Any]) -> None: ...


class CustomTis(Protocol):
    """Weights the policy-gradient term by trainer / engine: (pg_loss, loss masks, metrics).

    ``pg_loss`` is flat, one value per response token. The others are lists with one entry per sample, whole responses.
    Metrics map a name to a flat tensor like ``pg_loss``, the same names on every call.
    """

    def __call__(
        self,
        args: Namespace,
        *,
        pg_loss: Any,
        train_log_probs: list[Any],
        rollout_log_probs: list[Any],
        loss_masks: list[Any],
        total_lengths: list[int],
        response_lengths: list[int],
    ) -> tuple[Any, list[Any], dict[str, Any]]: ...


class RolloutDataPostprocess(Protocol):
    """Sees a training rank's batch once its log-probs and advantages are known, before the first step.

    May change it in place. ``(args, rollout_data)`` is accepted as well.
    """

    def __call__(self, args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None: ...


class CustomPgLossReducer(Protocol):
    """Makes the function that reduces the flat policy-gradient term of one micro-batch to a scalar."""

    def __call__(
        self,
        total_lengths: list[int],
        response_lengths: list[int],
        loss_masks: list[Any],
        calculate_per_token_loss: bool,
    ) -> Any: ...


class UpdateWeightPostWrite(Protocol):
    """Runs on every trainer rank when a version of the weights has been written, before any engine loads it.

    ``rollout_engines`` are the Ray actors of the engines that will load ``version_dir``.
    """

    def __call__(self, args: Namespace, version_dir: str, rollout_engines: list[Any]) -> None: ...


@dataclass(frozen=True)
class Hook:
    """One flag that names a function.

    Attributes:
        dest: attribute of ``args`` that holds the path (a list of paths if the flag may be repeated).
        protocol: signature that the function must have.
        signatures: accepted calls separated by ``|``, as parameter names: ``*name`` is passed by keyword, ``?name`` by
            keyword if the function has such a parameter. One must fit.
        role: decides which name is taken from a path that is only a file.
        is_awaited: the function may be async.
    """

    dest: str
    protocol: type
    signatures: str
    role: Role = "other"
    is_awaited: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.dest.replace("_", "-")

    @property
    def calls(self) -> list[list[str]]:
        return [call.split() for call in self.signatures.split("|")]


_ROLLOUT = "args rollout_id data_source *evaluation"
_GENERATE = "args sample sampling_params ?evaluation | args samples ?sampling_params ?evaluation"
_REWARD = "args sample | *prompts *responses ?labels ?samples ?metadata ?args"
_TIS = "args *pg_loss *train_log_probs *rollout_log_probs *loss_masks *total_lengths *response_lengths"

HOOKS: tuple[Hook, ...] = (
    Hook("rollout_function_path", RolloutFunction, _ROLLOUT, "rollout"),
    Hook("eval_function_path", RolloutFunction, _ROLLOUT, "rollout"),
    Hook("custom_generate_function_path", CustomGenerate, _GENERATE, "generate", is_awaited=True),
    # A model that scores a batch gets plain lists by name, one that scores a sample gets ``args`` first.
    Hook("custom_rm_path", CustomReward, _REWARD, "reward", is_awaited=True),
    Hook("dynamic_sampling_filter_path", DynamicFilter, "args samples", "filter"),
    Hook("buffer_filter_path", BufferFilter, "args rollout_id buffer num_samples | args buffer num_samples", "filter"),
    # The last form is a call without arguments.
    Hook("data_source_path", DataSourceLike, "args | dataset args |", "data_source"),
    Hook("rollout_sample_hook_path", SampleHook, "args sample ?rollout_id ?evaluation", is_awaited=True),
    Hook("rollout_sample_filter_path", SampleFilter, "args groups", "filter"),
    Hook("rollout_all_samples_process_path", ProcessAllSamples, "args all_groups data_source"),
    Hook("custom_reward_post_process_path", RewardPostProcess, "args samples"),
    Hook("custom_convert_samples_to_train_data_path", ConvertSamples, "args samples"),
    Hook("custom_rollout_log_function_path", LogRollout, "rollout_id args samples rollout_extra_metrics rollout_time"),
    Hook("custom_eval_rollout_log_function_path", LogEvalRollout, "rollout_id args data extra_metrics"),
    # All by keyword: a provider takes the parameters that it needs.
    Hook("custom_model_provider_path", ModelProvider, "?pre_process ?post_process ?vp_stage ?config ?args"),
    Hook("custom_megatron_init_path", MegatronInit, "args"),
    Hook("custom_megatron_before_log_prob_hook_path", BeforeLogProb, "args model store_prefix"),
    Hook(
        "custom_megatron_before_train_step_hook_path",
        BeforeTrainStep,
        "args rollout_id step_id model optimizer scheduler",
    ),
    Hook("custom_loss_function_path", CustomLoss, "args batch logits sum_of_sample_mean"),
    Hook("custom_advantage_function_path", CustomAdvantage, "args rollout_data"),
    Hook("custom_tis_function_path", CustomTis, _TIS),
    Hook("rollout_data_postprocess_path", RolloutDataPostprocess, "args rollout_id rollout_data | args rollout_data"),
    Hook(
        "custom_pg_loss_reducer_function_path",
        CustomPgLossReducer,
        "total_lengths response_lengths loss_masks calculate_per_token_loss",
    ),
    Hook("custom_update_weight_post_write_path", UpdateWeightPostWrite, "args version_dir rollout_engines"),
)
