"""``--ci-test``: expected ranges of a run's metrics, gradient norms compared between runs, one injected engine failure.

The run loads ``check_expectations`` if a ``--ci-*`` flag needs it, and calls it after the metrics of a rollout are
logged: failed metrics are on record. A metric that a run does not have (no reference, no engine) is not checked. The
rollout manager loads ``StopFirstEngine`` with ``--ci-test --use-fault-tolerance``.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.backends import TrainReport
from slime.config.arguments import CiArgs
from slime.config.groups import from_args
from slime.utils.errors import DataError, SlimeError

_ZERO = 1e-8  # zero in exact arithmetic; the order of a sum may differ
_SAME_NORM = 0.01  # relative or absolute difference of gradient norms
_FAULTY_ROLLOUT = 2  # first rollout before which an engine is stopped

logger = logging.getLogger(__name__)


class ExpectationFailed(SlimeError, AssertionError):
    """Numbers of the run are not what ``--ci-test`` or ``--ci-load-grad-norm`` expects."""


@dataclass(frozen=True)
class _Expectation:
    """``low < value < high``. NaN is in no range."""

    metric: str
    value: float
    low: float
    high: float
    why: str

    @property
    def is_met(self) -> bool:
        return self.low < self.value < self.high

    def problem(self, where: str) -> str:
        limits = (f"above {self.low:g}" * (self.low != -math.inf), f"below {self.high:g}" * (self.high != math.inf))
        rule = " and ".join(limit for limit in limits if limit)
        return f"{self.metric} of {where} is {self.value:g}, it must be {rule}: {self.why}"


def check_expectations(args: Namespace, rollout_id: int, report: TrainReport) -> None:
    """Check the metrics of a trained rollout. All that fail are in one error.

    Raises:
        ExpectationFailed: metric, rollout and step, value, limits and meaning of each that is out of them.
        DataError: ``--ci-load-grad-norm`` names a file that is missing or holds no number.
    """
    ci = from_args(CiArgs, args)
    problems = []
    if ci.ci_test:
        whole = f"rollout {rollout_id}"
        problems += [e.problem(whole) for e in _of_rollout(args, ci, rollout_id, report.rollout) if not e.is_met]
        for step_id, step in enumerate(report.steps):
            where = f"{whole}, step {step_id}"
            problems += [e.problem(where) for e in _of_step(args, ci, rollout_id, step_id, step) if not e.is_met]
    problems += _compare_norms(ci, rollout_id, report)
    if problems:
        raise ExpectationFailed("\n".join(problems))


def _of_rollout(args: Namespace, ci: CiArgs, rollout_id: int, metrics: Mapping[str, float]) -> Iterator[_Expectation]:
    if "log_probs" in metrics:
        yield _Expectation("rollout/log_probs", metrics["log_probs"], -1, 0, "a trained model knows what it says")
    if "entropy" in metrics:
        yield _Expectation("rollout/entropy", metrics["entropy"], 0, 1, "a trained model knows what it says")
    starts_at_reference = rollout_id == 0 and _is_zero_expected(args, ci)
    if starts_at_reference and "log_probs" in metrics and "ref_log_probs" in metrics:
        difference = abs(metrics["log_probs"] - metrics["ref_log_probs"])
        why = "nothing is trained yet (--ci-disable-kl-checker where the reference is another model)"
        yield _Expectation("|rollout/log_probs - rollout/ref_log_probs|", difference, -math.inf, _ZERO, why)


def _of_step(
    args: Namespace, ci: CiArgs, rollout_id: int, step_id: int, metrics: Mapping[str, float]
) -> Iterator[_Expectation]:
    if "train_rollout_logprob_abs_diff" in metrics:
        value, limit = metrics["train_rollout_logprob_abs_diff"], ci.ci_train_rollout_logprob_abs_diff_threshold
        why = "trainer and engine read the same tokens (--ci-train-rollout-logprob-abs-diff-threshold)"
        # nextafter: the limit itself is allowed.
        yield _Expectation("train/train_rollout_logprob_abs_diff", value, -math.inf, math.nextafter(limit, 1e9), why)
    if "mtp_loss" in metrics:
        yield _Expectation("train/mtp_loss", metrics["mtp_loss"], 0, math.inf, "it is a cross entropy")
    if step_id > 0 or not _is_zero_expected(args, ci):
        return
    # the old policy of engines, or of an earlier version of the weights, is another one
    if "ppo_kl" in metrics and not args.use_rollout_logprobs and not args.keep_old_actor:
        why = "no step was made since the old log-probs (--ci-disable-kl-checker)"
        yield _Expectation("|train/ppo_kl|", abs(metrics["ppo_kl"]), -math.inf, _ZERO, why)
    if "kl_loss" in metrics and rollout_id == 0:
        why = "nothing is trained yet (--ci-disable-kl-checker where the reference is another model)"
        yield _Expectation("|train/kl_loss|", abs(metrics["kl_loss"]), -math.inf, _ZERO, why)


def _is_zero_expected(args: Namespace, ci: CiArgs) -> bool:
    """With choices of experts replayed, the reference chooses by itself: then two passes of a model may differ."""
    return not (ci.ci_disable_kl_checker or args.use_routing_replay or args.use_rollout_routing_replay)


def _compare_norms(ci: CiArgs, rollout_id: int, report: TrainReport) -> list[str]:
    template = ci.ci_save_grad_norm or ci.ci_load_grad_norm
    if template is None:
        return []
    problems = []
    for step_id, step in enumerate(report.steps):
        for role, name in (("actor", "grad_norm"), ("critic", "critic-grad_norm")):
            if name not in step:
                continue
            file = Path(template.format(role=role, rollout_id=rollout_id, step_id=step_id))
            if ci.ci_save_grad_norm is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(f"{step[name]!r}\n", encoding="utf-8")
            elif not math.isclose(step[name], saved := _read_norm(file), rel_tol=_SAME_NORM, abs_tol=_SAME_NORM):
                problems.append(
                    f"train/{name} of rollout {rollout_id}, step {step_id} is {step[name]:g}, --ci-load-grad-norm "
                    f"{file} holds {saved:g}: they may differ by {_SAME_NORM:g}, relative or absolute"
                )
    return problems


def _read_norm(file: Path) -> float:
    try:
        return float(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"--ci-load-grad-norm {file}: {error}. Write it with --ci-save-grad-norm in a run with as many rollouts "
            "and steps."
        ) from None


class StopFirstEngine:
    """Stops the first engine once, so that the rest of the run shows whether ``--use-fault-tolerance`` replaces it."""

    def __init__(self) -> None:
        self._has_stopped = False

    def __call__(self, rollout_id: int, engines: Any) -> None:
        """Called before rollout ``rollout_id`` with the fleet of all engines."""
        if self._has_stopped or rollout_id < _FAULTY_ROLLOUT:
            return
        self._has_stopped = True
        logger.warning("--ci-test: the first engine is stopped now, --use-fault-tolerance must replace it")
        engines.only([0]).start("stop")  # do not wait: the actor ends as soon as its death is noticed
