"""The shape in every preset has as many parameters as the model has: three counts that know nothing of each other.

The model that transformers builds from the facts (on the meta device: shapes, no memory), the number its makers
publish, and the formula of ``slime plan`` applied to the preset's flags.
"""

from __future__ import annotations

import ast
from argparse import Namespace
from typing import Any

import pytest
import torch

from slime.config.plan.shape import read_shape
from slime.models.cost import num_active, num_parameters
from tests.unit.scripts.bash_arrays import model_words
from tools.hub_configs import PRESETS, model_of

# Names give rounded sizes, some with a vision tower or an MTP layer. The others are published to four digits.
ROUGH = {"qwen3.5-0.8B": 0.1, "qwen3.5-4B": 0.06}
# What flags alone do not say: sizes of delta nets and of the sparse-attention indexer, norms over all heads together.
NOT_IN_FLAGS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "glm_moe_dsa", "minimax_m2")


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def mtp_parameters(name: str) -> int:
    """transformers leaves multi-token prediction out: a layer, a projection of two streams into one, three norms."""
    hidden = PRESETS[name]["hidden"]
    layer = count(model_of(name).model.layers[-1])
    return PRESETS[name].get("mtp_layers", 0) * (layer + 2 * hidden**2 + 3 * hidden)


def namespace(name: str) -> Namespace:
    """MODEL_ARGS as the parser would leave them."""
    flags: dict[str, Any] = {}
    for word in model_words()[name]:
        if word.startswith("--"):
            key = word.removeprefix("--").replace("-", "_")
            flags[key] = True
        elif key == "moe_layer_freq":
            flags[key] = eval(word, {"__builtins__": {}})
        else:
            flags[key] = ast.literal_eval(word) if word[0].isdigit() else word
    return Namespace(**flags)


@pytest.mark.parametrize("name", [name for name, facts in PRESETS.items() if "billions" in facts])
def test_a_shape_has_as_many_parameters_as_the_model_that_was_published(name: str) -> None:
    facts = PRESETS[name]
    parameters = count(model_of(name)) + mtp_parameters(name)
    published = facts["billions"] * 1e9
    digits = 4 if facts["billions"] != round(facts["billions"]) else 2
    assert parameters == pytest.approx(published, rel=ROUGH.get(name, 10.0 ** (1 - digits) / 2))


@pytest.mark.parametrize("name", [name for name, facts in PRESETS.items() if facts["hf_type"] not in NOT_IN_FLAGS])
def test_the_flags_of_a_preset_say_exactly_the_model_that_transformers_builds(name: str) -> None:
    assert num_parameters(read_shape(namespace(name))) == count(model_of(name)) + mtp_parameters(name)


def test_the_active_parameters_of_experts_are_those_in_the_models_names() -> None:
    """235B-A22B and so on. DeepSeek-V3 publishes 37 billion, Moonlight 3, Kimi K2 32."""
    names = {"qwen3-30B-A3B": 3.3, "qwen3-235B-A22B": 22, "deepseek-v3": 37, "moonlight": 3, "kimi-k2": 32}
    names |= {"glm4.5-355B-A32B": 32}
    for name, billions in names.items():
        assert num_active(read_shape(namespace(name))) / 1e9 == pytest.approx(billions, rel=0.1), name
