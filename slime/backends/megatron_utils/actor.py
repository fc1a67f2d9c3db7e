"""One rank of the Megatron backend: the ``Trainer`` protocol on stock megatron-core.

    setup()   groups -> model, optimizer -> checkpoint (torch_dist or HF) -> reference weights in host memory

``training.trainer`` holds the steps that all backends share. ``slime.ray.train_actor`` calls every method on all ranks
at once. Importing this module repairs and imports megatron-core: import it in trainer processes only.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from slime.backends.megatron_utils.patches.install import install
from slime.backends.training.arguments import PluginArgs
from slime.config.groups import from_args
from slime.hooks.load import load_function

if TYPE_CHECKING:
    from slime.backends.megatron_utils.step import TrainState

# Before the first import of megatron.core: on a CPU its sources are rewritten during the import.
install()
# ruff: noqa: E402

from megatron.core import parallel_state as mpu

from slime.backends.megatron_utils.checkpoint.adapters import fill_adapters
from slime.backends.megatron_utils.checkpoint.hf_weights import Content, export_weights, load_weights, save_adapters
from slime.backends.megatron_utils.checkpoint.state import CheckpointContent, load_model_weights, load_training_state
from slime.backends.megatron_utils.checkpoint.writer import CheckpointWriter
from slime.backends.megatron_utils.model.routing_replay import RoutingReplay, engine_choices
from slime.backends.megatron_utils.model_rules import sees_media
from slime.backends.megatron_utils.offload import adapters_off, copied_weights, device_memory, num_missing_moments
from slime.backends.megatron_utils.optimizer.build import reset_moments
from slime.backends.megatron_utils.setup import build_train_state, init_distributed
from slime.backends.megatron_utils.step import (
    TrainState,
    from_last_stage,
    outputs_of_last_stage,
    tensor_group,
    train_step,
)
from slime.backends.protocols import EVERY_RANK, NamedTensor, Recipients, TrainReport
from slime.backends.training.arguments import ParallelArgs, TrainerArgs
from slime.backends.training.checkpoint_source import Source
from slime.backends.training.data import RankPlace, TrainBatch
from slime.backends.training.hf_files import save_hf_directory
from slime.backends.training.loss import LossContext
from slime.backends.training.media import MediaTokens
from slime.backends.training.offload import WeightBackup
from slime.backends.training.steps import ReadOutput, StepResult
from slime.backends.training.trainer import TrainerBase
from slime.config.arguments import ClusterArgs
from slime.models.hf_shape import read_shape
from slime.models.shape import ModelShape
from slime.utils import accelerator
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)


class MegatronTrainer(TrainerBase):
    """The Megatron backend on one rank. The caller sets ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK`` and ``WORLD_SIZE``.

    Args:
        args: the resolved command line.
        with_ref: keep the reference model's weights in host memory and compute its log-probs.
    """

    def __init__(self, args: Namespace, *, rank: int, world_size: int, with_ref: bool) -> None:
        self._shape: ModelShape = read_shape(args.hf_checkpoint, with_vision=sees_media(args))
        super().__init__(args, rank=rank, world_size=world_size, with_ref=with_ref, vocab_size=self._shape.vocab_size)
        if self._lora is not None:
            self._shape = self._lora.with_adapters(self._shape)
        self._hooks = TrainerHooks.load(args)
        self._state: TrainState | None = None
        self._writer: CheckpointWriter | None = None
        self._replay: RoutingReplay | None = None

    def setup(self) -> int:
        """Build the model and load the checkpoint. Return the rollout id to start with."""
        started = time.monotonic()
        init_distributed(
            from_args(ParallelArgs, self._args),
            from_args(TrainerArgs, self._args),
            num_optimizer_instances=self._args.num_distributed_optimizer_instances,
        )
        if not self.is_critic:
            self._profiler.begin()
        self._hooks.after_init()
        self._state = build_train_state(self._args, self._shape, is_critic=self.is_critic, lora=self._lora)
        self._memory = device_memory(self._state.chunks, self._state.optimizer)
        if from_args(ClusterArgs, self._args).offload_train:
            self._memory.pin_ahead(num_missing_moments(self._state.optimizer))
        start = self._load_weights()
        if self._copies.use_routing_replay and not self.is_critic:
            if not self._shape.family.is_moe:
                kind = self._shape.model_type
                raise ConfigError(f"--use-routing-replay: a model of model_type {kind} has no experts.")
            self._replay = RoutingReplay(self._state.model)
        if self._place.is_main:
            logger.info("trainer ready in %.1f s, starting with rollout %d", time.monotonic() - started, start)
        return start

    def _fill(self, source: Source) -> None:
        if source.format == "hf":
            load_weights(self._ready.model, self._shape, source.directory, source.flag)
        else:
            load_model_weights(self._ready.model, self._shape, source)

    def _fill_adapters(self) -> None:
        assert self._lora is not None, "the caller has asked"
        fill_adapters(self._ready.model, self._shape, self._lora, self._args.seed)

    def _adapters_off(self) -> AbstractContextManager[None]:
        return adapters_off(self._ready.model)

    @property
    def _adapter(self) -> Mapping[str, Any] | None:
        return self._ready.adapter

    def _begin_with_filled(self) -> None:
        self._ready.optimizer.reload_model_params()  # else its old main weights would overwrite the loaded weights

    def _resume(self, source: Source, *, has_optimizer: bool, has_rng: bool) -> None:
        load_training_state(self._ready, self._shape, source, CheckpointContent(has_optimizer, has_rng))

    @property
    def _ready(self) -> TrainState:
        assert self._state is not None, "setup() comes first"
        return self._state

    @property
    def _place(self) -> RankPlace:
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

    def train(self, rollout_id: int, batch: dict[str, Any]) -> TrainReport:
        """Train on this rank's part of a rollout."""
        if self._writer is not None:
            self._writer.poll()  # a collective: on all ranks, between steps
        return super().train(rollout_id, batch)

    def _train_batch(self, batch: Mapping[str, Any]) -> TrainBatch:
        vision = self._shape.vision
        tokens = None
        if vision is not None:
            tokens = MediaTokens(vision.image_token, vision.video_token, vision.start_token, vision.merge_size)
        shares, device = self._shares_prefixes, accelerator.current().device()
        return TrainBatch(dict(batch), device, self._ready.sharding, tokens, shares_prefixes=shares)

    def _reset_moments(self) -> None:
        reset_moments(self._ready.optimizer)

    def _copied_weights(self) -> WeightBackup:
        return copied_weights(self._ready.chunks, adapters_only=self._lora is not None)

    def _expert_choices(self, batch: TrainBatch, *, is_step: bool) -> AbstractContextManager[None]:
        """Fix the experts for a pass: as the engine chose, or in training as the pass for the old policy chose."""
        if self._replay is None:
            return nullcontext()
        if self._copies.use_rollout_routing_replay:
            return self._replay.replaying(engine_choices(batch, self._shape))
        if not is_step:
            return self._replay.recording()
        # A run without the pass for the old policy has nothing to repeat.
        return self._replay.replaying() if self._replay.is_recorded else nullcontext()

    def _outputs(
        self, batch: TrainBatch, read: ReadOutput, shape: tuple[int, ...] = (), store_prefix: str = ""
    ) -> list[torch.Tensor]:
        self._hooks.before_log_probs(self._ready, store_prefix)
        results = outputs_of_last_stage(self._ready.chunks, batch, read)
        return from_last_stage(results, batch.columns["response_lengths"], shape)

    def _step(self, rollout_id: int, step: int, context: LossContext) -> StepResult:
        before = partial(self._hooks.before_step, self._ready, rollout_id, step)
        return train_step(self._ready, context, step, place=self._place, before=before)

    def _whole_batch(self, results: dict[int, torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
        return from_last_stage(results, lengths)

    def save(self, rollout_id: int) -> None:
        """Write ``<save>/iter_<rollout_id>``. Without --async-save it is complete when all ranks have returned."""
        self._device.require(["weights", "optimizer"], "a checkpoint")
        checkpoint = self._checkpoint
        if checkpoint.save is None:
            raise ConfigError("--save is required to write a checkpoint.")
        if self._writer is None:
            self._writer = CheckpointWriter(checkpoint.save, keep=checkpoint.keep_last_checkpoints)
        content = CheckpointContent(not checkpoint.no_save_optim, not checkpoint.no_save_rng)
        is_last = rollout_id + 1 == self._args.num_rollout
        # A resume takes the actor's latest iteration for both models, so the critic's must be complete before it.
        in_background = checkpoint.async_save and not is_last and not self.is_critic
        self._writer.save(self._ready, self._shape, self._args, rollout_id, content, in_background=in_background)

    def finish_saves(self) -> None:
        """Complete the checkpoint that ``--async-save`` is writing, if any."""
        if self._writer is not None:
            self._writer.finish()

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint at ``path``. An error of a writing rank is raised on all ranks."""
        self._device.require(["weights"], "a Hugging Face checkpoint")
        source = self._args.hf_checkpoint
        if self._lora is not None and not self._lora.merge:
            save_adapters(self._ready.model, self._shape, self._lora, source, path)
            return
        weights = export_weights(self._ready.model, self._shape, layout_of=source, content=self._content)
        save_hf_directory(weights, source, path)

    def export_weights(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        """All weights under their Hugging Face names, full and unpadded. Gathers ``bucket_bytes`` at a time."""
        self._device.require(["weights"], "the export of weights")
        return export_weights(self._ready.model, self._shape, bucket_bytes, recipients, content=self._content)

    def export_adapter(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        """The adapters alone under peft's names, whole. Gathers ``bucket_bytes`` at a time."""
        self._device.require(["weights"], "the export of adapters")
        return export_weights(self._ready.model, self._shape, bucket_bytes, recipients, content="adapters")

    @property
    def _content(self) -> Content:
        # engines get the base once, and then adapters
        return "merged" if self._lora is not None and self._lora.merge else "weights"


@dataclass(frozen=True)
class TrainerHooks:
    """The user's functions. None if the flag is not given."""

    args: Namespace
    init: Callable[..., Any] | None = None
    log_prob: Callable[..., Any] | None = None
    train_step: Callable[..., Any] | None = None

    @classmethod
    def load(cls, args: Namespace) -> TrainerHooks:
        """Load the functions that ``args`` names.

        Raises:
            ConfigError: a path that cannot be loaded.
        """
        paths = from_args(PluginArgs, args)

        def function(path: str | None) -> Callable[..., Any] | None:
            return None if path is None else load_function(path)

        return cls(
            args,
            init=function(paths.custom_megatron_init_path),
            log_prob=function(paths.custom_megatron_before_log_prob_hook_path),
            train_step=function(paths.custom_megatron_before_train_step_hook_path),
        )

    def after_init(self) -> None:
        """Call the first hook. The process groups exist, the model does not."""
        if self.init is not None:
            self.init(self.args)

    def before_log_probs(self, state: TrainState, store_prefix: str) -> None:
        """Call the second hook. The model holds the weights whose log-probs (columns ``<store_prefix>log_probs``) or
        values are computed next."""
        if self.log_prob is not None:
            self.log_prob(self.args, state.chunks, store_prefix)

    def before_step(self, state: TrainState, rollout_id: int, step: int) -> None:
        """Call the third hook. Gradients are zero, the step's first forward pass is next."""
        if self.train_step is not None:
            self.train_step(self.args, rollout_id, step, state.chunks, state.optimizer, state.scheduler)
