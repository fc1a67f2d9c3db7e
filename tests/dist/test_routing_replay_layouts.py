"""Routing replay repeats the same choices on every layout: training equals that of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.comparison import NASTY, PLAIN, Result, layout_args, main_rank
from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_batch

_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay")
    make_family_checkpoint("qwen3_moe", path / "hf", num_hidden_layers=4, mlp_only_layers=[])
    return path


@pytest.fixture(scope="module")
def one_rank(ranks: ForkServer, directory: Path) -> tuple[Result, Result]:
    """With replay, and without."""
    with_replay, without = (_train(ranks, 1, directory, "", use_routing_replay=on) for on in (True, False))
    return main_rank(with_replay), main_rank(without)


def _train(ranks: ForkServer, world_size: int, directory: Path, layout: str, **arguments: Any) -> list[Result]:
    # a learning rate at which the second step's own choices differ from the first's
    settings = PLAIN | layout_args(layout) | {"use_routing_replay": True, "lr": 0.02} | arguments
    settings |= {"output_dir": str(directory)}
    batch = make_batch(16, seed=1, lengths=NASTY)
    case = {"hf": str(directory / "hf"), "batch": batch, "num_steps": 2, "args": settings, "size": 2}
    return ranks.run("tests.dist.layout_cases:train", world_size, **case)


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [("ep2", {}), ("pp2 vpp2", _RECOMPUTE), ("tp2 sp ep2 etp1", {})],
    ids=["ep2", "pp2-vpp2-recompute", "tp2-sp-ep2"],
)
def test_replayed_training_equals_that_of_one_rank(
    layout: str,
    arguments: dict[str, Any],
    ranks: ForkServer,
    directory: Path,
    one_rank: tuple[Result, Result],
) -> None:
    reference, without = one_rank
    results = _train(ranks, 2, directory, layout, **arguments)
    for step in ({"steps": result["report"].steps} for result in results):
        assert step["steps"] in ([], main_rank(results)["report"].steps)
    first, second = reference["report"].steps
    assert second["loss"] != without["report"].steps[1]["loss"], "choices do flip at this learning rate"
    assert main_rank(results)["report"].steps[0]["loss"] == pytest.approx(first["loss"], abs=1e-5)
    assert main_rank(results)["report"].steps[1]["loss"] == pytest.approx(second["loss"], rel=1e-3, abs=1e-4)
    for name, gradient in main_rank(results)["gradients"].items():
        torch.testing.assert_close(gradient, reference["gradients"][name], atol=3e-6, rtol=1e-5, msg=name)
