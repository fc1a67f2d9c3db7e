"""The engine's choices of experts on their way from samples to columns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.batch.compile import compile_train_data
from slime.batch.rewards import RewardArgs
from slime.data.engine_meta import check_routed_experts
from slime.data.sample import Sample
from slime.observability.rollout_data_utils import validate_rollout_routed_experts_for_replay
from slime.utils.errors import DataError

_LAYERS, _TOPK = 2, 2


def _rows(count: int, *, start: int = 0) -> torch.Tensor:
    """[row, layer, k] = start + 4 * row + 2 * layer + k"""
    return start + torch.arange(count * _LAYERS * _TOPK, dtype=torch.int32).view(count, _LAYERS, _TOPK)


def _sample(experts: Any, *, length: int = 5, mask: list[int] | None = None, **more: Any) -> Sample:
    mask = [1, 1, 1] if mask is None else mask
    tokens = list(range(length))
    return Sample(
        index=7,
        tokens=tokens,
        response_length=len(mask),
        loss_mask=mask,
        reward=1.0,
        rollout_routed_experts=experts,
        **more,
    )


def _column(*samples: Sample) -> list[torch.Tensor]:
    column: list[torch.Tensor] = compile_train_data(list(samples), rewards=RewardArgs())["rollout_routed_experts"]
    return column


def test_choices_become_the_smallest_integers_that_hold_them() -> None:
    (small,) = _column(_sample(_rows(4)))
    assert small.dtype == torch.uint8
    assert torch.equal(small.int(), _rows(4))
    large, other = _column(_sample(_rows(4, start=250).tolist()), _sample(_rows(4)))
    assert large.dtype == other.dtype == torch.int16
    assert torch.equal(large.int(), _rows(4, start=250))


def test_rows_behind_the_last_trained_token_may_be_missing() -> None:
    ends_with_a_tools_output = _sample(_rows(3), length=6, mask=[1, 0, 0])
    nothing_trained = _sample(None, length=4, remove_sample=True)
    tool, removed = _column(ends_with_a_tools_output, nothing_trained)
    assert torch.equal(tool[:3].int(), _rows(3))
    assert tool[3:].tolist() == [[[0, 1]] * _LAYERS] * 2
    assert removed.tolist() == [[[0, 1]] * _LAYERS] * 3


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (_sample(_rows(3), length=6, mask=[1, 1, 0]), r"sample 7 .* shape \(3, 2, 2\) for 6 tokens, expected \(5, 2"),
        (_sample(_rows(5)), r"shape \(5, 2, 2\) for 5 tokens, expected \(4, 2, 2\): one row per token but the last"),
        (_sample(_rows(4)[:, :1]), r"shape \(4, 1, 2\) .* expected \(4, 2, 2\)"),
        (_sample(_rows(4)[..., 0]), r"shape \(4, 2\)"),
        (_sample(_rows(4, start=-1)), "routed expert -1: the engine left a choice out"),
        (_sample(None), "has trained tokens but no rollout_routed_experts"),
    ],
)
def test_choices_that_do_not_belong_to_the_tokens_are_refused(sample: Sample, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _column(_sample(_rows(4)), sample)


def test_choices_that_no_router_makes_are_refused() -> None:
    model = {"num_layers": 3, "topk": 2, "moe_layers": [1, 2], "num_experts": 8}
    good = torch.tensor([[[99, 99], [0, 1], [3, 2]], [[0, 0], [7, 6], [5, 4]]])  # layer 0 is dense
    check_routed_experts([good], **model)
    for change, message in (
        ((0, 1, 0, 8), "hold the number 8, but a layer has 8 experts"),
        ((0, 2, 0, 2), "name one expert twice for the same token"),
    ):
        bad = good.clone()
        bad[change[:3]] = change[3]
        with pytest.raises(ValueError, match=message):
            check_routed_experts([bad], **model)
    empty = good.clone()
    empty[:, 2] = 0
    with pytest.raises(ValueError, match=r"of sample 1 are all zero in layers \[2\]"):
        check_routed_experts([good, empty], **model)


def test_the_public_check_reads_the_model_from_the_arguments() -> None:
    args = SimpleNamespace(num_layers=2, moe_router_topk=2, moe_layer_freq=[0, 1], num_experts=40)
    validate_rollout_routed_experts_for_replay([_rows(4)], args)
    silent = _rows(4)
    silent[:, 0] = 0
    validate_rollout_routed_experts_for_replay([silent], args)
    with pytest.raises(ValueError, match=r"all zero in layers \[0\]"):
        validate_rollout_routed_experts_for_replay([silent], SimpleNamespace(num_layers=2, moe_router_topk=2))
    with pytest.raises(ValueError, match="Invalid rollout routed-experts shape"):
        validate_rollout_routed_experts_for_replay([_rows(4)[:, :1]], args)
    with pytest.raises(ValueError, match="no rows"):
        validate_rollout_routed_experts_for_replay([_rows(0)], args)
    with pytest.raises(ValueError, match="list of samples is empty"):
        validate_rollout_routed_experts_for_replay([], args)
