"""A user's ``--spec``: its layers train, keep the weights of the family, and wrong functions are named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.command_lines import problems_of, write_config
from tests.unit.megatron_utils.hub_models import QWEN3_4B
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint, saved_tensors
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model

USER = "tests.unit.megatron_utils.user_specs"
Checkpoint = Callable[[str], Path]


pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("specs")

    def get(kind: str) -> Path:
        path = directory / kind
        if not path.exists():
            (make_hf_model if kind == "qwen3" else make_family_checkpoint)(kind, path)
        return path

    return get


def trainer_with(path: Path, function: str | None, **settings: Any) -> MegatronTrainer:
    spec = None if function is None else [USER, function]
    trainer = MegatronTrainer(make_args(path, spec=spec, **settings), rank=0, world_size=1, with_ref=False)
    trainer.setup()
    return trainer


@pytest.mark.parametrize(
    ("kind", "function", "settings"),
    [
        ("qwen3", "layer", {}),
        ("qwen3", "block", {}),
        ("qwen3", "provider", {}),
        ("qwen3_moe", "block", {}),
        ("deepseek_v3", "plain_block", {}),
        ("mimo", "plain_block", {"mtp_num_layers": 1, "enable_mtp_training": True}),
    ],
)
def test_layers_that_are_those_of_the_family_train_and_export_the_same(
    kind: str, function: str, settings: dict[str, Any], checkpoint: Checkpoint
) -> None:
    from tests.unit.megatron_utils import user_specs

    path = checkpoint(kind)
    calls = user_specs.CountedNorm.num_calls
    ours, plain = trainer_with(path, function, **settings), trainer_with(path, None, **settings)
    source = saved_tensors(path)
    exported = {name: value.clone() for name, value in ours.export_weights()}
    assert exported.keys() == dict(plain.export_weights()).keys()
    assert all(torch.equal(value, source[name]) for name, value in exported.items() if name in source)
    assert ours.train(0, make_batch()).steps == plain.train(0, make_batch()).steps
    for name, value in plain.export_weights():
        assert torch.equal(dict(ours.export_weights())[name], value), name
    assert (user_specs.CountedNorm.num_calls > calls) == (function == "block")


def test_a_class_of_the_users_computes_what_it_says(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = make_hf_model("qwen3", tmp_path / "halved")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.5
    model.save_pretrained(tmp_path / "halved")
    ours = trainer_with(checkpoint("qwen3"), "halved_attention").train(0, make_batch()).steps[0]
    halved = trainer_with(tmp_path / "halved", None).train(0, make_batch()).steps[0]
    plain = trainer_with(checkpoint("qwen3"), None).train(0, make_batch()).steps[0]
    name = "train_rollout_logprob_abs_diff"
    assert ours[name] == pytest.approx(halved[name], rel=1e-6)
    assert abs(ours[name] - plain[name]) > 1e-4


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "--spec: the function returned a NoneType; it must return a ModuleSpec of a layer"),
        (
            "transformer_engine",
            "--spec: TELinear is a class of TransformerEngine. Build the layers with use_transformer_engine=False",
        ),
    ],
)
def test_layers_that_cannot_be_built_are_named(function: str, message: str, checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_with(checkpoint("qwen3"), function)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{USER} without_stage", r"without_stage is called with \(args, config, vp_stage\), but its signature"),
        (f"{USER} absent", "has no 'absent'"),
        ("my.module spec", "--spec my.module spec: module 'my.module' cannot be imported"),
        ("my.module spec more", "give a module and a function"),
    ],
)
def test_a_function_that_cannot_be_called_is_named_before_the_start(words: str, message: str, tmp_path: Path) -> None:
    (problem,) = problems_of(write_config(tmp_path, QWEN3_4B), ["--spec", *words.split()])
    assert re.search(message, problem), problem


def test_a_function_that_fits_is_no_problem(tmp_path: Path) -> None:
    hf = write_config(tmp_path, QWEN3_4B)
    assert problems_of(hf, ["--spec", USER, "layer"]) == []
    assert problems_of(hf, ["--spec", "tests/unit/megatron_utils/user_specs.py:layer"]) == []
