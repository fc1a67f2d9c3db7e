"""One rank of the Megatron backend: the ``Trainer`` protocol on stock megatron-core.

    setup()   groups -> model, optimizer -> checkpoint (torch_dist or HF) -> reference weights in host memory

What is done with a batch is in ``training.trainer``; here is how Megatron does it. Called by ``slime.ray.train_actor``
on all ranks at once. Importing this module does not import megatron: ``setup`` prepares the process first.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from slime.backends.megatron_utils.model_rules import sees_media
from slime.backends.megatron_utils.patches.install import install
from slime.backends.megatron_utils.trainer_hooks import TrainerHooks
from slime.backends.protocols import NamedTensor, TrainReport
from slime.backends.training.arguments import ParallelArgs, TrainerArgs
from slime.backends.training.checkpoint_source import Source
from slime.backends.training.data import RankPlace, TrainBatch
from slime.backends.training.hf_files import save_hf_directory
from slime.backends.training.media import MediaTokens
from slime.backends.training.trainer import TrainerBase
from slime.config.groups import from_args
from slime.models.hf_shape import read_shape
from slime.models.shape import ModelShape
from slime.utils import accelerator
from slime.utils.errors import ConfigError

if TYPE_CHECKING:
    from slime.backends.megatron_utils.checkpoint.writer import CheckpointWriter
    from slime.backends.megatron_utils.parallel.routing_replay import RoutingReplay
    from slime.backends.megatron_utils.step import TrainState
    from slime.backends.training.loss import LossContext
    from slime.backends.training.offload import WeightBackup
    from slime.backends.training.steps import ReadOutput, StepResult

__all__ = ["MegatronTrainer"]

logger = logging.getLogger(__name__)


class MegatronTrainer(TrainerBase):
    """See the module docstring. ``MASTER_ADDR`` and its companions are set by the caller.

    Args:
        args: the resolved command line.
        with_ref: keep the reference model's weights in host memory and compute its log-probs.
    """

    def __init__(self, args: Namespace, *, rank: int, world_size: int, with_ref: bool) -> None:
        self._shape: ModelShape = read_shape(args.hf_checkpoint, with_vision=sees_media(args))
        super().__init__(args, rank=rank, world_size=world_size, with_ref=with_ref, vocab_size=self._shape.vocab_size)
        self._hooks = TrainerHooks.load(args)
        self._state: TrainState | None = None
        self._writer: CheckpointWriter | None = None
        self._replay: RoutingReplay | None = None

    # ------------------------------------------------------------------------------------------------ setup

    def setup(self) -> int:
        """Build the model and load the checkpoint. Returns the rollout id to start with."""
        started = time.monotonic()
        install()
        from slime.backends.megatron_utils.offload import device_memory
        from slime.backends.megatron_utils.setup import build_train_state, init_distributed

        init_distributed(
            from_args(ParallelArgs, self._args),
            from_args(TrainerArgs, self._args),
            num_optimizer_instances=self._args.num_distributed_optimizer_instances,
        )
        if not self.is_critic:
            self._profiler.begin()
        self._hooks.after_init()
        self._state = build_train_state(self._args, self._shape, is_critic=self.is_critic)
        self._memory = device_memory(self._state.chunks, self._state.optimizer)
        start = self._load_weights()
        if self._copies.use_routing_replay and not self.is_critic:
            self._replay = self._routing_replay(self._state)
        if self._place.is_main:
            logger.info("trainer ready in %.1f s, starting with rollout %d", time.monotonic() - started, start)
        return start

    def _routing_replay(self, state: TrainState) -> RoutingReplay:
        from slime.backends.megatron_utils.parallel.routing_replay import RoutingReplay

        if not self._shape.family.is_moe:
            raise ConfigError(f"--use-routing-replay: a model of model_type {self._shape.model_type} has no experts.")
        return RoutingReplay(state.model)

    def _fill(self, source: Source) -> None:
        from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights
        from slime.backends.megatron_utils.checkpoint.state import load_model_weights

        if source.format == "hf":
            load_weights(self._ready.model, self._shape, source.directory, source.flag)
        else:
            load_model_weights(self._ready.model, self._shape, source)

    def _begin_with_filled(self) -> None:
        self._ready.optimizer.reload_model_params()

    def _resume(self, source: Source, *, has_optimizer: bool, has_rng: bool) -> None:
        from slime.backends.megatron_utils.checkpoint.state import CheckpointContent, load_training_state

        load_training_state(self._ready, self._shape, source, CheckpointContent(has_optimizer, has_rng))

    @property
    def _ready(self) -> TrainState:
        assert self._state is not None, "setup() comes first"
        return self._state

    @property
    def _place(self) -> RankPlace:
        from megatron.core import parallel_state as mpu

        from slime.backends.megatron_utils.step import tensor_group

        is_last_stage = mpu.is_pipeline_last_stage(ignore_virtual=True)
        has_loss = bool(is_last_stage and mpu.get_tensor_model_parallel_rank() == 0)
        return RankPlace(
            dp_rank=mpu.get_data_parallel_rank(),
            dp_size=mpu.get_data_parallel_world_size(),
            dp_group=mpu.get_data_parallel_group(with_context_parallel=False),
            cp_size=mpu.get_context_parallel_world_size(),
            is_main=has_loss and mpu.get_data_parallel_rank(with_context_parallel=True) == 0,
            keeps_batch=has_loss and mpu.get_context_parallel_rank() == 0,
            tensor_group=tensor_group(),
        )

    # ------------------------------------------------------------------------------------------------ training

    def train(self, rollout_id: int, batch: dict[str, Any]) -> TrainReport:
        """Train on this rank's part of a rollout."""
        if self._writer is not None:
            self._writer.poll()
        return super().train(rollout_id, batch)

    def _train_batch(self, batch: Mapping[str, Any]) -> TrainBatch:
        vision = self._shape.vision
        tokens = vision and MediaTokens(vision.image_token, vision.video_token, vision.start_token, vision.merge_size)
        return TrainBatch(dict(batch), accelerator.current().device(), self._ready.sharding, tokens)

    def _reset_moments(self) -> None:
        from slime.backends.megatron_utils.optimizer.build import reset_moments

        reset_moments(self._ready.optimizer)

    def _copied_weights(self) -> WeightBackup:
        from slime.backends.megatron_utils.offload import copied_weights

        return copied_weights(self._ready.chunks)

    def _expert_choices(self, batch: TrainBatch, *, is_step: bool) -> AbstractContextManager[None]:
        """What decides over experts: the routers, the engine, or in training the pass for the old policy."""
        if self._replay is None:
            return nullcontext()
        if self._copies.use_rollout_routing_replay:
            from slime.backends.megatron_utils.parallel.engine_routing import engine_choices

            return self._replay.replaying(engine_choices(batch, self._shape))
        if not is_step:
            return self._replay.recording()
        return self._replay.replaying() if self._replay.is_recorded else nullcontext()

    def _outputs(
        self, batch: TrainBatch, read: ReadOutput, shape: tuple[int, ...] = (), store_prefix: str = ""
    ) -> list[torch.Tensor]:
        from slime.backends.megatron_utils.step import from_last_stage, outputs_of_last_stage

        self._hooks.before_log_probs(self._ready, store_prefix)
        results = outputs_of_last_stage(self._ready.chunks, batch, read)
        return from_last_stage(results, batch.columns["response_lengths"], shape)

    def _step(self, rollout_id: int, step: int, context: LossContext) -> StepResult:
        from slime.backends.megatron_utils.step import train_step

        before = partial(self._hooks.before_step, self._ready, rollout_id, step)
        return train_step(self._ready, context, step, place=self._place, before=before)

    def _whole_batch(self, results: dict[int, torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
        from slime.backends.megatron_utils.step import from_last_stage

        return from_last_stage(results, lengths)

    # ------------------------------------------------------------------------------------------------ weights

    def save(self, rollout_id: int) -> None:
        """Write ``<save>/iter_<rollout_id>``; complete when this returns on all ranks, unless --async-save."""
        from slime.backends.megatron_utils.checkpoint.state import CheckpointContent
        from slime.backends.megatron_utils.checkpoint.writer import CheckpointWriter

        self._device.require(["weights", "optimizer"], "a checkpoint")
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

    def finish_saves(self) -> None:
        """Complete the checkpoint that ``--async-save`` is writing, if there is one."""
        if self._writer is not None:
            self._writer.finish()

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint at ``path``; an error on the writing rank is raised on all."""
        from slime.backends.megatron_utils.checkpoint.hf_weights import export_weights

        self._device.require(["weights"], "a Hugging Face checkpoint")
        source = self._args.hf_checkpoint
        weights = export_weights(self._ready.model, self._shape, layout_of=source)
        save_hf_directory(weights, source, path, is_writer=self.is_weight_source)

    def export_weights(self, bucket_bytes: int = 512 * 1024**2) -> Iterator[NamedTensor]:
        """All weights under their Hugging Face names, full and unpadded; ``bucket_bytes`` are gathered at a time."""
        from slime.backends.megatron_utils.checkpoint.hf_weights import export_weights

        self._device.require(["weights"], "the export of weights")
        return export_weights(self._ready.model, self._shape, bucket_bytes)
