"""Computes the advantages of a rank's batch, and the forward passes that they need.

Called by ``trainer`` between the forward passes and the optimizer steps. The formulas are in
``slime.algorithms.credit``. Every context-parallel rank does the same work on whole responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from slime.algorithms import credit as formulas
from slime.algorithms.arguments import AlgorithmArgs, DistillationArgs, needs_reference
from slime.algorithms.types import Credit, CreditData, Ragged
from slime.backends.training.custom import CustomFunctions
from slime.utils import accelerator
from slime.utils.errors import DataError


@dataclass(frozen=True)
class Passes:
    """Forward passes before the steps of a rollout.

    Attributes:
        reference: log-probs under the reference model.
        teacher: log-probs under the teacher that the trainer holds.
        old: log-probs under the weights that the steps start from.
        credit: advantages are computed at all.
    """

    reference: bool = False
    teacher: bool = False
    old: bool = False
    credit: bool = False


def passes_needed(
    settings: AlgorithmArgs, distillation: DistillationArgs, *, num_steps: int, has_custom_advantages: bool = False
) -> Passes:
    """The passes that must run before the steps.

    One step per rollout needs no pass for the old policy, unless something reads its log-probs before the step.
    """
    if settings.loss_type == "sft_loss" or not settings.compute_advantages_and_returns:
        return Passes()
    credit_reads_policy = settings.kl_coef != 0 or distillation.use_opd or has_custom_advantages
    # the log-probs of the only step are those of the weights that it starts from: the ratio is exactly 1
    is_reused = num_steps == 1 and settings.loss_type == "policy_loss"
    if settings.use_rollout_logprobs:
        old = settings.get_mismatch_metrics and not is_reused
    else:
        old = credit_reads_policy or not is_reused
    return Passes(
        reference=needs_reference(settings),
        teacher=distillation.use_opd and distillation.opd_type == "megatron",
        old=old or settings.use_rollout_entropy,
        credit=True,
    )


def add_credit(
    columns: dict[str, Any],
    settings: AlgorithmArgs,
    distillation: DistillationArgs,
    custom: CustomFunctions,
    group: dist.ProcessGroup | None,
) -> None:
    """Fill ``kl``, ``advantages``, ``returns`` and under distillation ``opd_reverse_kl``.

    Args:
        columns: the rank's batch with the log-probs that :func:`passes_needed` asked for.
        group: data-parallel ranks without context parallelism. All of them call this.

    Raises:
        DataError: log-probs are missing.
    """
    policy = columns.get("rollout_log_probs" if settings.use_rollout_logprobs else "log_probs")
    data = CreditData(
        rewards=columns["rewards"],
        response_lengths=columns["response_lengths"],
        loss_masks=columns["loss_masks"],
        log_probs=policy,
        ref_log_probs=columns.get("ref_log_probs"),
        values=columns.get("values"),
    )
    try:
        columns["kl"] = formulas.reward_kl(data, settings)
        if custom.advantages is None:
            credit = formulas.estimate(data, columns["kl"], settings)
    except ValueError as error:
        raise DataError(str(error)) from error
    if custom.advantages is not None:
        custom.fill_advantages(columns)
        credit = Credit(list(columns["advantages"]), list(columns["returns"]))
    if distillation.use_opd:
        student, teacher = _distilled_pair(policy, columns.get("teacher_log_probs"))
        credit, columns["opd_reverse_kl"] = formulas.distilled(credit, student, teacher, distillation.opd_kl_coef)
    advantages = credit.advantages
    if settings.normalize_advantages:
        # the group's backend may not take tensors on the cpu, on which the columns are
        device = accelerator.current().device()
        advantages = formulas.normalize(advantages, columns["loss_masks"], group, device=device)
    columns["advantages"], columns["returns"] = advantages, credit.returns


def _distilled_pair(student: Ragged | None, teacher: Ragged | None) -> tuple[Ragged, Ragged]:
    if teacher is None:
        raise DataError(
            "--use-opd: the batch has no teacher_log_probs; with --opd-type sglang the reward function must set "
            "Sample.teacher_log_probs."
        )
    if student is None:
        raise DataError("--use-opd: the batch has no log-probs of the student.")
    return student, teacher
