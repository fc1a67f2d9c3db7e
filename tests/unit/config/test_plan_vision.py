"""The plan counts a vision tower as transformers builds it, where a run builds it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from slime.config.plan.vision import tower_parameters
from transformers import AutoConfig, AutoModel

from slime.config.plan.shape import read_shape

_SMALL = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 24}
_TEXT = {"num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 9}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3_vl_vision", {}),
        ("qwen3_vl_vision", _SMALL | {"deepstack_visual_indexes": [0, 2], "patch_size": 4}),
        ("qwen3_5_vision", {}),
        ("qwen3_5_moe_vision", _SMALL | {"spatial_merge_size": 1}),
    ],
)
def test_a_tower_has_as_many_parameters_as_transformers_builds(kind: str, config: dict[str, Any]) -> None:
    with torch.device("meta"):
        whole = AutoConfig.for_model(kind, **config)
        tower = AutoModel.from_config(whole)
    if kind == "qwen3_vl_vision":  # released checkpoints always name them
        config = {"deepstack_visual_indexes": list(whole.deepstack_visual_indexes)} | config
    assert tower_parameters(config) == sum(parameter.numel() for parameter in tower.parameters())


def test_the_tower_counts_where_prompts_have_images(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_vl", "text_config": _TEXT, "vision_config": _SMALL}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = Namespace(hf_checkpoint=str(tmp_path), multimodal_keys={"image": "images"})
    blind = Namespace(hf_checkpoint=str(tmp_path), multimodal_keys=None)
    assert read_shape(args).num_parameters - read_shape(blind).num_parameters == tower_parameters(_SMALL) > 0
