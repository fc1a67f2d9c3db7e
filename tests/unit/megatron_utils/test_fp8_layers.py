"""--fp8-format: which classes are built. The layers themselves need a GPU and TransformerEngine; here are stand-ins."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from slime.backends.megatron_utils.patches.install import install


class TEColumnParallelLinear:
    """Stand-in."""


class TERowParallelLinear:
    """Stand-in."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine's layers, as Megatron wraps them."""
    install()
    module = ModuleType("megatron.core.extensions.transformer_engine")
    module.__dict__.update(TEColumnParallelLinear=TEColumnParallelLinear, TERowParallelLinear=TERowParallelLinear)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("engine")
def test_every_linear_layer_of_a_block_is_exchanged_and_nothing_else() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from slime.backends.megatron_utils.fp8_layers import with_fp8_layers

    dense = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    experts = get_gpt_layer_local_spec(num_experts=4, normalization="RMSNorm")
    block = TransformerBlockSubmodules(layer_specs=[dense, experts])
    before, after = str(block), str(with_fp8_layers(block))
    expected = before
    for old, new in ((ColumnParallelLinear, TEColumnParallelLinear), (RowParallelLinear, TERowParallelLinear)):
        assert str(old) in before
        expected = expected.replace(str(old), str(new))
    assert after == expected
    assert str(block) == before
    assert with_fp8_layers(None) is None


@pytest.mark.parametrize(("recipe", "multiple"), [("blockwise", 16), ("mxfp8", 32)])
def test_tokens_come_in_the_multiples_that_a_recipe_asks_for(recipe: str, multiple: int) -> None:
    install()
    from slime.backends.megatron_utils.fp8_layers import token_multiple

    def config(fp8: str | None) -> Any:
        return type("Config", (), {"fp8": fp8, "fp8_recipe": recipe})

    assert (token_multiple(config("e4m3")), token_multiple(config(None))) == (multiple, 1)
