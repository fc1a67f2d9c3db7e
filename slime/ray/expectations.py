"""What ``--ci-test`` expects of a run's numbers, and gradient norms that one run leaves for another to compare with.

Called by the loop after the metrics of a rollout are logged, so that the ones that failed are on record. Knows numbers
only. A metric that a run does not have (no reference, no engine) is not expected of it.
"""

from __future__ import annotations

import math
import string
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slime.backends.protocols import TrainReport
from slime.config import notices
from slime.config.arguments import CiArgs
from slime.config.groups import flag_of, from_args
from slime.utils.errors import DataError, SlimeError

_ZERO = 1e-8
"""What is zero in exact arithmetic may be this large: the same numbers, summed in another order."""
_SAME_NORM = 0.01
"""Gradient norms of two runs agree to this, relative or absolute."""
_FIELDS = {"role", "rollout_id", "step_id"}


class ExpectationFailed(SlimeError, AssertionError):
    """Numbers of the run are not what ``--ci-test`` or ``--ci-load-grad-norm`` expects."""


@dataclass(frozen=True)
class _Expectation:
    """``low < value < high``; NaN is in no range."""

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
    """Compare the metrics of a trained rollout with what is expected, all of them in one error.

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


# ------------------------------------------------------------------------------------------------ gradient norms


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


# ------------------------------------------------------------------------------------------------ rules of the flags


def _templates(args: Namespace) -> Iterator[str]:
    for name in ("ci_save_grad_norm", "ci_load_grad_norm"):
        template = getattr(args, name)
        if template is None:
            continue
        try:
            fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
        except ValueError as error:
            yield f"{flag_of(name)} {template} is no template: {error}."
            continue
        needed = {"rollout_id", "step_id"} | ({"role"} if args.use_critic else set())
        if fields - _FIELDS or needed - fields:
            named = ", ".join(f"{{{field}}}" for field in sorted(needed))
            yield f"{flag_of(name)} {template} must name one file for each norm: use {named}, and no other field."
    if args.ci_save_grad_norm is not None and args.ci_load_grad_norm is not None:
        notices.warn(args, "--ci-load-grad-norm", "no effect: --ci-save-grad-norm writes the norms instead")


def _unused(args: Namespace) -> Iterator[str]:
    for name in ("ci_disable_kl_checker", "ci_train_rollout_logprob_abs_diff_threshold"):
        if name in args.given and not args.ci_test:
            notices.warn(args, flag_of(name), "no effect without --ci-test")
    yield from ()


RULES = (_templates, _unused)
