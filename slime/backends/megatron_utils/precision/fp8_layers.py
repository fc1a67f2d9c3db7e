"""Linear layers of TransformerEngine in the place of Megatron's own: with --fp8-format their products are in FP8.

Megatron opens the FP8 context around every layer; only these layers look at it. The embedding, the LM head,
attention and norms stay what they are, in bf16, and so do the names of all weights. Called by ``model`` and ``setup``.
Written after Megatron's sources; nothing here has run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from slime.backends.megatron_utils.layer_specs import with_classes
from slime.utils.errors import ConfigError

__all__ = ["check_recipe", "readable", "token_multiple", "with_fp8_layers"]


def token_multiple(config: Any) -> int:
    """FP8 products take matrices whose rows, the tokens of a rank, come in multiples of this."""
    return int(fp8_utils.get_fp8_align_size(config.fp8_recipe)) if config.fp8 else 1


def check_recipe(config: Any) -> None:
    """Now, not in the first step.

    Raises:
        ConfigError: this TransformerEngine does not have the recipe, or --fp8-quantizer-factory names no function.
    """
    try:
        fp8_utils.get_fp8_recipe(config)
    except (ValueError, AssertionError) as error:
        name = str(getattr(config.fp8_recipe, "value", config.fp8_recipe))
        factory = f" with --fp8-quantizer-factory {config.fp8_quantizer_factory}" if name == "custom" else ""
        raise ConfigError(f"--fp8-recipe {name}{factory}: {error}") from error


def readable(weight: torch.Tensor) -> torch.Tensor:
    """``weight``, or with --fp8-param-gather what it stands for in bf16: values times scale."""
    if fp8_utils.is_float8tensor(weight):
        whole: torch.Tensor = fp8_utils.dequantize_fp8_tensor(weight)
        return whole.detach()
    return weight.detach()


def with_fp8_layers(spec: Any) -> Any:
    """A copy of ``spec``, Megatron's description of layers, with other classes for its linear layers."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    return with_classes(spec, {ColumnParallelLinear: TEColumnParallelLinear, RowParallelLinear: TERowParallelLinear})
