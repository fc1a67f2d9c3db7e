"""One rank of the Megatron backend: the ``Trainer`` protocol on stock megatron-core.

    setup()   groups -> model, optimizer -> checkpoint (torch_dist or HF) -> reference weights in host memory
    train()   reference log-probs -> old log-probs -> advantages -> optimizer steps -> report

Called by ``slime.ray.train_actor`` on all ranks at once. Knows neither Ray nor engines. Importing this module does not
import megatron: ``setup`` prepares the process first.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime.algorithms.arguments import AlgorithmArgs, DistillationArgs, ModelCopyArgs
from slime.backends.megatron_utils.arguments import CheckpointArgs, OptimizerArgs, ParallelArgs, TrainerArgs
from slime.backends.megatron_utils.checkpoint_source import Source, find_reference, find_start, find_teacher
from slime.backends.megatron_utils.credit import add_credit, passes_needed
from slime.backends.megatron_utils.custom import CustomFunctions
from slime.backends.megatron_utils.model_shape import ModelShape, read_shape
from slime.backends.megatron_utils.patches.install import install
from slime.backends.megatron_utils.trainer_hooks import TrainerHooks
from slime.backends.protocols import NamedTensor, TrainReport
from slime.batch.arguments import BatchArgs, ReplayArgs
from slime.config.groups import from_args
from slime.observability.train_data_utils import save_debug_train_data
from slime.utils import accelerator
from slime.utils.errors import ConfigError, SlimeError

if TYPE_CHECKING:
    from slime.backends.megatron_utils.checkpoint_writer import CheckpointWriter
    from slime.backends.megatron_utils.data import TrainBatch
    from slime.backends.megatron_utils.routing_replay import RoutingReplay
    from slime.backends.megatron_utils.step import TrainState
    from slime.backends.megatron_utils.weight_backup import WeightBackup

__all__ = ["MegatronTrainer", "timed"]

logger = logging.getLogger(__name__)


class MegatronTrainer:
    """See the module docstring. ``MASTER_ADDR`` and its companions are set by the caller.

    Args:
        args: the resolved command line.
        with_ref: keep the reference model's weights in host memory and compute its log-probs.
    """

    is_critic = False

    def __init__(self, args: Namespace, *, rank: int, world_size: int, with_ref: bool) -> None:
        self._args = args
        self._rank = rank
        self._world_size = world_size
        self._with_ref = with_ref
        self._algorithm = from_args(AlgorithmArgs, args)
        self._distillation = from_args(DistillationArgs, args)
        self._checkpoint = from_args(CheckpointArgs, args)
        self._skips_bad_steps = not from_args(OptimizerArgs, args).check_for_nan_in_loss_and_grad
        self._shape: ModelShape = read_shape(args.hf_checkpoint)
        self._custom = CustomFunctions.load(args, vocab_size=self._shape.vocab_size)
        self._hooks = TrainerHooks.load(args)
        self._state: TrainState | None = None
        self._writer: CheckpointWriter | None = None
        self._copies = from_args(ModelCopyArgs, args)
        self._reference: WeightBackup | None = None
        self._teacher: WeightBackup | None = None
        self._generators: dict[str, WeightBackup] = {}
        self._replay: RoutingReplay | None = None

    # ------------------------------------------------------------------------------------------------ setup

    def setup(self) -> int:
        """Build the model and load the checkpoint. Returns the rollout id to start with."""
        started = time.monotonic()
        install()
        from slime.backends.megatron_utils.setup import build_train_state, init_distributed

        init_distributed(from_args(ParallelArgs, self._args), from_args(TrainerArgs, self._args))
        self._hooks.after_init()
        self._state = build_train_state(self._args, self._shape, is_critic=self.is_critic)
        start = self._load_weights(self._state)
        if self._copies.use_routing_replay and not self.is_critic:
            self._replay = self._routing_replay(self._state)
        if self._is_main:
            logger.info("trainer ready in %.1f s, starting with rollout %d", time.monotonic() - started, start)
        return start

    def _load_weights(self, state: TrainState) -> int:
        from slime.backends.megatron_utils.checkpoint import CheckpointContent, load_training_state
        from slime.backends.megatron_utils.weight_backup import WeightBackup

        checkpoint = self._checkpoint
        source = find_start(checkpoint, self._args.hf_checkpoint)
        reference = find_reference(checkpoint, self._args.hf_checkpoint) if self._with_ref else None
        if reference is not None and reference != source:
            self._fill(state, reference)
            self._reference = WeightBackup(state.chunks)
        teacher = find_teacher(self._distillation.opd_teacher_load, self._distillation.opd_teacher_ckpt_step)
        if teacher is not None:
            self._fill(state, teacher)
            self._teacher = WeightBackup(state.chunks)
        is_resume = source.flag == "--load" and source.format == "torch_dist" and not checkpoint.finetune
        if is_resume:
            has_optimizer = not (checkpoint.no_load_optim or self._copies.use_stateless_adam)
            content = CheckpointContent(has_optimizer, not checkpoint.no_load_rng)
            load_training_state(state, self._shape, source, content)
        else:
            self._fill(state, source)
            state.optimizer.reload_model_params()
        start = source.iteration + 1 if is_resume else 0
        if reference is not None and (self._reference is None or self._has_moved_reference(start)):
            self._reference = WeightBackup(state.chunks)
        return start

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

    def _routing_replay(self, state: TrainState) -> RoutingReplay:
        from slime.backends.megatron_utils.routing_replay import RoutingReplay

        if not self._shape.family.is_moe:
            raise ConfigError(f"--use-routing-replay: a model of model_type {self._shape.model_type} has no experts.")
        return RoutingReplay(state.model)

    def _fill(self, state: TrainState, source: Source) -> None:
        from slime.backends.megatron_utils.checkpoint import load_model_weights
        from slime.backends.megatron_utils.hf_checkpoint import load_weights

        if source.format == "hf":
            load_weights(state.model, self._shape, source.directory, source.flag)
        else:
            load_model_weights(state.model, self._shape, source)

    @property
    def _ready(self) -> TrainState:
        assert self._state is not None, "setup() comes first"
        return self._state

    @property
    def data_parallel(self) -> tuple[int, int]:
        from megatron.core import parallel_state as mpu

        return mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()

    @property
    def _data_parallel_group(self) -> Any:
        from megatron.core import parallel_state as mpu

        return mpu.get_data_parallel_group(with_context_parallel=False)

    @property
    def _is_main(self) -> bool:
        from megatron.core import parallel_state as mpu

        is_first = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
        is_last_stage = mpu.is_pipeline_last_stage(ignore_virtual=True)
        return bool(is_first and is_last_stage and mpu.get_tensor_model_parallel_rank() == 0)

    # ------------------------------------------------------------------------------------------------ training

    def train(self, rollout_id: int, batch: dict[str, Any]) -> TrainReport:
        """Train on this rank's part of a rollout."""
        from slime.backends.megatron_utils.data import TrainBatch
        from slime.backends.megatron_utils.optimizer import reset_moments

        if self._writer is not None:
            self._writer.poll()
        if self._copies.reset_optimizer_states:
            reset_moments(self._ready.optimizer)
        if self._generators and batch.get("generated_by") is not None:
            self._forget_versions_before(batch["generated_by"])
        seconds: dict[str, float] = {}
        train_batch = TrainBatch(dict(batch), accelerator.current().device(), self._ready.sharding)
        with self._dump_on_failure(rollout_id, batch):
            self._prepare_policy(train_batch, seconds)
            self._custom.run_postprocess(rollout_id, train_batch.columns)
            with timed(seconds, "actor_train"), self._expert_choices(train_batch, is_step=True):
                steps = self._run_steps(rollout_id, train_batch)
            report = self._report(rollout_id, train_batch)
        self._dump(rollout_id, train_batch)
        self._refresh_copies(rollout_id)
        return TrainReport(steps if self._is_main else [], report, seconds)

    def train_values(self, rollout_id: int, batch: dict[str, Any]) -> tuple[TrainReport, list[torch.Tensor]]:
        raise NotImplementedError("a policy has no values: see critic.MegatronCritic")

    def keep_version(self, version: str) -> None:
        """Remember the live weights as those that generate from now on (``--keep-old-actor``).

        Old log-probs of a batch whose column ``generated_by`` names the version are then computed with them, however
        many steps the live weights have made since.
        """
        from slime.backends.megatron_utils.weight_backup import WeightBackup

        self._generators[version] = WeightBackup(self._ready.chunks)

    def _forget_versions_before(self, version: str) -> None:
        """Rollouts are trained in order: what generated an earlier one is not needed any more."""
        self._generators = {kept: copy for kept, copy in self._generators.items() if int(kept) >= int(version)}

    def _refresh_copies(self, rollout_id: int) -> None:
        from slime.backends.megatron_utils.weight_backup import WeightBackup

        interval = self._copies.ref_update_interval
        if self._reference is not None and interval is not None and (rollout_id + 1) % interval == 0:
            self._reference = WeightBackup(self._ready.chunks)

    def _prepare_policy(self, batch: TrainBatch, seconds: dict[str, float]) -> None:
        """Everything the loss needs besides the current log-probs: those of other weights, and advantages."""
        columns = batch.columns
        passes = passes_needed(
            self._algorithm,
            self._distillation,
            num_steps=batch.num_steps,
            has_custom_advantages=self._custom.advantages is not None,
        )
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
            swapped = nullcontext() if generator is None else generator.swapped_in()
            with timed(seconds, "log_probs"), self._expert_choices(batch, is_step=False), swapped:
                columns |= self._old_policy(batch)
        if passes.credit:
            add_credit(columns, self._algorithm, self._distillation, self._custom, self._data_parallel_group)

    def _expert_choices(self, batch: TrainBatch, *, is_step: bool) -> AbstractContextManager[None]:
        """What decides over experts: the routers, the engine, or in training the pass for the old policy."""
        if self._replay is None:
            return nullcontext()
        if self._copies.use_rollout_routing_replay:
            return self._replay.replaying(self._engine_choices(batch))
        if not is_step:
            return self._replay.recording()
        return self._replay.replaying() if self._replay.is_recorded else nullcontext()

    def _engine_choices(self, batch: TrainBatch) -> Iterator[torch.Tensor]:
        from megatron.core import parallel_state as mpu

        from slime.backends.megatron_utils.engine_routing import engine_choices

        moe, sharding = self._shape.moe, self._ready.sharding
        assert moe is not None, "setup refuses replay for a model without experts"
        rank = mpu.get_tensor_model_parallel_rank()
        return engine_choices(batch, moe, sharding, num_layers=self._shape.num_layers, tensor_rank=rank)

    def _old_policy(self, batch: TrainBatch) -> dict[str, list[torch.Tensor]]:
        if not self._algorithm.use_rollout_entropy:
            return {"log_probs": self._log_probs(batch)}
        from slime.backends.megatron_utils.entropy import compute_log_probs_and_entropy

        batch = self._for_passes(batch)
        self._hooks.before_log_probs(self._ready, "")
        log_probs, entropy = compute_log_probs_and_entropy(
            self._ready.chunks,
            batch,
            self._algorithm,
            vocab_size=self._shape.vocab_size,
            temperature=self._args.rollout_temperature,
        )
        return {"log_probs": log_probs, "entropy": entropy}

    def _log_probs(self, batch: TrainBatch, store_prefix: str = "") -> list[torch.Tensor]:
        from slime.backends.megatron_utils.forward import compute_log_probs

        self._hooks.before_log_probs(self._ready, store_prefix)
        return compute_log_probs(
            self._ready.chunks,
            self._for_passes(batch),
            self._algorithm,
            vocab_size=self._shape.vocab_size,
            temperature=self._args.rollout_temperature,
        )

    def _for_passes(self, batch: TrainBatch) -> TrainBatch:
        """The batch as passes without gradients run it."""
        from megatron.core import parallel_state as mpu

        from slime.backends.megatron_utils.forward_batch import forward_batch

        return forward_batch(
            batch,
            from_args(BatchArgs, self._args),
            context_parallel_size=mpu.get_context_parallel_world_size(),
            multiple=self._args.microbatch_group_size_per_vp_stage or 1,
        )

    def _run_steps(self, rollout_id: int, batch: TrainBatch) -> list[dict[str, float]]:
        from slime.backends.megatron_utils.forward import from_last_stage
        from slime.backends.megatron_utils.loss import needs_all_rows
        from slime.backends.megatron_utils.step import NonFiniteGradients, train_step

        metrics = []
        for step in range(batch.num_steps):
            try:
                result = train_step(
                    self._ready,
                    batch,
                    step,
                    self._algorithm,
                    temperature=self._args.rollout_temperature,
                    skip_bad=self._skips_bad_steps,
                    custom=self._custom,
                    is_critic=self.is_critic,
                    before=partial(self._hooks.before_step, self._ready, rollout_id, step),
                )
            except NonFiniteGradients as error:
                raise SlimeError(
                    f"rollout {rollout_id}, step {step}: gradients are NaN or infinite on data-parallel ranks "
                    f"{error.ranks}; nothing was applied. --no-check-for-nan-in-loss-and-grad skips such steps."
                ) from error
            metrics.append(result.metrics)
        has_log_probs = not self.is_critic and not needs_all_rows(self._algorithm)
        if batch.num_steps == 1 and "log_probs" not in batch.columns and has_log_probs:
            batch.columns["log_probs"] = from_last_stage(result.log_probs, batch.columns["response_lengths"])
        return metrics

    def _report(self, rollout_id: int, batch: TrainBatch) -> dict[str, float]:
        from megatron.core import parallel_state as mpu

        from slime.backends.megatron_utils.rollout_report import rollout_report, warn_if_off_policy

        report = rollout_report(
            batch.columns,
            batch.num_rollouts_in_all,
            mpu.get_data_parallel_group(),
            log_correct=self._args.log_correct_samples,
        )
        if self._algorithm.true_on_policy_mode and self._is_main:
            warn_if_off_policy(rollout_id, report)
        return report

    def _dump(self, rollout_id: int, batch: TrainBatch) -> None:
        """--save-debug-train-data: one rank of each data-parallel rank has all that is known about its samples."""
        template = from_args(ReplayArgs, self._args).save_debug_train_data
        if template is None:
            return
        from megatron.core import parallel_state as mpu

        is_last_stage = mpu.is_pipeline_last_stage(ignore_virtual=True)
        if is_last_stage and mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0:
            group = self._data_parallel_group
            save_debug_train_data(template, rollout_id=rollout_id, rollout_data=batch.columns, group=group)

    @contextmanager
    def _dump_on_failure(self, rollout_id: int, batch: dict[str, Any]) -> Iterator[None]:
        """A step that fails leaves the batch that did it."""
        try:
            yield
        except Exception as error:
            directory = Path(self._args.save or self._args.output_dir) / "failed_steps"
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"rollout_{rollout_id}_rank_{self._rank}.pt"
            torch.save({"rollout_id": rollout_id, "rank": self._rank, "error": str(error), "batch": batch}, path)
            raise SlimeError(
                f"trainer rank {self._rank} failed on rollout {rollout_id}: {type(error).__name__}: {error} "
                f"Its batch is in {path}."
            ) from error

    # ------------------------------------------------------------------------------------------------ weights

    def save(self, rollout_id: int) -> None:
        """Write ``<save>/iter_<rollout_id>``; complete when this returns on all ranks, unless --async-save."""
        from slime.backends.megatron_utils.checkpoint import CheckpointContent
        from slime.backends.megatron_utils.checkpoint_writer import CheckpointWriter

        checkpoint = self._checkpoint
        if checkpoint.save is None:
            raise ConfigError("--save is required to write a checkpoint.")
        if self._writer is None:
            self._writer = CheckpointWriter(checkpoint.save, keep=checkpoint.keep_last_checkpoints)
        content = CheckpointContent(not checkpoint.no_save_optim, not checkpoint.no_save_rng)
        is_last = rollout_id + 1 == self._args.num_rollout
        # a critic's must be complete before the actor's, which says that both are
        in_background = checkpoint.async_save and not is_last and not self.is_critic
        self._writer.save(self._ready, self._shape, self._args, rollout_id, content, in_background=in_background)

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint at ``path``; an error on the writing rank is raised on all."""
        import torch.distributed as dist

        from slime.backends.megatron_utils.hf_checkpoint import write_hf_directory

        failure: list[str | None] = [None]
        if self.is_weight_source:
            try:
                write_hf_directory(self.export_weights(), self._args.hf_checkpoint, path)
            except Exception as error:
                logger.exception("writing a Hugging Face checkpoint at %s failed", path)
                failure[0] = f"{type(error).__name__}: {error}"
        else:
            for _ in self.export_weights():
                pass
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise SlimeError(f"--save-hf {path}: {failure[0]}")

    @property
    def is_weight_source(self) -> bool:
        return self._rank == 0

    def export_weights(self, bucket_bytes: int = 512 * 1024**2) -> Iterator[NamedTensor]:
        """All weights under their Hugging Face names, full and unpadded; ``bucket_bytes`` are gathered at a time."""
        from slime.backends.megatron_utils.hf_checkpoint import export_weights

        return export_weights(self._ready.model, self._shape, bucket_bytes)


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note how long the block takes, the device's work included."""
    started = time.monotonic()
    yield
    accelerator.current().synchronize()
    seconds[name] = time.monotonic() - started
