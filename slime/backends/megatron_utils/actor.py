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
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime.algorithms import grpo
from slime.algorithms.arguments import AlgorithmArgs
from slime.backends.megatron_utils.arguments import CheckpointArgs, OptimizerArgs, ParallelArgs, TrainerArgs
from slime.backends.megatron_utils.checkpoint_source import Source, find_reference, find_start
from slime.backends.megatron_utils.model_shape import ModelShape, read_shape
from slime.backends.megatron_utils.patches.install import install
from slime.backends.protocols import NamedTensor, TrainReport
from slime.config.groups import from_args
from slime.utils import accelerator
from slime.utils.errors import ConfigError, SlimeError

if TYPE_CHECKING:
    from slime.backends.megatron_utils.data import TrainBatch
    from slime.backends.megatron_utils.step import TrainState
    from slime.backends.megatron_utils.weight_backup import WeightBackup

__all__ = ["MegatronTrainer"]

logger = logging.getLogger(__name__)


class MegatronTrainer:
    """See the module docstring. ``MASTER_ADDR`` and its companions are set by the caller.

    Args:
        args: the resolved command line.
        with_ref: keep the reference model's weights in host memory and compute its log-probs.
    """

    def __init__(self, args: Namespace, *, rank: int, world_size: int, with_ref: bool) -> None:
        self._args = args
        self._rank = rank
        self._world_size = world_size
        self._with_ref = with_ref
        self._algorithm = from_args(AlgorithmArgs, args)
        self._checkpoint = from_args(CheckpointArgs, args)
        self._skips_bad_steps = not from_args(OptimizerArgs, args).check_for_nan_in_loss_and_grad
        self._shape: ModelShape = read_shape(args.hf_checkpoint)
        self._state: TrainState | None = None
        self._reference: WeightBackup | None = None

    # ------------------------------------------------------------------------------------------------ setup

    def setup(self) -> int:
        """Build the model and load the checkpoint. Returns the rollout id to start with."""
        started = time.monotonic()
        install()
        from slime.backends.megatron_utils.setup import build_train_state, init_distributed

        init_distributed(from_args(ParallelArgs, self._args), from_args(TrainerArgs, self._args))
        self._state = build_train_state(self._args, self._shape)
        start = self._load_weights(self._state)
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
            self._reference = WeightBackup(state.model)
        is_resume = source.flag == "--load" and source.format == "torch_dist" and not checkpoint.finetune
        if is_resume:
            content = CheckpointContent(not checkpoint.no_load_optim, not checkpoint.no_load_rng)
            load_training_state(state, self._shape, source, content)
        else:
            self._fill(state, source)
            state.optimizer.reload_model_params()
        if reference is not None and self._reference is None:
            self._reference = WeightBackup(state.model)
        return source.iteration + 1 if is_resume else 0

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
    def _is_main(self) -> bool:
        from megatron.core import parallel_state as mpu

        is_first = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
        is_last_stage = mpu.is_pipeline_last_stage(ignore_virtual=True)
        return bool(is_first and is_last_stage and mpu.get_tensor_model_parallel_rank() == 0)

    # ------------------------------------------------------------------------------------------------ training

    def train(self, rollout_id: int, batch: dict[str, Any]) -> TrainReport:
        """Train on this rank's part of a rollout."""
        from slime.backends.megatron_utils.data import TrainBatch

        seconds: dict[str, float] = {}
        train_batch = TrainBatch(dict(batch), accelerator.current().device())
        with self._dump_on_failure(rollout_id, batch):
            if self._algorithm.loss_type == "policy_loss":
                self._prepare_policy(train_batch, seconds)
            with _timed(seconds, "actor_train"):
                steps = self._run_steps(rollout_id, train_batch)
            report = self._report(train_batch)
        return TrainReport(steps if self._is_main else [], report, seconds)

    def _prepare_policy(self, batch: TrainBatch, seconds: dict[str, float]) -> None:
        """Everything the policy loss needs besides the current log-probs."""
        columns = batch.columns
        if self._algorithm.use_kl_loss:
            if self._reference is None:
                raise ConfigError("--use-kl-loss: the trainer was set up without a reference model.")
            with _timed(seconds, "ref_log_probs"), self._reference.swapped_in():
                columns["ref_log_probs"] = self._log_probs(batch)
        # With one step per rollout the step's own log-probs are those of the weights that it starts from: the ratio is
        # exactly 1 and no second pass is needed.
        if batch.num_steps > 1 and not self._algorithm.use_rollout_logprobs:
            with _timed(seconds, "log_probs"):
                columns["log_probs"] = self._log_probs(batch)
        credit = grpo.credit(columns["rewards"], columns["response_lengths"])
        columns["advantages"], columns["returns"] = credit.advantages, credit.returns

    def _log_probs(self, batch: TrainBatch) -> list[torch.Tensor]:
        from slime.backends.megatron_utils.forward import compute_log_probs

        return compute_log_probs(
            self._ready.model,
            batch,
            self._algorithm,
            vocab_size=self._shape.vocab_size,
            temperature=self._args.rollout_temperature,
        )

    def _run_steps(self, rollout_id: int, batch: TrainBatch) -> list[dict[str, float]]:
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
                )
            except NonFiniteGradients as error:
                raise SlimeError(
                    f"rollout {rollout_id}, step {step}: gradients are NaN or infinite on data-parallel ranks "
                    f"{error.ranks}; nothing was applied. --no-check-for-nan-in-loss-and-grad skips such steps."
                ) from error
            metrics.append(result.metrics)
        if batch.num_steps == 1 and "log_probs" not in batch.columns:
            batch.columns["log_probs"] = [result.log_probs[index] for index in range(batch.num_samples)]
        return metrics

    def _report(self, batch: TrainBatch) -> dict[str, float]:
        from megatron.core import parallel_state as mpu

        from slime.backends.megatron_utils.rollout_report import rollout_report

        return rollout_report(batch.columns, batch.num_rollouts_in_all, mpu.get_data_parallel_group())

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
        """Write ``<save>/iter_<rollout_id>``; complete when this returns on all ranks."""
        from slime.backends.megatron_utils.checkpoint import CheckpointContent, save_checkpoint

        if self._checkpoint.save is None:
            raise ConfigError("--save is required to write a checkpoint.")
        content = CheckpointContent(not self._checkpoint.no_save_optim, not self._checkpoint.no_save_rng)
        save_checkpoint(self._ready, self._shape, self._args, self._checkpoint.save, rollout_id, content)

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
        return self.data_parallel[0] == 0

    def export_weights(self) -> Iterator[NamedTensor]:
        """All weights under their Hugging Face names, full and unpadded."""
        from slime.backends.megatron_utils.hf_checkpoint import export_weights

        return export_weights(self._ready.model, self._shape)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    accelerator.current().synchronize()
    seconds[name] = time.monotonic() - started
