"""The models that the trainer builds from the tiny checkpoints of ``tiny_families``, on whatever groups exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from slime.backends.megatron_utils.model.build import build_model
from slime.backends.megatron_utils.transformer_config import build_config
from slime.config.groups import RunConfig
from slime.models.hf_shape import read_shape
from slime.models.shape import ModelShape
from tests.unit.megatron_utils.tiny_trainer import make_args


def shape_of(path: Path) -> ModelShape:
    return read_shape(str(path))


def build_family_model(path: Path, *, shape: ModelShape | None = None, **overrides: Any) -> Any:
    """This rank's part of the model that ``config.json`` in ``path`` describes, in eval mode, every weight NaN."""
    shape = shape or shape_of(path)
    is_fp32 = json.loads((path / "config.json").read_text())["dtype"] == "float32"
    num_stages = mpu.get_pipeline_model_parallel_world_size()
    settings = {
        "fp32": is_fp32,
        "tensor_model_parallel_size": mpu.get_tensor_model_parallel_world_size(),
        "sequence_parallel": mpu.get_tensor_model_parallel_world_size() > 1,
        "pipeline_model_parallel_size": num_stages,
        "expert_model_parallel_size": mpu.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": mpu.get_expert_tensor_parallel_world_size(),
        "decoder_first_pipeline_num_layers": 1 if num_stages > 1 else None,  # 3 layers do not divide
        "virtual_pipeline_model_parallel_size": None,
    }
    config = build_config(RunConfig.of(make_args(path, **(settings | overrides))), shape)
    model = build_model(shape, config, padded_vocab_size=128)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)  # whatever is not loaded shows
    return model.eval()
