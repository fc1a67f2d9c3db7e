"""The schedule of learning rate and weight decay is Megatron's, at every step."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from slime.backends.training.arguments import OptimizerArgs
from slime.backends.training.optimizer import RateSchedule, ScheduledRates


@pytest.mark.parametrize(
    "settings",
    [
        {"lr_decay_style": "constant", "lr_warmup_iters": 3},
        {"lr_decay_style": "linear", "lr_warmup_iters": 2, "lr_warmup_init": 1e-5, "min_lr": 1e-4},
        {"lr_decay_style": "cosine", "lr_warmup_fraction": 0.25, "weight_decay_incr_style": "linear"},
        {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 2, "min_lr": 3e-4},
        {"lr_decay_style": "inverse-square-root", "weight_decay_incr_style": "cosine", "lr_decay_iters": 5},
        *(
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": style, "lr_warmup_iters": 1}
            for style in ("linear", "cosine", "exponential", "minus_sqrt")
        ),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_every_style_gives_the_rates_of_megatron_s_scheduler(settings: dict[str, Any]) -> None:
    from slime.backends.megatron_utils.patches import install

    install()
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    if settings.get("weight_decay_incr_style", "constant") != "constant":
        settings = settings | {"start_weight_decay": 0.01, "end_weight_decay": 0.2}
    args = OptimizerArgs(lr=1e-3, **settings)
    schedule = RateSchedule.of(args, num_steps=12, global_batch_size=8)
    theirs, ours = _optimizer("wd_mult"), _optimizer("decay_factor")
    megatron = OptimizerParamScheduler(
        theirs, **asdict(schedule), override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=False
    )
    rates = ScheduledRates(ours, schedule)
    seen = set()
    for _ in range(15):
        for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert (mine["lr"], mine["weight_decay"]) == pytest.approx((other["lr"], other["weight_decay"]), rel=1e-12)
        seen.add(ours.param_groups[0]["lr"])
        megatron.step(8)
        rates.advance(8)
    assert len(seen) > 3


def test_a_resumed_schedule_goes_on_where_it_stopped_with_the_new_flags_or_the_old_ones() -> None:
    def made(lr: float, *, follows_checkpoint: bool = False) -> tuple[torch.optim.Optimizer, ScheduledRates]:
        args = OptimizerArgs(lr=lr, lr_decay_style="linear")
        optimizer = _optimizer("decay_factor")
        schedule = RateSchedule.of(args, num_steps=10, global_batch_size=1)
        return optimizer, ScheduledRates(optimizer, schedule, follows_checkpoint=follows_checkpoint)

    _, first = made(1.0)
    first.advance(5)
    for follows, expected in ((False, 0.1), (True, 0.5)):
        optimizer, resumed = made(0.2, follows_checkpoint=follows)
        resumed.load_state_dict(first.state_dict())
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def _optimizer(factor: str) -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(2)], factor: 1.0}, {"params": [torch.zeros(1)], factor: 0.0}]
    return torch.optim.SGD(groups, lr=1.0)
