"""--fp8-format and its flags: built layers, settings and exports. FP8 products need a GPU and TransformerEngine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.process_groups import init_distributed
from slime.backends.training import pieces
from slime.backends.training.arguments import ParallelArgs, TrainerArgs
from slime.config.groups import RunConfig, from_args
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.fake_transformer_engine import fake_transformer_engine
from tests.unit.megatron_utils.tiny_trainer import make_args, make_hf_model, single_rank


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({}, "PackedAttention"),
        ({"transformer_impl": "transformer_engine"}, "TEDotProductAttention"),
        ({"fp8": "e4m3"}, "TEDotProductAttention"),
    ],
)
def test_flags_decide_which_layers_are_built(
    flags: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.backends.megatron_utils.model import build
    from slime.backends.megatron_utils.transformer_config import build_config
    from slime.models.hf_shape import read_shape

    make_hf_model("qwen3", tmp_path)
    built: list[str] = []
    monkeypatch.setattr(build, "PackedGPTModel", lambda config, block, **settings: built.append(str(block)))
    monkeypatch.setattr(build, "check_recipe", lambda config: None)
    with single_rank(), fake_transformer_engine():
        args = make_args(tmp_path, fp32=False, **flags)
        init_distributed(from_args(ParallelArgs, args), from_args(TrainerArgs, args))
        shape = read_shape(args.hf_checkpoint)
        build._family_model(shape, build_config(RunConfig.of(args), shape), 128, None, None)
    names = {"PackedAttention", "TEDotProductAttention", "TELayerNormColumnParallelLinear"}
    joined = {"TELayerNormColumnParallelLinear"} if flags else set()
    assert {name for name in names if f".{name}'" in built[0]} == {kind} | joined


@pytest.mark.parametrize(("recipe", "multiple"), [("blockwise", 16), ("mxfp8", 32)])
def test_tokens_come_in_the_multiples_that_a_recipe_asks_for(recipe: str, multiple: int) -> None:
    from slime.backends.megatron_utils.precision import token_multiple

    def config(fp8: str | None) -> Any:
        return type("Config", (), {"fp8": fp8, "fp8_recipe": recipe})

    assert (token_multiple(config("e4m3")), token_multiple(config(None))) == (multiple, 1)


def test_megatron_is_told_the_recipe_and_where_weights_are_in_fp8(tmp_path: Path) -> None:
    from slime.backends.megatron_utils.transformer_config import transformer_config_kwargs

    make_hf_model("qwen3", tmp_path)
    settings = {"fp8": "e4m3", "fp8_recipe": "custom", "fp8_quantizer_factory": "a.b", "fp8_param_gather": True}
    kwargs = transformer_config_kwargs(RunConfig.of(make_args(tmp_path, **settings)))
    told = {name: kwargs[name] for name in ("fp8", "fp8_recipe", "fp8_quantizer_factory", "fp8_param")}
    assert told == {"fp8": "e4m3", "fp8_recipe": "custom", "fp8_quantizer_factory": "a.b", "fp8_param": True}


def test_a_factory_that_is_no_function_is_named_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import fp8_utils

    from slime.backends.megatron_utils.precision import check_recipe

    def with_engine(config: Any) -> Any:  # what get_fp8_recipe comes to where TransformerEngine is installed
        return fp8_utils._get_custom_recipe(config.fp8_quantizer_factory)

    monkeypatch.setattr(fp8_utils, "get_fp8_recipe", with_engine)
    config = type("Config", (), {"fp8": "e4m3", "fp8_recipe": "custom", "fp8_quantizer_factory": "no.such.function"})
    with pytest.raises(
        ConfigError, match=r"--fp8-quantizer-factory no.such.function: Failed to import module 'no.such"
    ):
        check_recipe(config)


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.data_ptr() == other.data_ptr() and tensor.dtype == other.dtype


def test_weights_in_fp8_are_exported_and_saved_as_what_they_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import fp8_utils

    from slime.backends.megatron_utils.actor import MegatronTrainer

    make_hf_model("qwen3", tmp_path / "hf")
    with single_rank():
        args = make_args(tmp_path / "hf", fp32=False, save=str(tmp_path / "saved"))
        trainer = MegatronTrainer(args, rank=0, world_size=1, with_ref=False)
        trainer.setup()
        plain = {name: value.clone() for name, value in trainer.export_weights()}
        weights = [
            parameter for name, parameter in trainer._ready.chunks[0].named_parameters() if ".mlp.linear_fc" in name
        ]
        events: list[str] = []

        def is_fp8(x: Any) -> bool:
            return torch.is_tensor(x) and any(_is_same(x, weight) for weight in weights)

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            events.append("convert")
            return 3 * tensor.data

        def write(*given: Any) -> Any:
            events.append("write")
            return stock_write(*given)

        stock_write = pieces._write_item
        with monkeypatch.context() as patch:
            patch.setattr(fp8_utils, "is_float8tensor", is_fp8)
            patch.setattr(fp8_utils, "dequantize_fp8_tensor", convert)
            exported = {name: value.clone() for name, value in trainer.export_weights()}
            events.clear()
            patch.setattr(pieces, "_write_item", write)
            patch.setattr(pieces, "_NUM_THREADS", 1)
            trainer.save(0)
        written = "".join(event[0] for event in events)
        assert "cc" not in written, "a converted weight is written before the next one is converted"
        assert written.count("c") >= len(weights)
        changed = {name: 3 * value if ".mlp." in name else value for name, value in plain.items()}
        assert all(torch.equal(value, changed[name]) for name, value in exported.items())
        again = MegatronTrainer(
            make_args(tmp_path / "hf", fp32=False, load=str(tmp_path / "saved"), no_load_optim=True),
            rank=0,
            world_size=1,
            with_ref=False,
        )
        again.setup()
        assert all(torch.equal(value, changed[name]) for name, value in again.export_weights())
