"""One rank of the Megatron backend: the ``Trainer`` protocol on stock megatron-core, for the policy and its critic.

    setup()          groups -> model, optimizer -> checkpoint (torch_dist or HF) -> reference weights in host memory
    train()          log-probs of reference and old policy -> credit -> optimizer steps
    train_values()   of the critic: values before the update -> returns -> optimizer steps on the value loss

``training.trainer`` holds the steps that all backends share. ``slime.ray.train_actor`` calls every method on all ranks
at once. Importing this module repairs and imports megatron-core: import it in trainer processes only.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from slime.backends.megatron_utils.patches import install

# Before the first import of megatron.core: on a CPU its sources are rewritten during the import.
install()
# ruff: noqa: E402

from slime.algorithms.arguments import DistillationArgs
from slime.backends import TRAINER_PARTS, TrainReport
from slime.backends.megatron_utils.model.routing_replay import RoutingReplay, engine_choices
from slime.backends.megatron_utils.model_rules import sees_media
from slime.backends.megatron_utils.process_groups import init_distributed, rank_place
from slime.backends.megatron_utils.setup import build_train_state
from slime.backends.megatron_utils.step import TrainerHooks, from_last_stage, outputs_of_last_stage, train_step
from slime.backends.megatron_utils.weights import MegatronWeights, device_memory, num_missing_moments
from slime.backends.training.arguments import ParallelArgs, TrainerArgs
from slime.backends.training.credit import CustomFunctions, add_credit
from slime.backends.training.data import TrainBatch
from slime.backends.training.loss import LossContext, response_values
from slime.backends.training.media import MediaTokens
from slime.backends.training.steps import ReadOutput, StepResult, rollout_report
from slime.config.arguments import ClusterArgs
from slime.models.hf_shape import read_shape
from slime.observability.profile_utils import timed
from slime.utils import accelerator
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)


class MegatronTrainer(MegatronWeights):
    """The Megatron backend on one rank. The caller sets ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK`` and ``WORLD_SIZE``.

    Args:
        args: the resolved command line.
        with_ref: keep the reference model's weights in host memory and compute its log-probs.
    """

    def __init__(self, args: Namespace, *, rank: int, world_size: int, with_ref: bool = False) -> None:
        self._shape = read_shape(args.hf_checkpoint, with_vision=sees_media(args))
        super().__init__(args, rank=rank, world_size=world_size, with_ref=with_ref, vocab_size=self._shape.vocab_size)
        if self._lora is not None:
            self._shape = self._lora.with_adapters(self._shape)
        self._hooks = TrainerHooks.load(self._run)
        self._replay: RoutingReplay | None = None

    def setup(self) -> int:
        """Build the model and load the checkpoint. Return the rollout id to start with."""
        started = time.monotonic()
        init_distributed(
            self._run[ParallelArgs],
            self._run[TrainerArgs],
            num_optimizer_instances=self._args.num_distributed_optimizer_instances,
        )
        self._place = rank_place()
        if not self.is_critic:
            self._profiler.begin()
        self._hooks.after_init()
        self._ready = build_train_state(self._run, self._shape, is_critic=self.is_critic, lora=self._lora)
        self._device = device_memory(self._ready.chunks, self._ready.optimizer)
        cluster = self._run[ClusterArgs]
        if cluster.offload_train:
            self._device.pin_ahead(num_missing_moments(self._ready.optimizer))
        if cluster.offload_communicators:
            self._device.take_communicators()
        start = self._load_weights()
        if self._copies.use_routing_replay and not self.is_critic:
            if not self._shape.family.is_moe:
                kind = self._shape.model_type
                raise ConfigError(f"--use-routing-replay: a model of model_type {kind} has no experts.")
            self._replay = RoutingReplay(self._ready.model)
        if self._place.is_main:
            logger.info("trainer ready in %.1f s, starting with rollout %d", time.monotonic() - started, start)
        return start

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
        return train_step(self._ready, context, step, before=before)

    def _whole_batch(self, results: dict[int, torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
        return from_last_stage(results, lengths)


class MegatronCritic(MegatronTrainer):
    """The critic of PPO: the policy's architecture with a value head, trained towards the returns.

    Like the rewards of the policy, the returns have the penalty of ``--kl-coef``. The policy computes the KL divergence
    first. The values are the baseline of the policy's advantages: ``slime.ray`` hands them on. Rank i of the critic has
    the samples of rank i of the policy, hence both have the same parallel layout. A critic has no reference, no teacher
    and exports no weights.
    """

    is_critic = True

    def __init__(self, args: Namespace, *, rank: int, world_size: int, with_ref: bool = False) -> None:
        super().__init__(args, rank=rank, world_size=world_size, with_ref=False)
        # The penalty of a batch comes with it (reward_kl of the policy).
        self._algorithm = dataclasses.replace(self._algorithm, kl_coef=0.0, use_kl_loss=False)
        self._distillation = DistillationArgs()
        self._custom = CustomFunctions()

    def train_values(self, rollout_id: int, batch: dict[str, Any]) -> tuple[TrainReport, list[torch.Tensor]]:
        """Train on this rank's part of a rollout.

        Args:
            batch: may have ``kl``, fp32 ``[R_i]`` per sample, and its coefficient in the rewards, ``kl_coef``.

        Returns:
            The report, whose means over the rollout count if no policy is trained (--num-critic-only-steps). And the
            values under the weights before the update: fp32 ``[R_i]`` per sample, on the cpu.
        """
        self._device.require(TRAINER_PARTS, "training")
        if self._copies.reset_optimizer_states:
            self._reset_moments()
        seconds: dict[str, float] = {}
        train_batch = self._train_batch(batch)
        with self._bad_steps.dumping(rollout_id, batch):
            with timed(seconds, "critic_values"):
                # Before the update: the baseline must not know the step.
                batch_of_pass = self._for_passes(train_batch)
                values = self._outputs(batch_of_pass, lambda micro_batch, out: response_values(out, micro_batch))
            columns = train_batch.columns
            columns["values"] = values
            settings = dataclasses.replace(self._algorithm, kl_coef=columns.get("kl_coef", 0.0))
            add_credit(columns, settings, self._distillation, self._custom, self._place.dp_group)
            with timed(seconds, "critic_train"):
                steps = self._run_steps(rollout_id, train_batch)
        steps = [{f"critic-{name}": value for name, value in step.items()} for step in steps]
        report = rollout_report(columns, train_batch.num_rollouts_in_all, self._place.dp_group)
        return TrainReport(steps if self._place.is_main else [], report, seconds), values

    def train(self, rollout_id: int, batch: dict[str, Any]) -> TrainReport:
        return self.train_values(rollout_id, batch)[0]
