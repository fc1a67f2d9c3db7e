"""The place of optimizer states changes no number: instances of the sharded optimizer, and Muon's matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.comparison import PLAIN, Result, assert_replicas_agree, layout_args, main_rank
from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_batch, make_hf_model


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("optimizers") / "hf"
    make_hf_model("qwen3", path, num_hidden_layers=2)
    return path


def _train(ranks: ForkServer, hf: Path, world_size: int, layout: str = "", **arguments: Any) -> list[Result]:
    return ranks.run(
        "tests.dist.layout_cases:train",
        world_size,
        hf=str(hf),
        batch=make_batch(16, seed=1),
        num_steps=2,
        args=PLAIN | layout_args(layout) | arguments,
    )


def _assert_same(ours: list[Result], theirs: list[Result], *, tolerance: float) -> None:
    assert_replicas_agree(ours)
    for step, other in zip(main_rank(ours)["report"].steps, main_rank(theirs)["report"].steps, strict=True):
        for name in ("loss", "grad_norm"):
            assert step[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)
    for name, value in theirs[0]["weights"].items():
        torch.testing.assert_close(ours[0]["weights"][name], value, rtol=0, atol=tolerance, msg=name)


def test_two_instances_of_the_sharded_optimizer_train_like_one(ranks: ForkServer, hf: Path) -> None:
    one = _train(ranks, hf, 4, "distopt")
    two = _train(ranks, hf, 4, "distopt", num_distributed_optimizer_instances=2)
    _assert_same(two, one, tolerance=1e-6)
    assert two[0]["num_states"] == pytest.approx(2 * one[0]["num_states"], rel=0.05)


_SCHEDULE = {"lr": 1e-3, "lr_decay_style": "cosine", "lr_warmup_iters": 1, "weight_decay": 0.1, "num_rollout": 10}
_TWO_INSTANCES = (4, {"num_distributed_optimizer_instances": 2})
_MUON = {"optimizer": "muon"}
_DIST_MUON = {"optimizer": "dist_muon", "fp32": False}
_HOST = {"optimizer_cpu_offload": True}
_ROUNDING = 2.1e-3  # of weights in bf16: a step without the saved momentum is 3.9e-3 away


@pytest.mark.parametrize(
    ("saved", "loaded", "tolerance"),
    [
        (_TWO_INSTANCES, (1, {}), 2e-6),
        ((2, {}), _TWO_INSTANCES, 2e-6),
        ((2, _HOST), (1, {}), 2e-6),
        ((1, {}), (2, _HOST | {"tensor_model_parallel_size": 2, "sequence_parallel": True}), 2e-6),
        ((2, _MUON), (1, _MUON), 1e-5),
        ((2, _DIST_MUON), (2, _DIST_MUON), 0.0),
        ((2, _DIST_MUON), (1, _DIST_MUON), _ROUNDING),
    ],
)
def test_a_run_continues_where_other_ranks_have_the_states(
    saved: tuple[int, dict[str, Any]],
    loaded: tuple[int, dict[str, Any]],
    tolerance: float,
    ranks: ForkServer,
    hf: Path,
    tmp_path: Path,
) -> None:
    case = "tests.dist.checkpoint_cases:run"
    size, args = saved
    args = _SCHEDULE | args | {"save": str(tmp_path)}
    whole = ranks.run(case, size, hf=str(hf), args=args, rollouts=[0, 1, 2], save_after=[1])
    size, args = loaded
    args = _SCHEDULE | args | {"load": str(tmp_path)}
    for result in ranks.run(case, size, hf=str(hf), args=args, rollouts=[2], save_after=[]):
        assert (result["error"], result["start"]) == ("", 2)
        for name, value in whole[0]["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=0, atol=tolerance, msg=name)


@pytest.fixture(scope="module")
def muon(ranks: ForkServer, hf: Path) -> list[Result]:
    return _train(ranks, hf, 1, optimizer="muon")


@pytest.mark.parametrize(
    ("world_size", "layout", "arguments"),
    [
        (2, "tp2 sp", {}),
        (2, "tp2 sp", {"muon_tp_mode": "distributed"}),
        (2, "pp2", {}),
        (2, "", {"optimizer": "dist_muon"}),
    ],
)
def test_muon_trains_alike_on_every_layout(
    ranks: ForkServer, hf: Path, muon: list[Result], world_size: int, layout: str, arguments: dict[str, Any]
) -> None:
    _assert_same(_train(ranks, hf, world_size, layout, **{"optimizer": "muon"} | arguments), muon, tolerance=2e-5)


def test_muon_trains_experts_alike_on_every_layout(ranks: ForkServer, tmp_path: Path) -> None:
    make_family_checkpoint("qwen3_moe", tmp_path)
    one = _train(ranks, tmp_path, 1, optimizer="muon")
    _assert_same(_train(ranks, tmp_path, 2, "tp2 sp ep2 etp1", optimizer="muon"), one, tolerance=2e-5)


def test_muon_on_pieces_of_matrices_is_another_optimizer(ranks: ForkServer, hf: Path, muon: list[Result]) -> None:
    pieces = _train(ranks, hf, 2, "tp2 sp", optimizer="muon", muon_tp_mode="blockwise")
    name = "model.layers.0.mlp.down_proj.weight"
    assert (pieces[0]["weights"][name] - muon[0]["weights"][name]).abs().max() > 1e-3


def test_a_stage_with_nothing_to_train_takes_part_in_the_steps(ranks: ForkServer, hf: Path) -> None:
    only_first_stage = {"only_train_params_name_list": ["layers.0.*linear_fc1"]}
    one = _train(ranks, hf, 1, **only_first_stage)
    _assert_same(_train(ranks, hf, 2, "pp2", **only_first_stage), one, tolerance=2e-5)


_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 4000}


@pytest.mark.parametrize("layout", ["", "pp2"])
def test_overlapped_communication_changes_only_the_rounding_of_the_norm(
    ranks: ForkServer, hf: Path, layout: str
) -> None:
    world_size = 4 if layout else 2
    plain = _train(ranks, hf, world_size, f"{layout} distopt")
    _assert_same(_train(ranks, hf, world_size, f"{layout} distopt", **_OVERLAP), plain, tolerance=1e-6)
