"""The rollout manager: the Ray actor that owns engines and router, runs the user's rollout function with the Data
Buffer, and sends the shards of the returned groups to the trainer. It knows only the layout of the trainer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from slime.config.groups import RunConfig, from_args
from slime.data.dump_file import load_debug_rollout_data, save_debug_rollout_data, save_tokenizer
from slime.data.sample import iter_samples
from slime.hooks import load_function, load_optional
from slime.observability.logging_utils import collecting, configure_logger
from slime.observability.rollout_metrics import (
    _compute_top_p_kept_vocab_metrics,
    compute_metrics_from_samples,
    compute_perf_metrics_from_samples,
    log_eval_rollout_data,
    log_rollout_data,
    mean_reward,
)
from slime.observability.trace_export import FinishedSamples
from slime.ray.data_buffer import DataBufferClient
from slime.ray.engines.http_workers import HttpWorkers, are_wanted, start_http_workers
from slime.ray.engines.servers import RolloutServers
from slime.ray.journal import Entry, Journal
from slime.ray.placement_group import GpuSlots
from slime.ray.run.cluster import worker_env
from slime.ray.shards import RolloutResult, actor_options, boxed
from slime.ray.watch.heartbeat import register_process
from slime.rollout.base_types import Count, call_rollout_fn
from slime.rollout.custom_generate import samples_of, set_current_rollout_id, set_evaluated_rollout_id
from slime.rollout.rm_hub.grader_pool import preload_graders
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.async_utils import exits_are_errors

logger = logging.getLogger(__name__)

_FAULT = "slime_plugins.ci_test.StopFirstEngine"

__all__ = [
    "RolloutManager",
    # users' programs import these from here
    "_compute_top_p_kept_vocab_metrics",
    "compute_metrics_from_samples",
    "compute_perf_metrics_from_samples",
    "create_rollout_manager",
]

P = ParamSpec("P")
T = TypeVar("T")

# Concurrent: a rollout, an evaluation, a call to the engines, under_way(), await_journal(), and dispose(), which must
# not wait for them.
_CALLS = 6


@exits_are_errors
class RolloutManager:
    """Body of the actor."""

    __ray_metadata__: Any

    def __init__(self, config: RunConfig, slots: GpuSlots, data_buffer: DataBufferClient) -> None:
        configure_logger(" rollout")
        register_process("the rollout manager", config.args.heartbeat_timeout)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._config = config
        self._args = config.args
        self._slots = slots
        self._data_buffer = data_buffer
        self._servers: RolloutServers | None = None
        self._http_workers: HttpWorkers | None = None
        self._finished = FinishedSamples(config)
        self._journal = Journal.of(config)
        self._inject_fault: Any = None

    def start(self) -> None:
        """Start router and engines, load the user's functions meanwhile, and return when the engines answer."""
        # Not in the constructor, where Ray would report an error as the death of an actor.
        from slime.batch.ship import Shipper  # not above: the driver does without torch

        args = self._args
        if not args.debug_train_only:
            self._servers = RolloutServers(self._config, self._slots)
            if self._servers.awaits_engines:
                self._servers.await_engines()  # before GenerateState: their number limits the concurrent requests
            if are_wanted(is_asked_for=args.use_distributed_post, replays_experts=args.use_rollout_routing_replay):
                self._http_workers = start_http_workers(self._config)
            preload_graders(args.rm_type)
            GenerateState(args)  # loads the tokenizer while the engines start
        save_tokenizer(args.dump_details, args.hf_checkpoint)
        self._rollout_function = load_function(args.rollout_function_path, "rollout")
        self._keeps_prompts = getattr(self._rollout_function, "keeps_prompts", False)
        self._eval_function = load_function(args.eval_function_path, "rollout")
        post_process = load_optional(args.custom_reward_post_process_path)
        convert = load_optional(args.custom_convert_samples_to_train_data_path)
        self._shipper = Shipper(self._config, post_process, convert)
        self._log_rollout = load_optional(args.custom_rollout_log_function_path)
        self._log_eval = load_optional(args.custom_eval_rollout_log_function_path)
        if args.ci_test and args.use_fault_tolerance:
            self._inject_fault = load_function(_FAULT)()
        if self._servers is not None:
            self._config = self._config.with_facts(routers=self._servers.wait_ready())
            if args.check_weight_update_equal and not args.debug_rollout_only:
                # random weights: only a complete sync can make them right again
                self._servers.fleet.start("reset_weights").wait(args.weight_sync_timeout)
        if self._http_workers is not None:
            self._http_workers.wait_ready(args.engine_start_timeout)

    def on_engines(self, method: Callable[Concatenate[RolloutServers, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of ``method(servers, ...)``, for the driver (``RemoteEngines.call``)."""
        assert self._servers is not None, "there are no engines"
        return method(self._servers, *args, **kwargs)

    def begin(self, first: int) -> int | None:
        """Start at rollout ``first``.

        Returns:
            The first rollout to generate: those before it are in the journal. None without a journal.
        """
        first_new = None if self._journal is None else self._journal.begin(first)
        self._finished.begin(first if first_new is None else first_new)
        return first_new

    def await_journal(self, rollout_id: int) -> None:
        """Wait until the journal has the rollout."""
        if self._journal is not None:
            self._journal.wait(rollout_id)

    def generate(self, rollout_id: int, saves_state: bool = False, version: str | None = None) -> RolloutResult:
        """Generate one rollout: prompts -> groups of scored samples -> shards.

        Args:
            saves_state: save the Data Buffer's state after this rollout, for the checkpoint that follows.
            version: of the weights that the engines serve.
        """
        set_current_rollout_id(rollout_id)
        if self._inject_fault is not None and self._servers is not None:
            self._inject_fault(rollout_id, self._servers.all_engines())
        started = time.monotonic()
        rollout, is_new = self._rollout(rollout_id, saves_state, version)
        groups, metrics = rollout.groups, rollout.metrics
        samples = list(iter_samples(groups))
        save_debug_rollout_data(self._args.save_debug_rollout_data, samples, rollout_id=rollout_id, evaluation=False)
        self._finished.write(samples, rollout_id, "rollout")
        seconds = time.monotonic() - started
        metrics = log_rollout_data(rollout_id, self._args, samples, metrics, seconds, self._log_rollout)
        rewards = [s.reward.get(self._args.reward_key) if isinstance(s.reward, dict) else s.reward for s in samples]
        metrics = mean_reward(rewards) | metrics  # what the trainer reports replaces it
        result = RolloutResult.of(samples, metrics)
        if self._args.debug_rollout_only:
            return result
        shipment = self._shipper.ship(rollout_id, groups)
        metrics["rollout/dropped_samples"] = float(shipment.num_dropped_samples)
        num_passing = shipment.cost()
        if num_passing is not None:
            metrics["rollout/unique_token_share"] = num_passing / shipment.num_tokens
        return replace(
            result,
            shards=boxed(shipment.ranks, self._args.rollout_data_transport),
            metrics=metrics,
            version=None if is_new else rollout.newest,
            oldest_version=None if is_new else rollout.version,
            num_tokens=sum(shipment.total_lengths),
            forward_flops=shipment.forward_flops(self._args.hf_checkpoint),
        )

    def _rollout(self, rollout_id: int, saves_state: bool, version: str | None) -> tuple[Entry, bool]:
        """A rollout, and whether it was generated now. If not, an earlier start of the run finished it."""
        known = None if self._journal is None else self._journal.take(rollout_id)
        if known is not None:
            logger.info("rollout %d was finished before the last start ended: it is not generated again", rollout_id)
            return known, False
        entry = Entry(*self._groups(rollout_id), version)
        if saves_state or self._journal is not None:
            self._data_buffer.save(rollout_id)
        if self._journal is not None:
            self._journal.add(rollout_id, entry)
        return entry, True

    def _groups(self, rollout_id: int) -> tuple[Any, dict[str, float]]:
        dump, share = self._args.load_debug_rollout_data, self._args.load_debug_rollout_data_subsample
        if dump is not None:
            return load_debug_rollout_data(dump, rollout_id=rollout_id, subsample_ratio=share), {}
        with collecting() as logged:
            output = self._call(self._rollout_function, rollout_id, evaluation=False)
        samples = samples_of("--rollout-function-path", self._rollout_function, output.samples)
        numbers = {s.group_index: None for s in samples if s.group_index is not None}
        self._data_buffer.settle(rollout_id, list(numbers), self._keeps_prompts)
        return output.samples, logged | dict(output.metrics or {})

    def _call(self, function: Any, rollout_id: int, *, evaluation: bool) -> Any:
        if self._servers is not None:  # engines may have joined
            GenerateState(self._args).grow()
        try:
            output = call_rollout_fn(function, self._args, rollout_id, self._data_buffer, evaluation=evaluation)
        except Exception:
            if self._servers is not None:
                self._servers.raise_if_dead()  # the cause, if an engine or the router died during the rollout
            raise
        if self._servers is not None:
            self._servers.note_progress()
        return output

    def eval(self, rollout_id: int) -> dict[str, float]:
        """Evaluate on every ``--eval-prompt-data`` set. Returns ``eval/...`` metrics.

        ``eval/weight_version`` is the version that scored, in rollouts that it was trained on. If all engines are lost
        meanwhile and return with newer weights, the evaluation is repeated: its samples must have one version.
        """
        set_evaluated_rollout_id(rollout_id)
        newest = -1
        while True:
            with collecting() as logged:
                output = self._call(self._eval_function, rollout_id, evaluation=True)
            found = [result.get("samples") or [] for result in output.data.values()]
            samples = samples_of("--eval-function-path", self._eval_function, found)
            versions = {int(v) for s in samples for v in s.weight_versions if str(v).isdecimal()}
            if len(versions) < 2 or max(versions) == newest:  # engines with foreign weights always mix versions
                break
            newest = max(versions)
            logger.warning("evaluation %d has tokens of weights %s: it is repeated", rollout_id, sorted(versions))
        save_debug_rollout_data(self._args.save_debug_rollout_data, samples, rollout_id=rollout_id, evaluation=True)
        self._finished.write(samples, rollout_id, "eval")
        known = {"eval/weight_version": float(min(versions))} if versions else {}
        return (
            known | logged | log_eval_rollout_data(rollout_id, self._args, output.data, output.metrics, self._log_eval)
        )

    def under_way(self) -> str:
        """How far the rollout or evaluation is, for the console: ``9/16 groups``."""
        return Count.under_way()

    # Users' programs call these two unbound, with an object that has ``args`` and the functions of the hooks.

    def _post_process_rewards(self: Any, samples: Any) -> Any:
        from slime.batch.compile import compile_train_data
        from slime.batch.rewards import RewardArgs, raw_rewards

        if self.custom_reward_post_process_func is not None:
            return self.custom_reward_post_process_func(self.args, samples)
        settings = from_args(RewardArgs, self.args)
        return raw_rewards(samples, settings), compile_train_data(samples, rewards=settings)["rewards"]

    def _convert_samples_to_train_data(self: Any, samples: Any) -> Any:
        from slime.batch.compile import compile_train_data
        from slime.batch.rewards import RewardArgs

        return compile_train_data(
            samples,
            rewards=from_args(RewardArgs, self.args),
            post_process=self.custom_reward_post_process_func,
            convert=self.custom_convert_samples_to_train_data_func,
            args=self.args,
        )

    def dispose(self) -> None:
        """Write the last records, then stop router, engines and HTTP workers."""
        self._finished.flush()
        if self._servers is not None:
            self._servers.stop()
            self._servers = None
        if self._http_workers is not None:
            self._http_workers.kill()
            self._http_workers = None


# As upstream's class, which Ray has decorated.
RolloutManager.__ray_metadata__ = SimpleNamespace(modified_class=RolloutManager)


def create_rollout_manager(config: RunConfig, slots: GpuSlots, data_buffer: DataBufferClient) -> Any:
    env = {"env_vars": worker_env()}
    actor = ray.remote(RolloutManager).options(
        num_cpus=1, runtime_env=env, max_concurrency=_CALLS, **actor_options(config.args.rollout_data_transport)
    )
    return actor.remote(config, slots, data_buffer)
