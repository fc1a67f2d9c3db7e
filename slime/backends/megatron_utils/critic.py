"""The critic of PPO: the policy's architecture with a value head, trained towards the returns.

    train()   values before the update -> returns -> optimizer steps on the value loss

The returns have the penalty of ``--kl-coef`` like the rewards of the policy, which computes the KL divergence first.

Its values are the baseline of the policy's advantages: ``slime.ray`` hands them on. Rank i of the critic has the
samples of rank i of the policy, hence both have the same parallel layout.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

import torch

from slime.algorithms.arguments import DistillationArgs
from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.protocols import TRAINER_PARTS, TrainReport
from slime.backends.training.checkpoint_source import Source
from slime.backends.training.credit import CustomFunctions, add_credit
from slime.backends.training.loss import response_values
from slime.backends.training.steps import rollout_report
from slime.observability.profile_utils import timed


class MegatronCritic(MegatronTrainer):
    """A trainer whose model estimates the value of a state. It has no reference, no teacher and exports no weights."""

    is_critic = True

    def __init__(self, args: Namespace, *, rank: int, world_size: int, with_ref: bool = False) -> None:
        super().__init__(args, rank=rank, world_size=world_size, with_ref=False)
        # The penalty of a batch comes with it (reward_kl of the policy).
        self._algorithm = dataclasses.replace(self._algorithm, kl_coef=0.0, use_kl_loss=False)
        self._distillation = DistillationArgs()
        self._custom = CustomFunctions()

    def _fill(self, source: Source) -> None:
        """Everything but the head, which keeps its fresh weights if the source has none that fits."""
        from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights
        from slime.backends.megatron_utils.checkpoint.state import load_model_weights
        from slime.backends.megatron_utils.model.gpt import VALUE_HEAD_PARAMETERS

        if source.format == "hf":
            load_weights(self._ready.model, self._shape, source.directory, source.flag, has_lm_head=False)
        else:
            load_model_weights(self._ready.model, self._shape, source, optional=VALUE_HEAD_PARAMETERS)

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
