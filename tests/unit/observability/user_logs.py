"""Functions that a user would write to log a rollout, and an evaluation for them to log."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.observability.logging_utils import log


def beside(rollout_id: int, args: Namespace, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> None:
    metrics = {"rollout/mine": len(samples), "rollout/drops": rollout_extra_metrics.get("drops", -1)}
    log(args, metrics | {"rollout/step": rollout_id}, step_key="rollout/step")


def instead(rollout_id: int, args: Namespace, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool:
    log(args, {"rollout/only": rollout_id, "rollout/step": rollout_id}, step_key="rollout/step")
    return True


def eval_beside(rollout_id: int, args: Namespace, data: Any, extra_metrics: Any) -> None:
    log(args, {f"eval/{name}/count": len(one["rewards"]) for name, one in data.items()}, step_key="eval/step")


def eval_instead(rollout_id: int, args: Namespace, data: Any, extra_metrics: Any) -> bool:
    eval_beside(rollout_id, args, data, extra_metrics)
    return True


def evaluate(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    return {"gsm8k": {"rewards": [1.0, 0.0]}}
