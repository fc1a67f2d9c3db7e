"""Learning rate and weight decay over a run against their formulas, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.arguments import OptimizerArgs
from slime.utils.errors import ConfigError

_BATCH = 8


def _run(num_steps: int, **flags: Any) -> list[tuple[float, float]]:
    """(learning rate, weight decay) of every step of a run of ``num_steps``, and after the last."""
    from slime.backends.megatron_utils.optimizer import build_scheduler

    weight = torch.nn.Parameter(torch.zeros(2, 2))
    group = {"params": [weight], "wd_mult": 1.0, "lr_mult": 1.0}
    optimizer = torch.optim.SGD([group], lr=1.0)
    args = OptimizerArgs(**({"lr": 1.0, "lr_decay_style": "constant"} | flags))
    scheduler = build_scheduler(optimizer, args, num_steps=num_steps, global_batch_size=_BATCH)
    seen = []
    for _ in range(num_steps + 1):
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]))
        scheduler.step(increment=_BATCH)
    return seen


def _rates(num_steps: int, **flags: Any) -> list[float]:
    return [rate for rate, _ in _run(num_steps, **flags)]


@pytest.mark.parametrize(
    ("style", "share"),
    [
        ("linear", lambda t: 1 - t),
        ("cosine", lambda t: (1 + math.cos(math.pi * t)) / 2),
        ("constant", lambda t: 1.0),
    ],
)
def test_a_schedule_goes_from_the_peak_to_the_minimum(style: str, share: Callable[[float], float]) -> None:
    flags: dict[str, Any] = {"lr": 0.5, "min_lr": 0.1, "lr_decay_style": style}
    low = 0.5 if style == "constant" else 0.1
    assert _rates(10, **flags) == pytest.approx([low + (0.5 - low) * share(step / 10) for step in range(11)])


def test_the_warm_up_starts_where_it_is_told_to() -> None:
    assert _rates(6, lr_warmup_iters=4)[:5] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert _rates(6, lr_warmup_iters=4, lr_warmup_init=0.2)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert _rates(10, lr_warmup_fraction=0.2)[:3] == pytest.approx([0.0, 0.5, 1.0])


@pytest.mark.parametrize(
    ("style", "share"),
    [
        ("linear", lambda t: 1 - t),
        ("cosine", lambda t: (1 + math.cos(math.pi * t)) / 2),
        ("exponential", lambda t: 2 * 0.5**t - 1),
        ("minus_sqrt", lambda t: 1 - math.sqrt(t)),
    ],
)
def test_wsd_is_constant_and_decays_in_the_last_steps(style: str, share: Callable[[float], float]) -> None:
    rates = _rates(10, lr_decay_style="WSD", lr_wsd_decay_iters=4, lr_wsd_decay_style=style, min_lr=0.1)
    assert rates[:7] == pytest.approx([1.0] * 7)
    assert rates[7:] == pytest.approx([0.1 + 0.9 * share(step / 4) for step in (1, 2, 3, 4)])


def test_weight_decay_stays_or_grows() -> None:
    assert {decay for _, decay in _run(4, weight_decay=0.1)} == {0.1}
    growing = _run(4, weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=0.2)
    assert [decay for _, decay in growing] == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])


def test_a_warm_up_as_long_as_the_run_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--lr-warmup-iters 4 is 4 steps of warm-up"):
        _run(4, lr_warmup_iters=4)


@pytest.mark.parametrize(("uses_checkpoint", "expected"), [(False, 0.5), (True, 1.0)])
def test_a_checkpoint_tells_how_far_the_run_is_and_its_schedule_only_on_request(
    uses_checkpoint: bool, expected: float
) -> None:
    from slime.backends.megatron_utils.optimizer import build_scheduler

    def build(lr: float) -> tuple[Any, torch.optim.SGD]:
        group = {"params": [torch.nn.Parameter(torch.zeros(1))], "wd_mult": 1.0, "lr_mult": 1.0}
        optimizer = torch.optim.SGD([group], lr=1.0)
        args = OptimizerArgs(lr=lr, lr_decay_style="constant", use_checkpoint_opt_param_scheduler=uses_checkpoint)
        return build_scheduler(optimizer, args, num_steps=10, global_batch_size=_BATCH), optimizer

    first, _ = build(1.0)
    first.step(increment=3 * _BATCH)
    second, _ = build(0.5)
    second.load_state_dict(first.state_dict())
    assert second.num_steps == 3 * _BATCH
    assert second.max_lr == expected
