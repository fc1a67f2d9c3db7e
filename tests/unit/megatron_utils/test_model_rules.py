"""Rules of models with sparse attention, with a norm over all heads, and of training on images."""

from __future__ import annotations

import importlib
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron_utils.model_rules import sees_media, vision
from slime.models.family import families
from slime.models.hf_shape import shape_from_config
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.command_lines import problems_of, resolved, write_config
from tests.unit.megatron_utils.hub_models import QWEN3_4B
from tests.unit.megatron_utils.hub_sparse import GLM5, GLM52, MINIMAX_M2
from tests.unit.megatron_utils.hub_vision import QWEN3_VL_4B

_PP = "--pipeline-model-parallel-size"


@pytest.mark.parametrize(
    ("config", "words", "world_size", "message"),
    [
        (GLM5, "--mtp-num-layers 1", 1, "--mtp-num-layers 1 is not supported yet"),
        (GLM52, f"{_PP} 2", 2, f"{_PP} 2 begins a stage with layer 39 (counted from 0), which shares the indexer"),
        (QWEN3_4B, "--context-parallel-size 2 --allgather-cp", 2, "--allgather-cp is for sparse attention"),
        (QWEN3_4B, "--freeze-indexer", 1, "there is no indexer of sparse attention there"),
        (
            MINIMAX_M2,
            "--tensor-model-parallel-size 16 --sequence-parallel",
            16,
            "16 must not exceed the 8 key heads",
        ),
    ],
    ids=["prediction-layers", "stages", "gathering", "freezing", "key-heads"],
)
def test_what_such_a_model_cannot_do_is_named(
    config: dict[str, Any], words: str, world_size: int, message: str, tmp_path: Path
) -> None:
    problems = problems_of(write_config(tmp_path, config), words.split(), world_size=world_size)
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("config", "words", "world_size"),
    [
        # of the launch scripts, with fewer data-parallel ranks
        (GLM5, f"--sequence-parallel --tensor-model-parallel-size 4 {_PP} 4 --decoder-last-pipeline-num-layers 18", 16),
        (
            GLM52,
            f"{_PP} 8 --decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 16 "
            "--context-parallel-size 2 --allgather-cp --freeze-indexer "
            "--spec slime_plugins.models.glm5.glm5 get_glm5_spec",
            16,
        ),
        (GLM52, "--recompute-granularity selective", 1),
        (
            MINIMAX_M2,
            "--sequence-parallel --tensor-model-parallel-size 8 "
            "--spec slime_plugins.models.minimax_m2 get_minimax_m2_layer_spec",
            8,
        ),
        (QWEN3_4B, "--allgather-cp", 1),
    ],
    ids=["glm5", "glm5.2", "recompute", "minimax", "gathering-alone"],
)
def test_what_such_a_model_can_do_is_accepted(
    config: dict[str, Any], words: str, world_size: int, tmp_path: Path
) -> None:
    assert problems_of(write_config(tmp_path, config), words.split(), world_size=world_size) == []


def test_the_indexer_of_a_model_that_has_one_is_frozen_whether_asked_or_not(tmp_path: Path) -> None:
    assert resolved(write_config(tmp_path / "sparse", GLM5), []).freeze_indexer is True
    assert resolved(write_config(tmp_path / "full", QWEN3_4B), []).freeze_indexer is False


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, range(10)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6]),
        ({"index_topk_freq": 4}, [0, 1, 5, 9]),
        ({"index_topk_pattern": "FSSFSSSSFF"}, [0, 3, 8, 9]),
        ({"indexer_types": ["full"] + ["shared"] * 9, "index_topk_freq": 1}, [0]),
    ],
    ids=["all", "glm5.2", "no-offset", "pattern", "list"],
)
def test_layers_with_an_indexer_follow_from_the_config(changes: dict[str, Any], layers: Any) -> None:
    sparse = shape_from_config(GLM5 | {"num_hidden_layers": 10} | changes, "hub").sparse
    assert sparse is not None
    assert [layer for layer, has_indexer in enumerate(sparse.layers) if has_indexer] == list(layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk_pattern": "SFFF", "num_hidden_layers": 4}, "the first must have one"),
        ({"index_topk_pattern": "FF", "num_hidden_layers": 4}, "must declare for every layer"),
        ({"q_lora_rank": None}, "has q_lora_rank null"),
    ],
)
def test_an_indexer_without_what_it_needs_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        shape_from_config(GLM5 | changes, "hub")


