"""The dump of the trained samples is the same file on every layout, except for the rank of each sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_trainer import make_batch, make_hf_model

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "data": (2, 0, {}),
    "context": (2, 0, {"context_parallel_size": 2}),
    "pipeline": (2, 1, {"pipeline_model_parallel_size": 2}),
}


def dump(ranks: ForkServer, directory: Path, world_size: int, **args: Any) -> tuple[str, dict[str, Any]]:
    """The name and the content of the only file."""
    name = "_".join(args) or str(world_size)
    batch = make_batch(8, seed=6)
    settings = args | {"save_debug_train_data": str(directory / name / "{rollout_id}_{rank}.pt")}
    case = "tests.dist.train_dump_cases:train_and_dump"
    ranks.run(case, world_size, hf=str(directory / "hf"), batch=batch, args=settings)
    (file,) = (directory / name).iterdir()
    return file.name, torch.load(file, weights_only=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train_dump")
    make_hf_model("qwen3", path / "hf")
    return path


@pytest.fixture(scope="module")
def alone(ranks: ForkServer, directory: Path) -> dict[str, Any]:
    return dump(ranks, directory, 1)[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_dump_does_not_depend_on_the_layout(
    ranks: ForkServer, directory: Path, alone: dict[str, Any], layout: str
) -> None:
    world_size, writer, args = LAYOUTS[layout]
    name, split = dump(ranks, directory, world_size, **args)
    assert name == f"2_{writer}.pt"
    assert split["raw_reward"] == alone["raw_reward"]
    shards = world_size if layout == "data" else 1
    assert [shard["data_parallel_rank"] for shard in split["dp_shards"]] == list(range(shards))
    assert {sample["data_parallel_rank"] for sample in split["samples"]} == set(range(shards))
    for one, other in zip(split["samples"], alone["samples"], strict=True):
        assert one["rollout_position"] == other["rollout_position"]
        assert one.keys() == other.keys()
        for column in ("tokens", "log_probs", "advantages"):
            torch.testing.assert_close(one[column], other[column], rtol=1e-4, atol=1e-5)
