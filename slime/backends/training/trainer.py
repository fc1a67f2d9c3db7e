"""Trains on a rollout, for every backend: the order of passes and steps, and their report.

    train()   reference log-probs -> old log-probs -> advantages -> optimizer steps -> report

A backend derives from :class:`TrainerBase` and implements passes, steps, weights and the place of this rank. It
depends on neither Ray nor engines.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from slime.algorithms.arguments import AlgorithmArgs, DistillationArgs, ModelCopyArgs
from slime.backends import (
    EVERY_RANK,
    TRAINER_PARTS,
    AdapterProof,
    NamedTensor,
    Probe,
    Recipients,
    TrainerPart,
    TrainReport,
)
from slime.backends.training.adapter_files import state_problems
from slime.backends.training.arguments import CheckpointArgs, OptimizerArgs, PrecisionArgs
from slime.backends.training.checkpoint_source import (
    Source,
    find_reference,
    find_start,
    find_teacher,
    foreign,
    verify_source,
)
from slime.backends.training.credit import CustomFunctions, Passes, add_credit, passes_needed, reward_kl
from slime.backends.training.data import RankPlace, TrainBatch, forward_batch
from slime.backends.training.loss import LossContext, Objective
from slime.backends.training.offload import BaseReference, DeviceMemory, WeightBackup
from slime.backends.training.steps import (
    BadSteps,
    BatchRecord,
    NonFiniteGradients,
    ReadOutput,
    StepResult,
    rollout_report,
    warn_if_off_policy,
)
from slime.batch.arguments import BatchArgs
from slime.config.groups import RunConfig, from_args
from slime.data.engine_fields import FieldFlags
from slime.models.lora import LoraConfig
from slime.observability.profile_utils import TrainProfiler, timed
from slime.utils.errors import ConfigError, SlimeError
from slime.weight_sync.probe import probe_ids


class TrainerBase(ABC):
    """The part of a trainer that all backends share.

    Args:
        args: the resolved command line.
        with_ref: keep the reference model's weights in host memory and compute its log-probs.
        vocab_size: token ids of the model, without padding.
    """

    is_critic = False

    def __init__(self, args: Namespace, *, rank: int, world_size: int, with_ref: bool, vocab_size: int) -> None:
        self._args = args
        self._rank = rank
        self._world_size = world_size
        self._with_ref = with_ref
        self._algorithm = from_args(AlgorithmArgs, args)
        self._distillation = from_args(DistillationArgs, args)
        self._checkpoint = from_args(CheckpointArgs, args)
        self._copies = from_args(ModelCopyArgs, args)
        self._shares_prefixes = from_args(BatchArgs, args).share_prefixes
        self._lora = None if self.is_critic else LoraConfig.of(vars(args))
        self._bad_steps = BadSteps(args.save or args.output_dir, rank)
        self._vocab_size = vocab_size
        self._custom = CustomFunctions.load(args, vocab_size=vocab_size)
        self._profiler = TrainProfiler(self._run, rank)
        self._record = BatchRecord.of(self._run)
        self._reference: WeightBackup | BaseReference | None = None
        self._teacher: WeightBackup | None = None
        self._generators: dict[str, WeightBackup] = {}
        self._passed: dict[int, tuple[dict[str, Any], dict[str, float]]] = {}  # columns and seconds of reward_kl()
        self._base_scores: list[float] | None = None

    @property
    def _run(self) -> RunConfig:
        """The arguments as they are now: hooks may have changed them."""
        return RunConfig.of(self._args, is_shared=True)

    @functools.cached_property
    def _objective(self) -> Objective:
        """The loss of this run. Subclasses change its parts in their ``__init__``."""
        return Objective(
            self._algorithm,
            self._vocab_size,
            self._args.rollout_temperature,
            custom=self._custom,
            is_critic=self.is_critic,
            recompute=from_args(PrecisionArgs, self._args).recompute_loss_function,
            skip_bad=not from_args(OptimizerArgs, self._args).check_for_nan_in_loss_and_grad,
        )

    # ------------------------------------------------------------------------------------------ given by a backend

    # Set by ``setup``.
    _place: RankPlace
    _device: DeviceMemory

    @abstractmethod
    def _train_batch(self, batch: Mapping[str, Any]) -> TrainBatch:
        """The rank's columns, to be divided as the model wants them."""

    @abstractmethod
    def _outputs(
        self, batch: TrainBatch, read: ReadOutput, shape: tuple[int, ...] = (), store_prefix: str = ""
    ) -> list[torch.Tensor]:
        """``read``'s values of the model's outputs, without gradients, on every rank: ``[R_i, *shape]`` per sample, in
        order, on the cpu. With the micro-batches of the training steps an unchanged model gives the same numbers in
        both passes."""

    @abstractmethod
    def _step(self, rollout_id: int, step: int, context: LossContext) -> StepResult:
        """One optimizer step."""

    @abstractmethod
    def _copied_weights(self) -> WeightBackup:
        """The live weights as they are now, of a run with adapters those of the adapters."""

    @abstractmethod
    def _reset_moments(self) -> None:
        """Clear the moments of the optimizer."""

    @abstractmethod
    def _fill(self, source: Source) -> None:
        """Give the model the weights of ``source``. The optimizer's copies of them, if any, are not touched."""

    @abstractmethod
    def _resume(self, source: Source, *, has_optimizer: bool, has_rng: bool) -> None:
        """Restore a training state of this backend."""

    @abstractmethod
    def _fill_adapters(self) -> None:
        """Give the adapters the values of ``--lora-adapter-path``, or initial ones."""

    @abstractmethod
    def export_adapter(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        """The adapters alone under peft's names. Gathers ``bucket_bytes`` at a time."""

    @abstractmethod
    def _adapters_off(self) -> AbstractContextManager[None]:
        """The context in which the model is its base."""

    @property
    def _adapter(self) -> Mapping[str, Any] | None:
        """``describe_adapter`` of a run with adapters."""
        return None

    def _begin_with_filled(self) -> None:  # noqa: B027 - a backend whose optimizer has no copies needs nothing
        """Training starts with the weights that the model was filled with."""

    def _whole_batch(self, results: dict[int, torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
        """A step's values per sample, in order, on every rank. Some ranks may not have seen them."""
        return [results[index] for index in range(len(lengths))]

    def _expert_choices(self, batch: TrainBatch, *, is_step: bool) -> AbstractContextManager[None]:
        """The context in which the old policy's pass or the steps run. By default the routers choose the experts."""
        return nullcontext()

    # ------------------------------------------------------------------------------------------------ weights

    def _load_weights(self) -> int:
        """Fill the model, and the copies of other weights. Returns the rollout id to start with."""
        settings = self._checkpoint
        source = self._readable(find_start(settings, self._args.hf_checkpoint))
        if self._lora is not None:
            return self._load_adapters(source)
        # other weights pass through the model first: the trained ones must be filled in last
        reference = find_reference(settings, self._args.hf_checkpoint) if self._with_ref else None
        if reference is not None and reference != source:
            self._fill(self._readable(reference))
            self._reference = self._copied_weights()
        teacher = find_teacher(self._distillation.opd_teacher_load, self._distillation.opd_teacher_ckpt_step)
        if teacher is not None:
            self._fill(self._readable(teacher))
            self._teacher = self._copied_weights()
        start = self._begin(source)
        # the reference is equal to the weights that the run starts with
        if reference is not None and (self._reference is None or self._has_moved_reference(start)):
            self._reference = self._copied_weights()
        return start

    def _load_adapters(self, source: Source) -> int:
        """Fill the base, then the adapters. ``source`` is a checkpoint of adapters, or the base."""
        base = Source("hf", self._args.hf_checkpoint, "--hf-checkpoint")
        self._fill(base)
        self._fill_adapters()
        if source.is_training_state:
            start = self._begin(source)
        else:
            self._begin_with_filled()
            start = 0
        if self._with_ref:
            self._reference = BaseReference(self._adapters_off, self._copied_weights)
            if self._has_moved_reference(start):
                self._reference.refresh()
        return start

    def _begin(self, source: Source) -> int:
        """Fill the model with the weights that training starts with. Returns the rollout id to start with."""
        settings = self._checkpoint
        if source.is_training_state and (problems := state_problems(source, self._adapter)):
            raise ConfigError(problems)
        if source.flag == "--load" and source.is_training_state and not settings.finetune:
            # Adam without moments has no state to load
            has_optimizer = not (settings.no_load_optim or self._copies.use_stateless_adam)
            self._resume(source, has_optimizer=has_optimizer, has_rng=not settings.no_load_rng)
            return source.iteration + 1
        self._fill(source)
        self._begin_with_filled()
        return 0

    def _readable(self, source: Source) -> Source:
        problem = foreign(source, self._args.train_backend)
        if problem is not None:
            raise ConfigError(problem)
        verify_source(source)
        return source

    def _has_moved_reference(self, start: int) -> bool:
        """Whether the reference of a run that continues at ``start`` is the checkpoint's own weights."""
        interval = self._copies.ref_update_interval
        if interval is None or start < interval:
            return False
        if start % interval:
            raise ConfigError(
                f"--ref-update-interval {interval}: the checkpoint after {start} rollouts does not hold the reference, "
                f"which was copied after rollout {start - start % interval}. Resume from a multiple (--ckpt-step), and "
                "make --save-interval a multiple of it."
            )
        return True

    # ------------------------------------------------------------------------------------------------ training

    @property
    def data_parallel(self) -> tuple[int, int]:
        return self._place.dp_rank, self._place.dp_size

    def train(self, rollout_id: int, batch: dict[str, Any]) -> TrainReport:
        """Train on this rank's part of a rollout."""
        self._device.require(TRAINER_PARTS, "training")
        if self._copies.reset_optimizer_states:
            self._reset_moments()
        if self._generators and batch.get("generated_by") is not None:
            self._forget_versions_before(batch["generated_by"])
        seconds: dict[str, float] = {}
        train_batch = self._train_batch(batch)
        with self._bad_steps.dumping(rollout_id, batch):
            with self._profiler.section("train_log_probs"):
                self._prepare_policy(rollout_id, train_batch, seconds)
            self._custom.run_postprocess(rollout_id, train_batch.columns)
            profiled = self._profiler.section("train_actor")
            with profiled, timed(seconds, "actor_train"), self._expert_choices(train_batch, is_step=True):
                steps = self._run_steps(rollout_id, train_batch)
            report = self._report(rollout_id, train_batch)
        # after the steps, which may add log-probs to the columns
        self._record.keep(rollout_id, train_batch.columns, self._place)
        self._profiler.end_rollout(rollout_id)
        self._refresh_copies(rollout_id)
        return TrainReport(steps if self._place.is_main else [], report, seconds)

    def reward_kl(self, rollout_id: int, batch: dict[str, Any]) -> list[torch.Tensor]:
        """The KL divergence that enters the rewards, fp32 ``[R_i]`` per sample. ``train`` reuses its passes."""
        self._device.require(TRAINER_PARTS, "log-probs")
        train_batch, seconds = self._train_batch(batch), dict[str, float]()
        self._run_passes(self._passes(train_batch), train_batch, seconds)
        columns = train_batch.columns
        self._passed = {rollout_id: ({name: columns[name] for name in columns.keys() - batch.keys()}, seconds)}
        return reward_kl(columns, self._algorithm)

    def train_values(self, rollout_id: int, batch: dict[str, Any]) -> tuple[TrainReport, list[torch.Tensor]]:
        raise NotImplementedError("a policy has no values: a critic is another trainer")

    def keep_version(self, version: str) -> None:
        """Remember the live weights as those that generate from now on (``--keep-old-actor``).

        Old log-probs of a batch whose column ``generated_by`` names the version are then computed with them, however
        many steps the live weights have made since.
        """
        self._device.require(["weights"], "a copy of them")
        self._generators[version] = self._copied_weights()

    def _forget_versions_before(self, version: str) -> None:
        """Drop the weights that generated earlier rollouts, because rollouts are trained in order."""
        self._generators = {kept: copy for kept, copy in self._generators.items() if int(kept) >= int(version)}

    def _refresh_copies(self, rollout_id: int) -> None:
        interval = self._copies.ref_update_interval
        if self._reference is not None and interval is not None and (rollout_id + 1) % interval == 0:
            self._reference.refresh()

    def _prepare_policy(self, rollout_id: int, batch: TrainBatch, seconds: dict[str, float]) -> None:
        """Compute the columns that the loss reads: log-probs of other weights, and advantages."""
        columns = batch.columns
        from_args(FieldFlags, self._args).check_sampling_sets(columns)
        passes = self._passes(batch)
        if rollout_id in self._passed:
            known, spent = self._passed.pop(rollout_id)
            columns |= known
            seconds |= spent
        else:
            self._run_passes(passes, batch, seconds)
        if passes.credit:
            add_credit(columns, self._algorithm, self._distillation, self._custom, self._place.dp_group)

    def _passes(self, batch: TrainBatch) -> Passes:
        return passes_needed(
            self._algorithm,
            self._distillation,
            num_steps=batch.num_steps,
            # both functions may read log-probs
            has_custom_advantages=self._custom.advantages is not None or self._custom.postprocess is not None,
        )

    def _run_passes(self, passes: Passes, batch: TrainBatch, seconds: dict[str, float]) -> None:
        """Compute log-probs of other weights, as columns."""
        columns = batch.columns
        if passes.reference:
            if self._reference is None:
                raise ConfigError("--use-kl-loss or --kl-coef: the trainer was set up without a reference model.")
            with timed(seconds, "ref_log_probs"), self._reference.swapped_in():
                columns["ref_log_probs"] = self._log_probs(batch, "ref_")
        if passes.teacher:
            assert self._teacher is not None, "--opd-type megatron comes with --opd-teacher-load"
            with timed(seconds, "teacher_log_probs"), self._teacher.swapped_in():
                columns["teacher_log_probs"] = self._log_probs(batch, "teacher_")
        generator = self._generators.get(str(columns.get("generated_by")))
        if passes.old or generator is not None:
            # the version that generated this rollout, if --keep-old-actor has kept it
            swapped = nullcontext() if generator is None else generator.swapped_in()
            with timed(seconds, "log_probs"), self._expert_choices(batch, is_step=False), swapped:
                columns |= self._old_policy(batch)

    def _old_policy(self, batch: TrainBatch) -> dict[str, list[torch.Tensor]]:
        if not self._algorithm.use_rollout_entropy:
            return {"log_probs": self._log_probs(batch)}
        rows = self._log_probs(batch, with_entropy=True)
        return {name: [row[:, i].contiguous() for row in rows] for i, name in enumerate(("log_probs", "entropy"))}

    def _log_probs(
        self, batch: TrainBatch, store_prefix: str = "", *, with_entropy: bool = False
    ) -> list[torch.Tensor]:
        """Log-probs of the responses under the weights that the model holds now: fp32 ``[R_i]`` per sample, on the
        cpu. ``[R_i, 2]`` with the entropies."""
        group = self._place.tensor_group
        read = functools.partial(self._objective.read_log_probs, tensor_group=group, with_entropy=with_entropy)
        return self._outputs(self._for_passes(batch), read, (2,) if with_entropy else (), store_prefix)

    def adapter_proof(self, version: str) -> AdapterProof | None:
        """The proof that engines use the adapters, which are ``version``. A collective."""
        fields = from_args(FieldFlags, self._args).adapter_fields
        if not fields:
            return None
        ids = probe_ids(self._vocab_size)
        if self._base_scores is None:
            with self._adapters_off():
                self._base_scores = self.fixed_log_probs(ids)
        return AdapterProof(Probe(version, ids, self.fixed_log_probs(ids), self._base_scores), fields)

    def fixed_log_probs(self, ids: list[int]) -> list[float]:
        """Log-probs of ``ids`` from the second on, at temperature 1. A collective."""
        self._device.require(["weights"], "the log-probs of fixed tokens")
        count = self._args.microbatch_group_size_per_vp_stage or 1
        columns = {
            "tokens": [torch.tensor(ids)] * count,
            "total_lengths": [len(ids)] * count,
            "response_lengths": [len(ids) - 1] * count,
            "micro_batch_indices": [[index] for index in range(count)],
            "num_microbatches": [count],
            "global_batch_sizes": [count],
        }
        read = functools.partial(self._objective.read_log_probs, tensor_group=self._place.tensor_group, temperature=1.0)
        scores: list[float] = self._outputs(self._train_batch(columns), read)[0].tolist()
        return scores

    def _for_passes(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the micro-batches of passes without gradients."""
        return forward_batch(
            batch,
            from_args(BatchArgs, self._args),
            context_parallel_size=self._place.cp_size,
            multiple=self._args.microbatch_group_size_per_vp_stage or 1,
        )

    def _run_steps(self, rollout_id: int, batch: TrainBatch) -> list[dict[str, float]]:
        metrics = []
        for step in range(batch.num_steps):
            counts = batch.num_micro_batches(step), batch.num_rollouts(step)
            context = LossContext(self._objective, batch, *counts, self._place)
            try:
                result = self._step(rollout_id, step, context)
            except NonFiniteGradients as error:
                raise SlimeError(
                    f"rollout {rollout_id}, step {step}: {error}; nothing was applied. "
                    "--no-check-for-nan-in-loss-and-grad skips such steps."
                ) from error
            skipped = self._bad_steps.count(rollout_id, step, batch.columns, result.skipped)
            metrics.append(result.metrics | {"skipped_steps": skipped})
        has_log_probs = not self.is_critic and not self._objective.needs_all_rows
        # the pass was not needed: log-probs of the only step are those of the old policy
        if batch.num_steps == 1 and "log_probs" not in batch.columns and has_log_probs:
            batch.columns["log_probs"] = self._whole_batch(result.log_probs, batch.columns["response_lengths"])
        return metrics

    def _report(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        correct = self._args.log_correct_samples
        report = rollout_report(batch.columns, batch.num_rollouts_in_all, self._place.dp_group, log_correct=correct)
        if self._algorithm.true_on_policy_mode and self._place.is_main:
            warn_if_off_policy(rollout_id, report)
        return report

    def finish_saves(self) -> None:  # noqa: B027 - a backend that saves in the foreground has nothing to do
        """Nothing is written in the background, unless a backend says otherwise."""

    # ------------------------------------------------------------------------------------------------ memory

    @property
    def is_weight_source(self) -> bool:
        return self._rank == 0

    def offload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Give the device memory of ``parts`` back to the driver (``offload.DeviceMemory``)."""
        self._device.offload(parts)

    def onload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Take ``parts`` back, bit for bit. Gradients come back as zeros."""
        self._device.onload(parts)
