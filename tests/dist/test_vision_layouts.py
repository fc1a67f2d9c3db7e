"""Images: tower, positions and features of the first layers train on every layout as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.comparison import Train, assert_equal, assert_replicas_agree, main_rank, trainer
from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_vision_models import make_vision_batch, make_vision_model

_GRIDS = [[[1, 4, 4]], [], [[1, 4, 6], [1, 2, 2]], [[1, 6, 4]], [], [[1, 2, 8]], [[1, 8, 8]], []] * 2
_VIDEOS = {1: [2, 4, 4], 3: [3, 2, 4]}
_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def train(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Train:
    def make(kind: str, path: Path) -> None:
        make_vision_model(kind, path, tie_word_embeddings=True)

    batch = make_vision_batch(_GRIDS, seed=1, videos=_VIDEOS)
    return trainer(ranks, tmp_path_factory.mktemp("vision"), batch, make, multimodal_keys={"image": "images"})


@pytest.mark.parametrize(
    ("kind", "world_size", "layout", "settings"),
    [
        ("qwen3_vl", 2, "", {}),
        ("qwen3_vl", 2, "tp2 sp", _RECOMPUTED),
        ("qwen3_vl", 2, "pp2", _RECOMPUTED),
        ("qwen3_vl", 4, "tp2 sp cp2 distopt", {}),
        ("qwen3_vl", 4, "tp2 pp2", {}),
        ("qwen3_5", 4, "tp2 sp cp2", {}),
        ("qwen3_5_moe", 4, "pp2 ep2", {}),
    ],
)
def test_images_train_like_on_one_rank(
    kind: str, world_size: int, layout: str, settings: dict[str, Any], train: Train
) -> None:
    reference = main_rank(train(kind, 1, "size16"))
    assert sum(".visual." in name for name in reference["gradients"]) > 20
    assert all(gradient.any() for name, gradient in reference["gradients"].items() if ".visual." in name)
    results = train(kind, world_size, layout, **settings)
    assert_equal(reference, results)
    assert_replicas_agree(results)


def test_a_checkpoint_with_a_tower_loads_on_another_layout(ranks: ForkServer, tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path / "hf")
    common = {"multimodal_keys": {"image": "images"}, "output_dir": str(tmp_path)}
    case = {"hf": str(tmp_path / "hf"), "save_after": [0]}
    saving = common | {"tensor_model_parallel_size": 2, "sequence_parallel": True, "save": str(tmp_path / "save")}
    first = ranks.run("tests.dist.checkpoint_cases:run", 2, args=saving, rollouts=[0], **case)
    loading = common | {"pipeline_model_parallel_size": 2, "load": str(tmp_path / "save")}
    for result in ranks.run("tests.dist.checkpoint_cases:run", 2, args=loading, rollouts=[], **case):
        assert (result["start"], result["error"]) == (1, "")
        assert sum(".visual." in name for name in result["weights_at_start"]) > 20
        for name, value in first[0]["weights"].items():
            assert torch.equal(result["weights_at_start"][name], value), name
