"""``train/step`` counts optimizer steps over rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends import TrainReport
from slime.ray.shards import RolloutResult
from tests.unit.ray.runs import make_run


@pytest.mark.parametrize(
    ("steps_of_rollouts", "numbers"),
    [([2, 2, 2], [0, 1, 2, 3, 4, 5]), ([2, 1, 3, 1], [0, 1, 2, 6, 7, 8, 9]), ([1, 0, 1], [0, 2])],
)
def test_the_number_of_a_step_never_goes_back(steps_of_rollouts: list[int], numbers: list[int]) -> None:
    logged: list[float] = []

    def log(metrics: Mapping[str, Any], *, step_key: str) -> None:
        if step_key == "train/step":
            logged.append(metrics[step_key])

    run = make_run(args={"world_size": 1}, tracker=SimpleNamespace(log=log, directory=None))
    for rollout_id, count in enumerate(steps_of_rollouts):
        run.report(rollout_id, RolloutResult([], {}), TrainReport([{"loss": 0.0}] * count, {}, {}))
    assert logged == numbers