def test_minimax_says_how_many_columns_rope_turns() -> None:
    shape = shape_from_config(MINIMAX_M2, "hub")
    assert shape.rotary_percent == 0.5
    assert shape.moe is not None
    assert (shape.moe.ffn_hidden_size, shape.moe.shared_size, all(shape.moe.layers)) == (1536, None, True)


KEYS = {"image": "images"}


def _image_problems(path: Path, config: dict[str, Any] = QWEN3_VL_4B, **flags: Any) -> list[str]:
    (path / "config.json").write_text(json.dumps(config))
    settings = {
        **{"hf_checkpoint": str(path), "multimodal_keys": KEYS, "spec": None, "custom_model_provider_path": None},
        **{"mtp_num_layers": None, "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None},
        **{"decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None},
    }
    return list(vision(Namespace(**settings | flags)))


def test_the_shape_of_a_released_model_has_its_tower_where_it_is_asked_for() -> None:
    assert shape_from_config(QWEN3_VL_4B, "hub").vision is None
    tower = shape_from_config(QWEN3_VL_4B, "hub", with_vision=True).vision
    assert tower is not None
    assert (tower.image_token, tower.video_token, tower.start_token) == (151655, 151656, 151652)
    assert (tower.num_deep_layers, tower.rope_sections, tower.merge_size) == (3, (24, 20, 20), 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_token_id": None}, "lacks image_token_id"),
        ({"vision_config": None}, "no vision tower that can be trained"),
        ({"text_config": QWEN3_VL_4B["text_config"] | {"rope_scaling": None}}, "three mrope_section"),
    ],
)
def test_a_config_that_does_not_say_how_images_are_seen_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_from_config(QWEN3_VL_4B | change, "hub", with_vision=True)


def test_text_alone_needs_no_tower(tmp_path: Path) -> None:
    assert _image_problems(tmp_path, QWEN3_4B, multimodal_keys=None) == []


def test_images_need_a_model_with_a_tower(tmp_path: Path) -> None:
    assert _image_problems(tmp_path) == []
    (problem,) = _image_problems(tmp_path, QWEN3_4B)
    assert "describes no vision tower that can be trained" in problem


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"multimodal_keys": {"audio": "sounds"}}, "--multimodal-keys names audio"),
        ({"custom_model_provider_path": "a.b"}, "with --custom-model-provider-path"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers 1 is not supported yet"),
        ({"pipeline_model_parallel_size": 18}, "leaves 2 layers to the first part of the model; it must have the 3"),
        (
            {"pipeline_model_parallel_size": 6, "virtual_pipeline_model_parallel_size": 3},
            "leaves 2 layers to the first part of the model; it must have the 3",
        ),
    ],
)
def test_what_does_not_go_with_images_is_said_before_anything_starts(
    flags: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (problem,) = _image_problems(tmp_path, **flags)
    assert message in problem


def test_as_many_stages_as_leave_the_first_layers_together_are_fine(tmp_path: Path) -> None:
    assert _image_problems(tmp_path, pipeline_model_parallel_size=12) == []


def test_a_launch_scripts_spec_stands_for_the_tower_where_there_is_no_flag_for_images() -> None:
    modules = {family.vision_spec for family in families().values() if family.vision_spec}
    assert len(modules) == 2
    for module in modules:
        function = f"get_{module.rpartition('.')[2]}_model_provider"
        assert callable(getattr(importlib.import_module(module), function))
        assert sees_media(Namespace(spec=[module, function]))
    assert not sees_media(Namespace(spec=["slime_plugins.models.qwen3_5", "get_qwen3_5_spec"]))
