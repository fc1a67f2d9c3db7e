"""The advantage estimators: one record each, and the only place in slime with their names.

Flag choices, checks, the plan, reward normalization, credit and the policy loss read these records. The formulas are
named by their path. The formulas of credit take ``CreditData`` and return ``Credit``.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch  # not at run time: the command line reads this file

Ragged: TypeAlias = "Sequence[torch.Tensor]"
"""One tensor ``[R_i]`` per sample."""


@dataclass(frozen=True)
class Estimator:
    """One value of ``--advantage-estimator``.

    Attributes:
        credit: path of ``f(data, kl, settings) -> Credit``: the advantage and the return of every response token.
        log_ratio: path of ``f(log_probs, old_log_probs, samples) -> [N]``, ``log pi_old - log pi_new``.
        surrogate: path of ``f(log_ratio, log_probs, advantages, settings) -> (loss [N], clipped [N])``.
        is_centered: rewards are the distance from the mean of their group.
        is_scaled: rewards are divided by the standard deviation of their group.
        has_kl_in_rewards: ``--kl-coef`` enters the advantages.
        needs_critic: a value function is trained with the policy.
        needs_whitening: advantages must be normalized over the batch (``--normalize-advantages``).
        paper_eps_clip: ``--eps-clip`` of the paper, if the default of the flag differs in effect.
    """

    name: str
    # paths instead of functions: the command line reads this table and must not import torch
    credit: str
    log_ratio: str = "slime.algorithms.ppo:token_log_ratio"
    surrogate: str = "slime.algorithms.ppo:surrogate"
    is_centered: bool = False
    is_scaled: bool = False
    has_kl_in_rewards: bool = False
    needs_critic: bool = False
    needs_whitening: bool = False
    paper_eps_clip: float | None = None


ESTIMATORS: dict[str, Estimator] = {
    record.name: record
    for record in (
        # the first record is the default of the flag
        Estimator("grpo", credit="slime.algorithms.credit:group_relative", is_centered=True, is_scaled=True),
        Estimator(
            "gspo",
            credit="slime.algorithms.credit:group_relative",
            log_ratio="slime.algorithms.policy_loss:sequence_log_ratio",
            is_centered=True,
            is_scaled=True,
        ),
        Estimator(
            "cispo",
            credit="slime.algorithms.credit:group_relative",
            surrogate="slime.algorithms.policy_loss:cispo_surrogate",
            is_centered=True,
            is_scaled=True,
            # the paper has no lower bound: 1 - EPS_CLIP is then 0, and no ratio is below
            paper_eps_clip=1,
        ),
        Estimator(
            "reinforce_plus_plus",
            credit="slime.algorithms.credit:reinforce_pp",
            has_kl_in_rewards=True,
            needs_whitening=True,
        ),
        Estimator(
            "reinforce_plus_plus_baseline",
            credit="slime.algorithms.credit:reinforce_pp_baseline",
            is_centered=True,
            has_kl_in_rewards=True,
            needs_whitening=True,
        ),
        Estimator("ppo", credit="slime.algorithms.ppo:credit", has_kl_in_rewards=True, needs_critic=True),
    )
}


@dataclass(frozen=True)
class CreditData:
    """The input of an estimator. Each ragged field has one fp32 ``[R_i]`` per sample, or is None.

    Attributes:
        rewards: per sample, after normalization by group if the estimator wants it.
        response_lengths: ``R_i``.
        loss_masks: per sample ``[R_i]``, 1 = trained.
        log_probs: of the policy that is corrected by KL terms: the old policy, or the engine's.
        ref_log_probs: of the reference model.
        values: of the critic.
    """

    rewards: Sequence[float]
    response_lengths: Sequence[int]
    loss_masks: Ragged
    log_probs: Ragged | None = None
    ref_log_probs: Ragged | None = None
    values: Ragged | None = None


@dataclass(frozen=True)
class Credit:
    """The credit of every response token.

    Attributes:
        advantages: one fp32 tensor ``[R_i]`` per sample, positive if the token should become more likely.
        returns: one fp32 tensor ``[R_i]`` per sample, the target of a value function.
    """

    advantages: list[torch.Tensor]
    returns: list[torch.Tensor]


def default_estimator() -> str:
    """The first name of the table."""
    return next(iter(ESTIMATORS))


def find_estimator(name: str) -> Estimator:
    """The record of ``--advantage-estimator name``.

    Raises:
        ValueError: unknown name.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"--advantage-estimator {name!r} is unknown")
    return ESTIMATORS[name]


@functools.cache
def formula(path: str) -> Callable[..., Any]:
    """The function that a record names as ``module:function``."""
    function: Callable[..., Any] = pkgutil.resolve_name(path)
    return function
