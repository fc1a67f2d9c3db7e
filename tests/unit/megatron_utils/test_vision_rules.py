"""Images on the command line: which models see them, and which flags do not go with them."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron_utils.model_rules import sees_media, vision
from slime.models.family import families
from slime.models.hf_shape import shape_from_config
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.hub_models import QWEN3_4B
from tests.unit.megatron_utils.hub_vision import QWEN3_VL_4B

KEYS = {"image": "images"}


def _problems(path: Path, config: dict[str, Any] = QWEN3_VL_4B, **flags: Any) -> list[str]:
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
    assert _problems(tmp_path, QWEN3_4B, multimodal_keys=None) == []


def test_images_need_a_model_with_a_tower(tmp_path: Path) -> None:
    assert _problems(tmp_path) == []
    (problem,) = _problems(tmp_path, QWEN3_4B)
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
    (problem,) = _problems(tmp_path, **flags)
    assert message in problem


def test_as_many_stages_as_leave_the_first_layers_together_are_fine(tmp_path: Path) -> None:
    assert _problems(tmp_path, pipeline_model_parallel_size=12) == []


def test_a_launch_scripts_spec_stands_for_the_tower_where_there_is_no_flag_for_images() -> None:
    modules = {family.vision_spec for family in families().values() if family.vision_spec}
    assert len(modules) == 2
    for module in modules:
        function = f"get_{module.rpartition('.')[2]}_model_provider"
        assert callable(getattr(importlib.import_module(module), function))
        assert sees_media(Namespace(spec=[module, function]))
    assert not sees_media(Namespace(spec=["slime_plugins.models.qwen3_5", "get_qwen3_5_spec"]))
