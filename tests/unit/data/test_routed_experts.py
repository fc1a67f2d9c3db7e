"""The engine's choices of experts on their way from samples to columns."""

from __future__ import annotations

import asyncio
import base64
import marshal
import threading
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.batch.compile import compile_train_data
from slime.batch.rewards import RewardArgs
from slime.data import engine_meta
from slime.data.engine_meta import check_routed_experts
from slime.data.sample import Sample
from slime.observability.rollout_data_utils import validate_rollout_routed_experts_for_replay
from slime.rollout.direct_engines import with_packed_experts
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


def _reply(rows: torch.Tensor) -> dict[str, Any]:
    encoded = base64.b64encode(rows.to(torch.int32).numpy().tobytes()).decode()
    return {"meta_info": {"routed_experts": encoded}}


def _received(meta: dict[str, Any], count: int) -> torch.Tensor:
    sample = Sample(tokens=[0] * (count + 1))
    args = SimpleNamespace(num_layers=_LAYERS, moe_router_topk=_TOPK)
    sample.append_response_tokens(args, meta_info=meta)
    experts: torch.Tensor = sample.rollout_routed_experts
    return experts


@pytest.mark.parametrize(
    ("start", "dtype"), [(0, torch.uint8), (252, torch.uint8), (253, torch.int16), (40_000, torch.int32)]
)
@pytest.mark.parametrize("piece", [16, 1 << 20])
def test_choices_are_narrow_in_the_sample_and_the_same_through_an_http_worker(
    start: int, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_meta, "_PIECE", piece)
    rows = _rows(1, start=start)
    direct = _received(_reply(rows)["meta_info"], 1)
    reply = _reply(rows)
    assert engine_meta.has_large_array(reply) == (piece == 16)
    engine_meta.pack_routed_experts(reply["meta_info"])
    by_worker = _received(marshal.loads(marshal.dumps(reply))["meta_info"], 1)
    assert direct.dtype == by_worker.dtype == dtype
    assert torch.equal(direct.int(), rows)
    assert torch.equal(by_worker.int(), rows)


def test_a_packed_reply_holds_a_byte_per_choice_and_its_packing_three() -> None:
    reply = _reply(torch.randint(0, 256, (4000, 58, 8)))
    choices = 4000 * 58 * 8
    text = len(reply["meta_info"]["routed_experts"])
    assert text == pytest.approx(choices * 16 / 3, abs=4)
    tracemalloc.start()
    try:
        engine_meta.pack_routed_experts(reply["meta_info"])
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held == pytest.approx(choices, rel=0.01)
    assert peak < 3.1 * choices + 2 * engine_meta._PIECE
    assert peak < 0.8 * text


def test_turns_of_different_width_fit_together_and_a_missing_choice_is_still_found() -> None:
    args = SimpleNamespace(num_layers=_LAYERS, moe_router_topk=_TOPK)
    sample = Sample(index=7, tokens=[0, 1], response_length=1, reward=1.0, loss_mask=[1], rollout_log_probs=[0.0])
    sample.append_response_tokens(args, meta_info=_reply(_rows(1))["meta_info"])
    later = _reply(_rows(1, start=400))["meta_info"] | {"routed_experts_start_len": 1}
    sample.append_response_tokens(args, tokens=[2], log_probs=[0.0], meta_info=later)
    assert torch.equal(sample.rollout_routed_experts.int(), torch.cat([_rows(1), _rows(1, start=400)]))
    with pytest.raises(DataError, match=r"sample 7 .* has the routed expert -1: the engine left a choice out"):
        _column(_sample(_received(_reply(_rows(4, start=-1))["meta_info"], 4)))


def test_a_complete_narrow_sample_is_not_copied() -> None:
    experts = _rows(4).to(torch.uint8)
    (column,) = _column(_sample(experts))
    assert column.data_ptr() == experts.data_ptr()


def test_large_choices_are_decoded_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(engine_meta, "pack_routed_experts", lambda meta: threads.append(threading.get_ident()))
    for count in (4, 1 << 18):
        asyncio.run(with_packed_experts(_reply(_rows(count))))
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    for other in ({}, {"meta_info": {}}, {"meta_info": {"routed_experts": None}}, "text", [1]):
        assert asyncio.run(with_packed_experts(other)) is other


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
